// A matrix in float that becomes the weights of a product during a run: keys or values of attention.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "aligned.h"
#include "float_finish.h"
#include "panel.h"
#include "rounded_rows.h"
#include "scaled.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

// Rows of floats, `step` apart.
struct FloatRows {
  const float* first;
  int64_t step;
  const float* row(int64_t index) const { return first + index * step; }
};

// Weights of `width` channels, `depth` values each, in the order of `Packed`. Each channel has a scale of its own, and its
// values become integers from -127 to 127. A channel with an infinity or NaN has the scale NaN.
template <class Way>
class Operand {
 public:
  int64_t quads() const { return quads_; }
  const std::vector<Panel>& panels() const { return panels_; }
  const Channels& channels() const { return channels_; }
  float widest() const { return widest_; }  // the greatest scale of the rows taken; NaN if one is NaN

  // Takes rows as channels, times `factor`; behind them, up to a multiple of kLanes, come channels with results of -INFINITY.
  void take_rows(const FloatRows& rows, int64_t count, int64_t depth, float factor) {
    reshape(divided(count, kLanes) * kLanes, depth);
    thread_local Scratch scratch;
    uint8_t* const row = scratch.bytes(4 * quads_);
    float widest = 0, odd = 0;
    for (const Panel& panel : panels_)
      for (int64_t lane = 0; lane < panel.vectors * kLanes; ++lane) {
        const int64_t channel = panel.channel + lane;
        const bool there = channel < count;
        const float scale = there ? factor * round_row_evenly(rows.row(channel), depth, row) : 0.0f;
        channels_.scale[channel] = scale;
        widest = std::max(widest, std::abs(scale));
        odd += 0 * scale;
        channels_.bias[channel] = there ? 0.0f : -INFINITY;
        std::memset(row + (there ? depth : 0), 128, 4 * quads_ - (there ? depth : 0));
        place_row(row, panel, lane);
      }
    widest_ = widest + odd;
    finish();
  }

  // Takes columns as channels.
  void take_columns(const FloatRows& rows, int64_t count, int64_t width) {
    reshape(width, count);
    inverse_.assign(width_ + kLanes, 0);
    for (int64_t channel = 0; channel < width_; channel += kLanes) find_scales(rows, count, channel);
    for (const Panel& panel : panels_)
      for (int vector = 0; vector < panel.vectors; ++vector) {
        uint8_t* to = weights_of(panel, vector);
        const int64_t channel = panel.channel + panel.offset(vector, panel.vectors);
        for (int64_t quad = 0; quad < quads_; ++quad, to += panel.vectors * kBytes)
          store_bytes(to, rounded_quad(rows, count, 4 * quad, channel));
      }
    finish();
  }

 private:
  // Finds the panels; memory is kept for the next run.
  void reshape(int64_t width, int64_t depth) {
    if (width == width_ && depth == depth_) return;
    width_ = depth_ = -1;  // until all memory is there
    quads_ = Way::quads(std::max<int64_t>(depth, 1));
    const int64_t vectors = divided(width, kLanes), bytes = kBytes * quads_;
    weights_.assign(vectors * bytes, 0);
    starts_.assign(vectors * kLanes, 0);
    for (Aligned<float>* each : {&channels_.scale, &channels_.shift, &channels_.bias}) each->assign(width + kLanes, 0);
    panels_.clear();
    for (int64_t first = 0; first < vectors;) {
      const int64_t wide = Way::vectors(vectors - first, bytes / kLanes);
      Panel panel = panel_of_vectors(width, first, static_cast<int>(wide));
      panel.narrow = false;
      panel.start = starts_.data() + first * kLanes;
      panel.weights = weights_.data() + first * bytes;
      panels_.push_back(panel);
      first += wide;
    }
    width_ = width;
    depth_ = depth;
  }

  // Returns the weights of a vector of channels; those of its next quad stand a panel's vectors behind.
  uint8_t* weights_of(const Panel& panel, int64_t vector) {
    return weights_.data() + (panel.weights - weights_.data()) + vector * kBytes;
  }

  // Writes the bytes of a row, which are 128 too large, as those of a channel of a panel.
  void place_row(const uint8_t* row, const Panel& panel, int64_t lane) {
    uint8_t* to = weights_of(panel, lane / kLanes) + 4 * (lane % kLanes);
    for (int64_t quad = 0; quad < quads_; ++quad, to += panel.vectors * kBytes) {
      uint32_t four;
      std::memcpy(&four, row + 4 * quad, 4);
      four ^= 0x80808080u;
      std::memcpy(to, &four, 4);
    }
  }

  // Finds the scales of a vector of columns.
  void find_scales(const FloatRows& rows, int64_t count, int64_t channel) {
    const int64_t some = std::min<int64_t>(kLanes, width_ - channel);
    Floats least = fill_floats(0), most = least, odd = least;
    for (int64_t row = 0; row < count; ++row) {
      const Floats each = load_few(rows.row(row) + channel, some);
      least = smaller(least, each);
      most = larger(most, each);
      odd = times_plus(each, fill_floats(0), odd);
    }
    float low[kLanes], high[kLanes], strange[kLanes];
    store_floats(low, least);
    store_floats(high, most);
    store_floats(strange, odd);
    for (int64_t lane = 0; lane < some; ++lane) {
      const Even even = even_of({low[lane], high[lane], strange[lane] == 0});
      channels_.scale[channel + lane] = even.step;
      inverse_[channel + lane] = even.inverse;
    }
  }

  // Returns four neighbouring rows of a vector of columns as int8, the four of a column side by side.
  Bytes rounded_quad(const FloatRows& rows, int64_t count, int64_t row, int64_t channel) const {
    const int64_t some = std::min<int64_t>(kLanes, width_ - channel);
    const Floats inverse = load_floats(&inverse_[channel]);
    Floats value[4];
    for (int64_t i = 0; i < 4; ++i) {
      const bool there = row + i < count;
      value[i] = there ? times(load_few(rows.row(row + i) + channel, some), inverse) : fill_floats(0);
    }
    return signed_groups(rounded_bytes(value, 128));
  }

  // Finds what the sums of each channel begin with, and what zero points of rows add to them.
  void finish() {
    for (const Panel& panel : panels_)
      for (int vector = 0; vector < panel.vectors; ++vector) {
        Ints sum = nearest(fill_floats(0));
        const uint8_t* from = panel.weights + vector * kBytes;
        for (int64_t quad = 0; quad < quads_; ++quad, from += panel.vectors * kBytes)
          sum = dot(sum, fill(kOffset + 1), load_bytes(from));
        int32_t sums[kLanes];
        store_ints(sums, sum);
        int32_t* const start = starts_.data() + (panel.start - starts_.data()) + vector * kLanes;
        const int64_t channel = panel.channel + panel.offset(vector, panel.vectors);
        for (int64_t lane = 0; lane < panel.bytes; ++lane) {
          start[lane] = kOffset * sums[lane];
          channels_.shift[channel + lane] = channels_.scale[channel + lane] * static_cast<float>(sums[lane]);
        }
      }
  }

  int64_t width_ = 0, depth_ = 0, quads_ = 0;
  float widest_ = 0;
  Aligned<uint8_t> weights_;
  Aligned<int32_t> starts_;
  Aligned<float> inverse_;  // of the scales of columns; 0 where nothing is to be rounded
  Channels channels_;
  std::vector<Panel> panels_;
};

}  // namespace requant::REQUANT_TARGET
