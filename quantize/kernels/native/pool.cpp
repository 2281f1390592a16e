// MaxPool, AveragePool and GlobalAveragePool: the largest value, or the mean, of each channel under a kernel or of an image;
// uint8 NHWC.
//
// Inputs of MaxPool: x. Inputs of the others: x, x_scale, x_zero_point, y_scale, y_zero_point; all but x are constants.
// Attributes (GlobalAveragePool has none): kernel_shape, strides, pads, dilations, ceil_mode and count_include_pad, as in
// ONNX. What is outside of the image is no candidate for the maximum, and 0 in a mean.
//
//   mean:  y = clip(rint(x_scale / (y_scale count) * (sum x - inside x_zero_point)) + y_zero_point)
//
// `inside` is the number of values under the kernel, and `count` too, or all taps of the kernel with count_include_pad; with
// ceil_mode also those behind the padding, which ONNX does not count: no model that requant writes has both.
#include <algorithm>

#include "operators.h"
#include "target.h"
#include "window.h"

namespace requant {
namespace {

constexpr Requirement require{"ai.requant: a pool"};

constexpr int64_t kMostPixels = int64_t{1} << 23;  // of one mean: their sum fits in 31 bits

// Moves a kernel over images, and calls a function for windows side by side with equal numbers of pixels.
class Pool {
 public:
  explicit Pool(const ort::Node& node)
      : ceil_(node.attribute("ceil_mode", 0) != 0), padding_counts_(node.attribute("count_include_pad", 0) != 0) {
    read_window(node, window_);
    read_pair(node, "kernel_shape", window_.kernel);
    for (int axis = 0; axis < 2; ++axis)
      require(std::max(window_.before[axis], window_.after[axis]) <= window_.dilation[axis] * (window_.kernel[axis] - 1),
              "pads must be smaller than the kernel");
  }

  int64_t taps() const { return window_.taps(); }

  // Calls reduce(windows, channels, to); `empty` is the result where no pixel is under the kernel.
  template <class Reduce>
  void run(const ort::Run& run, uint8_t empty, const Reduce& reduce) const {
    const ort::Tensor x = run.input(0);
    require(x.shape.size() == 4, "x must be (batch, height, width, channels)");
    const Extent extent{x.shape[0], x.shape[1], x.shape[2], length(0, x.shape[1]), length(1, x.shape[2])};
    require(extent.rows >= 0 && extent.columns >= 0, "x is smaller than the kernel");
    const int64_t channels = x.shape[3];
    uint8_t* y = run.output({extent.batch, extent.rows, extent.columns, channels});
    if (extent.batch * extent.rows * extent.columns * channels == 0) return;
    run.parallel(static_cast<size_t>(extent.batch * extent.rows), [&](size_t index) {
      const int64_t image = static_cast<int64_t>(index) / extent.rows, row = static_cast<int64_t>(index) % extent.rows;
      const uint8_t* from = x.as<uint8_t>() + image * extent.height * extent.width * channels;
      uint8_t* to = y + static_cast<int64_t>(index) * extent.columns * channels;
      const Taps down = taps(0, row, extent.height);
      for (int64_t column = 0; column < extent.columns;) {
        const Taps across = taps(1, column, extent.width);
        Windows windows = windows_at(from, extent, channels, down, across);
        windows.count = std::min(windows.count, static_cast<size_t>(extent.columns - column));
        if (windows.pixels() == 0)  // the taps of a dilated kernel lie on both sides of a small image
          std::fill_n(to, static_cast<int64_t>(windows.count) * channels, empty);
        else
          reduce(windows, static_cast<size_t>(channels), to);
        column += static_cast<int64_t>(windows.count);
        to += static_cast<int64_t>(windows.count) * channels;
      }
    });
  }

 private:
  // The length of an axis of the result, as the runtime computes it. It is 1 where the image is shorter than the kernel by less
  // than a stride. Rounded up, the last kernel may end behind the padding, but begins before it. -1 is returned without a length.
  int64_t length(int axis, int64_t input) const {
    const int64_t reach = window_.dilation[axis] * (window_.kernel[axis] - 1) + 1, stride = window_.stride[axis];
    const int64_t end = window_.before[axis] + input, free = end + window_.after[axis] - reach;
    if (free < 0 && padding_counts_) return -1;
    const int64_t more = ceil_ && free > 0 ? divided(free, stride) : free / stride;  // kernels behind the first one
    return more * stride >= end ? more : more + 1;
  }

  // Taps of the kernel along an axis that are inside of the image.
  struct Taps {
    int64_t begin, first, end;  // where the kernel begins in the image; the first tap, and the one behind the last
  };

  Taps taps(int axis, int64_t at, int64_t size) const {
    const int64_t begin = at * window_.stride[axis] - window_.before[axis], step = window_.dilation[axis];
    const int64_t outside = begin < 0 ? (step - 1 - begin) / step : 0;
    const int64_t inside = begin < size ? (size - begin + step - 1) / step : 0;
    return {begin, outside, std::min(window_.kernel[axis], inside)};
  }

