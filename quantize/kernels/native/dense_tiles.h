// Convolution with several channels in a group, in tiles: patches by panels of weights.
//
// A task copies the patches of some pixels to rows of `length` bytes (a 1x1 convolution reads its input as it is), and
// multiplies them by one panel of weights at a time. A panel holds the weights of two vectors of output channels; its
// bytes stand in the order in which the product reads them: quads of the patch, then channels, then the four of a quad.
#pragma once

#include <algorithm>
#include <cstring>

#include "aligned.h"
#include "finish.h"
#include "product_tiles.h"
#include "tables.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

class Dense final : public ConvolutionKernel {
 public:
  explicit Dense(Convolution made)
      : conv_(std::move(made)),
        finish_(conv_),
        depth_(conv_.inputs / conv_.group),
        width_(conv_.outputs / conv_.group),
        quads_((conv_.taps() * depth_ + kDepth - 1) / kDepth * (kDepth / 4)) {
    const int64_t count = conv_.group * ((width_ + kPanel - 1) / kPanel);
    weights_.assign(count * quads_ * kPanel * 4, 0);
    starts_.assign(count * kPanel, 0);
    multipliers_.assign(count * kPanel, 0.0f);
    for (int64_t index = 0; index < count; ++index) pack(index, count / conv_.group);
    conv_.weights = {};
    const int64_t fit = std::clamp<int64_t>(kPatches / (4 * quads_), kRows, 128);
    pixels_ = fit / kRows * kRows;
  }

  void run(const uint8_t* x, const uint8_t* residual, uint8_t* y, const Extent& extent,
           const Parallel& parallel) const override {
    const int64_t pixels = extent.batch * extent.rows * extent.columns;
    const int64_t tasks = (pixels + pixels_ - 1) / pixels_;
    parallel(static_cast<size_t>(tasks * conv_.group), [&](size_t index) {
      const int64_t first = static_cast<int64_t>(index) / conv_.group * pixels_;
      const Task task{x, residual, y, first, std::min(pixels_, pixels - first), static_cast<int64_t>(index) % conv_.group};
      compute(task, extent);
    });
  }

 private:
  // Some pixels of the result, in one group of channels.
  struct Task {
    const uint8_t *x, *residual;
    uint8_t* y;
    int64_t first, count, group;
  };

  // Packs the weights of a panel. Panels have two vectors; the last ones begin earlier, and have channels of others again.
  void pack(int64_t index, int64_t panels) {
    Panel panel;
    panel.channel = index / panels * width_ + std::min(index % panels * kPanel, std::max<int64_t>(0, width_ - kPanel));
    panel.last = std::clamp<int64_t>(width_ - kLanes, 0, kLanes);
    panel.bytes = std::min<int64_t>(kLanes, width_);
    panel.even = panel.last == kLanes && panel.bytes == kLanes;
    panel.start = &starts_[index * kPanel];
    panel.multiplier = &multipliers_[index * kPanel];
    panel.weights = reinterpret_cast<const uint8_t*>(&weights_[index * quads_ * kPanel * 4]);
    std::vector<int8_t> patch(4 * quads_);
    for (int64_t lane = 0; lane < kPanel; ++lane) {
      if (lane % kLanes >= panel.bytes) continue;
      const int64_t o = panel.channel + panel.offset(static_cast<int>(lane / kLanes), 2) + lane % kLanes;
      int32_t sum = 0;
      for (int64_t i = 0; i < depth_; ++i)  // from channel, tap to tap, channel
        for (int64_t tap = 0; tap < conv_.taps(); ++tap)
          sum += patch[tap * depth_ + i] = conv_.weights[(o * depth_ + i) * conv_.taps() + tap];
      for (int64_t quad = 0; quad < quads_; ++quad)
        std::memcpy(&weights_[((index * quads_ + quad) * kPanel + lane) * 4], &patch[4 * quad], 4);
      starts_[index * kPanel + lane] = conv_.bias[o] - conv_.x_zero * sum;
      multipliers_[index * kPanel + lane] = conv_.multiplier[o];
    }
    panels_.push_back(panel);
  }

  // Whether some rows of the input are the patches of these pixels, and can be read to the end of the last step.
  bool direct(int64_t first, int64_t count, int64_t pixels) const {
    const int64_t read = (count + kRows - 1) / kRows * kRows;
    return conv_.pointwise() && conv_.group == 1 && (first + read - 1) * depth_ + 4 * quads_ <= pixels * depth_;
  }

