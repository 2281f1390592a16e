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
      if (scratch.size() < static_cast<size_t>(pixels_ * stride)) scratch.resize(pixels_ * stride);
      gather(x, extent, first, count, group, scratch.data());
      patches = scratch.data();
    }
    const Curve curve(conv_.curve);
    [[maybe_unused]] const Multiplier ready;
    for (int64_t index = 0; index < panels_; ++index) {
      const int64_t place = group * panels_ + index, channel = group * width_ + index * kPanel;
      const Panel panel{&multiplier_[place * kPanel], channel, std::min<int64_t>(kPanel, width_ - index * kPanel)};
      const uint8_t* w = reinterpret_cast<const uint8_t*>(&weights_[place * quads_ * kPanel * 4]);
      for (int64_t pixel = 0; pixel < count; pixel += kRows) {
        multiply(patches + pixel * stride, std::min<int64_t>(kRows, count - pixel), stride, w, quads_,
                 &sums_[place * kPanel], narrow_[place], [&](int64_t row, int64_t rows, const Ints(&sum)[4]) {
                   const int64_t corner = (first + pixel + row) * conv_.outputs + channel;
                   finish(sum, rows, panel, curve, residual == nullptr ? nullptr : residual + corner, y + corner);
                 });
      }
    }
  }

  // Copies the patches of some pixels, one after the other; what lies outside of the image is x_zero.
  void gather(const uint8_t* x, const Extent& extent, int64_t first, int64_t count, int64_t group, uint8_t* to) const {
    const int64_t used = conv_.taps() * depth_, span = conv_.kernel[1] * depth_;
    const int64_t reach = (conv_.kernel[1] - 1) * conv_.dilation[1];
    const bool joined = conv_.group == 1 && conv_.dilation[1] == 1;  // a row of taps is one piece of the image
    for (int64_t pixel = first; pixel < first + count; ++pixel, to += 4 * quads_) {
      const int64_t column = pixel % extent.columns, row = pixel / extent.columns % extent.rows;
      const uint8_t* image = x + pixel / extent.columns / extent.rows * extent.height * extent.width * conv_.inputs;
      const int64_t left = column * conv_.stride[1] - conv_.before[1];
      uint8_t* line = to;
      for (int64_t ky = 0; ky < conv_.kernel[0]; ++ky, line += span) {
        const int64_t yy = row * conv_.stride[0] - conv_.before[0] + ky * conv_.dilation[0];
        const uint8_t* from = image + (yy * extent.width + left) * conv_.inputs + group * depth_;
        if (yy < 0 || yy >= extent.height)
          std::memset(line, conv_.x_zero, span);
        else if (joined && left >= 0 && left + reach < extent.width)
          std::memcpy(line, from, span);
        else
          gather_taps(from, left, extent.width, line);
      }
      std::memset(to + used, 0, 4 * quads_ - used);  // its weights are 0
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

  // Makes results of the sums of one or two pixels, first those of one pixel, and writes them.
  void finish(const Ints (&sum)[4], int64_t rows, const Panel& panel, const Curve& curve, const uint8_t* residual,
              uint8_t* to) const {
    Floats value[4];
    for (int i = 0; i < 4; ++i) {
      const float* multiplier = panel.multiplier + i % 2 * kLanes;
      value[i] = conv_.curve.empty() ? scaled(sum[i], multiplier)
                                     : times_plus(floats(sum[i]), load_floats(multiplier), fill_floats(conv_.offset));
    }
    for (int64_t row = 0; residual != nullptr && row < rows; ++row)
      add_residual(&value[2 * row], residual + row * conv_.outputs, panel.channels);
    uint8_t made[2][kPanel];
    store_bytes(made[0], conv_.curve.empty() ? requantized(value, conv_.y_zero) : requantized(value, curve));
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

  void add_residual(Floats* value, const uint8_t* residual, int64_t channels) const {
    uint8_t part[kPanel];
    if (channels < kPanel) residual = static_cast<const uint8_t*>(std::memcpy(part, residual, channels));
    for (int i = 0; i < 2; ++i)
      value[i] = plus(value[i], scaled(residual + i * kLanes, conv_.residual_zero, conv_.residual_ratio));
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
