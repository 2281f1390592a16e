// Convolution with several channels in a group, as a product of matrices: patches by weights.
//
// A task copies the patches of some pixels to rows of `length` bytes (a 1x1 convolution reads its input as it is), and
// multiplies them by one panel of weights at a time. A panel holds the weights of two vectors of output channels; its
// bytes stand in the order in which the product reads them: quads of the patch, then channels, then the four of a quad.
// The file that includes this has included a product, in vectors or in tiles.
#pragma once

#include <algorithm>
#include <cstring>

#include "curve.h"
#include "scaled.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

class Dense final : public ConvolutionKernel {
 public:
  explicit Dense(Convolution made)
      : conv_(std::move(made)),
        depth_(conv_.inputs / conv_.group),
        width_(conv_.outputs / conv_.group),
        quads_((conv_.taps() * depth_ + kDepth - 1) / kDepth * (kDepth / 4)),
        panels_((width_ + kPanel - 1) / kPanel) {
    pack();
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

  // Some output channels.
  struct Panel {
    const float* multiplier;
    int64_t channel, channels;  // the first one, and their number
  };

  // Whether some rows of the input are the patches of these pixels, and can be read to the end of the last step.
  bool direct(int64_t first, int64_t count, int64_t pixels) const {
    const bool whole = conv_.taps() == 1 && conv_.stride[0] == 1 && conv_.stride[1] == 1 && conv_.group == 1;
    const bool bare = !(conv_.before[0] | conv_.before[1] | conv_.after[0] | conv_.after[1]);
    const int64_t read = kDepth == 4 ? count : (count + kRows - 1) / kRows * kRows;
    return whole && bare && (first + read - 1) * depth_ + 4 * quads_ <= pixels * depth_;
  }

  void pack() {
    const int64_t length = 4 * quads_, count = conv_.group * panels_;
    weights_.assign(count * quads_ * kPanel * 4, 0);
    sums_.assign(count * kPanel, 0);
    multiplier_.assign(count * kPanel, 0.0f);
    narrow_.assign(count, true);
    std::vector<int8_t> patch(length);
    for (int64_t o = 0; o < conv_.outputs; ++o) {
      const int64_t panel = o / width_ * panels_ + o % width_ / kPanel, lane = o % width_ % kPanel;
      int32_t sum = 0;
      std::fill(patch.begin(), patch.end(), 0);
      for (int64_t i = 0; i < depth_; ++i)  // from channel, tap to tap, channel
        for (int64_t tap = 0; tap < conv_.taps(); ++tap)
          sum += patch[tap * depth_ + i] = conv_.weights[(o * depth_ + i) * conv_.taps() + tap];
      for (int64_t quad = 0; quad < quads_; ++quad) {
        std::memcpy(&weights_[((panel * quads_ + quad) * kPanel + lane) * 4], &patch[4 * quad], 4);
        if (!fits_narrow(&patch[4 * quad])) narrow_[panel] = false;
      }
      sums_[panel * kPanel + lane] = conv_.bias[o] - (conv_.x_zero - kOffset) * sum;
      multiplier_[panel * kPanel + lane] = conv_.multiplier[o];
    }
    conv_.weights = {};
  }

  void compute(const Task& task, const Extent& extent) const {
    const auto [x, residual, y, first, count, group] = task;
    thread_local std::vector<uint8_t> scratch;  // grows to the largest task of a thread
    const uint8_t* patches = x + first * depth_;
    int64_t stride = depth_;
    if (!direct(first, count, extent.batch * extent.rows * extent.columns)) {
      stride = 4 * quads_;
      if (scratch.size() < static_cast<size_t>(pixels_ * stride + kShort)) scratch.resize(pixels_ * stride + kShort);
      gather(x, extent, first, count, group, scratch.data());
      patches = scratch.data();
    }
    const Task here{patches, residual, y, first, count, group};
    conv_.curve.empty() ? multiply_panels<false>(here, stride) : multiply_panels<true>(here, stride);
  }

  // Multiplies patches by all panels; `Curved`: the results are those of the curve. Here the task's x are its patches.
  template <bool Curved>
  void multiply_panels(const Task& task, int64_t stride) const {
    const Curve curve(conv_.curve);
    [[maybe_unused]] const Multiplier ready;
    for (int64_t index = 0; index < panels_; ++index) {
      const int64_t place = task.group * panels_ + index, channel = task.group * width_ + index * kPanel;
      const Panel panel{&multiplier_[place * kPanel], channel, std::min<int64_t>(kPanel, width_ - index * kPanel)};
      const uint8_t* w = reinterpret_cast<const uint8_t*>(&weights_[place * quads_ * kPanel * 4]);
      for (int64_t pixel = 0; pixel < task.count; pixel += kRows) {
        const int64_t corner = (task.first + pixel) * conv_.outputs + channel;
        multiply(task.x + pixel * stride, std::min<int64_t>(kRows, task.count - pixel), stride, w, quads_,
                 &sums_[place * kPanel], narrow_[place], [&](int64_t row, int64_t rows, const Ints(&sum)[4]) {
                   const int64_t at = corner + row * conv_.outputs;
                   Floats value[4];
                   for (int i = 0; i < 4; ++i) value[i] = real<Curved>(sum[i], panel.multiplier + i % 2 * kLanes);
                   if (task.residual != nullptr) add_residual(value, task.residual + at, rows, panel.channels);
                   write(Curved ? requantized(value, curve) : requantized(value, conv_.y_zero), rows, panel, task.y + at);
                 });
      }
    }
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

  // Returns what is rounded, or what the curve is a function of.
  template <bool Curved>
  Floats real(Ints sum, const float* multiplier) const {
    return Curved ? times_plus(floats(sum), load_floats(multiplier), fill_floats(conv_.offset)) : scaled(sum, multiplier);
  }

  // Looks up the results of one or two pixels, and writes them.
  void write(Bytes results, int64_t rows, const Panel& panel, uint8_t* to) const {
    uint8_t made[2][kPanel];
    store_bytes(made[0], results);
    if (conv_.table.size() == 256) look_up(made[0], made[0], kBytes, conv_.table.data());
    for (int64_t row = 0; row < rows; ++row, to += conv_.outputs) {
      if (conv_.table.size() > 256) look_up_channels(made[row], panel);
      panel.channels == kPanel ? std::memcpy(to, made[row], kPanel) : std::memcpy(to, made[row], panel.channels);
    }
  }

  static Bytes requantized(const Floats (&value)[4], int zero) {
    const float least = static_cast<float>(-zero), most = static_cast<float>(255 - zero);
    Ints made[4];
    for (int i = 0; i < 4; ++i) made[i] = rounded(value[i], least, most);
    return ordered(narrow(made, zero));
  }

  static Bytes requantized(const Floats (&value)[4], const Curve& curve) {
    Ints made[4];
    for (int i = 0; i < 4; ++i) made[i] = rounded(curve(value[i]), 0, 255);
    return ordered(narrow(made, 0));
  }

  void look_up_channels(uint8_t (&made)[kPanel], const Panel& panel) const {
    for (int64_t c = 0; c < panel.channels; ++c) made[c] = conv_.table[256 * (panel.channel + c) + made[c]];
  }

  // Adds the residual of one or two pixels; what is added to a second one that is not there has no effect.
  void add_residual(Floats (&value)[4], const uint8_t* residual, int64_t rows, int64_t channels) const {
    uint8_t part[2][kPanel];
    const uint8_t* from[2] = {residual, rows > 1 ? residual + conv_.outputs : residual};
    for (int row = 0; row < 2 && channels < kPanel; ++row)
      from[row] = static_cast<const uint8_t*>(std::memcpy(part[row], from[row], channels));
    for (int i = 0; i < 4; ++i)
      value[i] = plus(value[i], scaled(from[i / 2] + i % 2 * kLanes, conv_.residual_zero, conv_.residual_ratio));
  }

  Convolution conv_;
  int64_t depth_, width_;  // input and output channels of a group
  int64_t quads_, panels_; // quads of a patch, panels of a group
  int64_t pixels_ = 0;     // of one task
  std::vector<int8_t> weights_;
  std::vector<int32_t> sums_;  // the bias without the parts of x_zero and kOffset
  std::vector<float> multiplier_;
  std::vector<bool> narrow_;  // by panel: whether `dot_narrow` is exact
};

}  // namespace requant::REQUANT_TARGET