  void compute(const Task& task, const Extent& extent) const {
    const auto [x, residual, y, first, count, group] = task;
    thread_local Scratch scratch;
    const uint8_t* patches = x + first * depth_;
    int64_t stride = depth_;
    if (!direct(first, count, extent.batch * extent.rows * extent.columns)) {
      stride = 4 * quads_;
      uint8_t* const gathered = scratch.bytes(pixels_ * stride + kShort);
      gather(x, extent, first, count, group, gathered);
      patches = gathered;
    }
    const Multiplier ready;
    const int64_t panels = static_cast<int64_t>(panels_.size()) / conv_.group;
    for (int64_t index = group * panels; index < (group + 1) * panels; ++index) {
      const Panel& panel = panels_[index];
      for (int64_t pixel = 0; pixel < count; pixel += kRows) {
        const int64_t at = (first + pixel) * conv_.outputs + panel.channel;
        const Place place{y + at, residual ? residual + at : nullptr};
        multiply(patches + pixel * stride, std::min<int64_t>(kRows, count - pixel), stride, quads_, panel, place);
      }
    }
    look_up_all(conv_, y + first * conv_.outputs + group * width_, count, group * width_, width_);
  }

  static constexpr int64_t kShort = 32;  // bytes: fewer are copied as so many

  // Copies the patches of some pixels, one after the other; what lies outside of the image is x_zero. May write `kShort`
  // bytes behind them.
  void gather(const uint8_t* x, const Extent& extent, int64_t first, int64_t count, int64_t group, uint8_t* to) const {
    const int64_t used = conv_.taps() * depth_, span = conv_.kernel[1] * depth_;
    const int64_t reach = (conv_.kernel[1] - 1) * conv_.dilation[1];
    const bool joined = conv_.group == 1 && conv_.dilation[1] == 1;  // a row of taps is one piece of the image
    const int64_t size = extent.height * extent.width * conv_.inputs;  // of an image
    const uint8_t* end = x + extent.batch * size;
    int64_t column = first % extent.columns, row = first / extent.columns % extent.rows;
    const uint8_t* image = x + first / extent.columns / extent.rows * size;
    for (int64_t pixel = 0; pixel < count; ++pixel, to += 4 * quads_) {
      const int64_t left = column * conv_.stride[1] - conv_.before[1];
      uint8_t* line = to;
      for (int64_t ky = 0; ky < conv_.kernel[0]; ++ky, line += span) {
        const int64_t yy = row * conv_.stride[0] - conv_.before[0] + ky * conv_.dilation[0];
        const uint8_t* from = image + (yy * extent.width + left) * conv_.inputs + group * depth_;
        if (yy < 0 || yy >= extent.height)
          std::memset(line, conv_.x_zero, span);
        else if (joined && left >= 0 && left + reach < extent.width)
          span <= kShort && end - from >= kShort ? std::memcpy(line, from, kShort) : std::memcpy(line, from, span);
        else
          gather_taps(from, left, extent.width, line);
      }
      std::memset(to + used, 0, 4 * quads_ - used);  // its weights are 0
      if (++column < extent.columns) continue;
      column = 0;
      if (++row < extent.rows) continue;
      row = 0;
      image += size;
    }
  }

  // Copies the taps of one row of the kernel.
  void gather_taps(const uint8_t* from, int64_t left, int64_t width, uint8_t* to) const {
    for (int64_t kx = 0; kx < conv_.kernel[1]; ++kx, to += depth_) {
      const int64_t offset = kx * conv_.dilation[1], xx = left + offset;
      if (xx < 0 || xx >= width)
        std::memset(to, conv_.x_zero, depth_);
      else
        std::memcpy(to, from + offset * conv_.inputs, depth_);
    }
  }

  // Multiplies up to 32 rows by a panel, and writes the results.
  void multiply(const uint8_t* rows, int64_t count, int64_t stride, int64_t quads, const Panel& panel, Place place) const {
    alignas(64) int32_t sums[kRows * kPanel];
    multiply_tiles(rows, count, stride, panel.weights, quads, sums);
    const Ints start[2] = {load_ints(panel.start), load_ints(panel.start + kLanes)};
    const auto sum = [&](int64_t row, int vector) {
      return add(load_ints(sums + row * kPanel + vector * kLanes), start[vector]);
    };
    int64_t row = 0;
    for (; row + 2 <= count; row += 2) {
      const Ints both[2][2] = {{sum(row, 0), sum(row, 1)}, {sum(row + 1, 0), sum(row + 1, 1)}};
      finish_.write(both, panel, place);
      place.to += 2 * conv_.outputs;
      if (place.residual) place.residual += 2 * conv_.outputs;
    }
    if (row == count) return;
    const Ints one[1][2] = {{sum(row, 0), sum(row, 1)}};
    finish_.write(one, panel, place);
  }

  Convolution conv_;
  Finish finish_;
  int64_t depth_, width_;  // input and output channels of a group
  int64_t quads_;          // of a patch
  int64_t pixels_ = 0;     // of one task
  Aligned<int8_t> weights_;
  Aligned<int32_t> starts_;  // the bias without the part of x_zero
  Aligned<float> multipliers_;
  std::vector<Panel> panels_;  // those of a group follow each other
};

}  // namespace requant::REQUANT_TARGET
