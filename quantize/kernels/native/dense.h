// Convolution with several channels in a group, as a product of matrices: patches by weights.
//
// A task copies the patches of some pixels to rows of `length` bytes (a 1x1 convolution reads its input as it is), and
// multiplies them by one panel of weights at a time. A panel holds the weights of two vectors of output channels; its
// bytes stand in the order in which the product reads them: quads of the patch, then channels, then the four of a quad.
// The file that includes this has included a product, in vectors or in tiles.
#pragma once

#include <algorithm>
#include <cstring>

#include "fine.h"
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
    [[maybe_unused]] const Multiplier ready;
    for (int64_t panel = 0; panel < panels_; ++panel) {
      const int64_t place = group * panels_ + panel, channel = group * width_ + panel * kPanel;
      const int64_t channels = std::min<int64_t>(kPanel, width_ - panel * kPanel);
      const uint8_t* w = reinterpret_cast<const uint8_t*>(&weights_[place * quads_ * kPanel * 4]);
      for (int64_t pixel = 0; pixel < count; pixel += kRows) {
        const int64_t corner = (first + pixel) * conv_.outputs + channel;
        multiply(patches + pixel * stride, std::min<int64_t>(kRows, count - pixel), stride, w, quads_,
                 &sums_[place * kPanel], narrow_[place], [&](int64_t row, const Ints(&sum)[2]) {
                   const int64_t at = corner + row * conv_.outputs;
                   finish(sum, place, residual == nullptr ? nullptr : residual + at, y + at, channel, channels);
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

  // Requantizes one pixel of a panel, with the residual if there is one, and looks it up.
  void finish(const Ints (&sum)[2], int64_t panel, const uint8_t* residual, uint8_t* to, int64_t channel,
              int64_t channels) const {
    const float least = static_cast<float>(-conv_.y_zero), most = static_cast<float>(conv_.levels - 1 - conv_.y_zero);
    const float* multiplier = &multiplier_[panel * kPanel];
    const bool whole = channels == kPanel;
    uint8_t part[kPanel] = {};
    Floats real[2] = {scaled(sum[0], multiplier), scaled(sum[1], multiplier + kLanes)};
    if (residual != nullptr) {
      if (!whole) residual = static_cast<const uint8_t*>(std::memcpy(part, residual, channels));
      for (int i = 0; i < 2; ++i)
        real[i] = plus(real[i], scaled(residual + i * kLanes, conv_.residual_zero, conv_.residual_ratio));
    }
    const Ints value[2] = {rounded(real[0], least, most), rounded(real[1], least, most)};
    uint8_t* made = whole ? to : part;
    if (conv_.levels > 256) {
      look_up_fine(value[0], value[1], conv_.y_zero, conv_.table.data(), made, made + kLanes, 4);
    } else {
      store_narrow(made, value[0], conv_.y_zero);
      store_narrow(made + kLanes, value[1], conv_.y_zero);
      if (conv_.table.size() == 256)
        look_up(made, made, kPanel, conv_.table.data());
      else if (!conv_.table.empty())
        for (int64_t c = 0; c < channels; ++c) made[c] = conv_.table[256 * (channel + c) + made[c]];
    }
    if (!whole) std::memcpy(to, part, channels);
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