  // Returns the window of the image under the kernel and those beside it that are as wide; at the border it is alone.
  Windows windows_at(const uint8_t* image, const Extent& extent, int64_t channels, const Taps& down, const Taps& across) const {
    const int64_t y = down.begin + down.first * window_.dilation[0], x = across.begin + across.first * window_.dilation[1];
    const int64_t reach = window_.dilation[1] * (window_.kernel[1] - 1) + 1, room = extent.width - reach - across.begin;
    const bool whole = across.first == 0 && across.end == window_.kernel[1];
    const auto taps_of = [](const Taps& some) { return static_cast<size_t>(std::max<int64_t>(some.end - some.first, 0)); };
    return {.first = image + (y * extent.width + x) * channels,
            .down = taps_of(down),
            .across = taps_of(across),
            .count = whole ? static_cast<size_t>(room / window_.stride[1] + 1) : 1,
            .down_step = window_.dilation[0] * extent.width * channels,
            .across_step = window_.dilation[1] * channels,
            .step = window_.stride[1] * channels};
  }

  Window window_;
  bool ceil_;
  bool padding_counts_;  // the versions of ONNX differ in how many taps of a kernel behind the padding count
};

class MaximumKernel {
 public:
  explicit MaximumKernel(const ort::Node& node) : target_(chosen()), pool_(node) {}

  void run(const ort::Run& run) const { pool_.run(run, 0, target_.vectors.max_windows); }

 private:
  const Target& target_;
  Pool pool_;
};

// The scales and zero points of a mean.
class Scales {
 public:
  explicit Scales(const ort::Node& node)
      : ratio_(positive(positive(one<float>(require, node, 1)) / positive(one<float>(require, node, 3)))),
        x_zero_(one<uint8_t>(require, node, 2)),
        y_zero_(one<uint8_t>(require, node, 4)) {}

  uint8_t zero() const { return static_cast<uint8_t>(y_zero_); }

  Mean mean(size_t count, size_t inside) const {
    return {ratio_ / static_cast<float>(count), static_cast<int>(inside) * x_zero_, y_zero_};
  }

 private:
  float ratio_;
  int x_zero_, y_zero_;
};

class MeanKernel {
 public:
  explicit MeanKernel(const ort::Node& node)
      : target_(chosen()), pool_(node), scales_(node), all_(node.attribute("count_include_pad", 0) != 0) {
    require(pool_.taps() <= kMostPixels, "the kernel has too many taps");
  }

  void run(const ort::Run& run) const {
    pool_.run(run, scales_.zero(), [&](const Windows& windows, size_t channels, uint8_t* to) {
      const size_t inside = windows.pixels(), count = all_ ? static_cast<size_t>(pool_.taps()) : inside;
      target_.vectors.mean_windows(windows, channels, scales_.mean(count, inside), to);
    });
  }

 private:
  const Target& target_;
  Pool pool_;
  Scales scales_;
  bool all_;
};

class GlobalMeanKernel {
 public:
  explicit GlobalMeanKernel(const ort::Node& node) : target_(chosen()), scales_(node) {}

  void run(const ort::Run& run) const {
    const ort::Tensor x = run.input(0);
    constexpr Requirement require{"ai.requant.GlobalAveragePool"};
    require(x.shape.size() == 4, "x must be (batch, height, width, channels)");
    const int64_t pixels = x.shape[1] * x.shape[2], channels = x.shape[3];
    require(pixels >= 1 && pixels <= kMostPixels, "x has no pixels, or too many");
    uint8_t* y = run.output({x.shape[0], 1, 1, channels});
    if (x.size() == 0) return;
    const size_t count = static_cast<size_t>(pixels);
    run.parallel(static_cast<size_t>(x.shape[0]), [&](size_t image) {
      const uint8_t* from = x.as<uint8_t>() + static_cast<int64_t>(image) * pixels * channels;
      const Windows whole{
          .first = from, .down = 1, .across = count, .count = 1, .down_step = 0, .across_step = channels, .step = 0};
      target_.vectors.mean_windows(whole, static_cast<size_t>(channels), scales_.mean(count, count),
                           y + static_cast<int64_t>(image) * channels);
    });
  }

 private:
  const Target& target_;
  Scales scales_;
};

}  // namespace

std::vector<ort::CustomOp*> maximum_operators() { return named<MaximumKernel>("MaxPool", {ort::kUint8}, 1); }

std::vector<ort::CustomOp*> mean_operators() {
  using enum ort::ElementType;
  return named<MeanKernel>("AveragePool", {kUint8, kFloat, kUint8, kFloat, kUint8}, 5);
}

std::vector<ort::CustomOp*> global_mean_operators() {
  using enum ort::ElementType;
  return named<GlobalMeanKernel>("GlobalAveragePool", {kUint8, kFloat, kUint8, kFloat, kUint8}, 5);
}

}  // namespace requant
