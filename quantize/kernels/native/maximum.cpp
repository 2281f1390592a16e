// MaxPool: the largest value of each channel under a kernel, uint8 NHWC.
//
// Input: x. Attributes: kernel_shape, strides, pads, dilations, as in ONNX. What is outside of the image does not count.
#include <algorithm>

#include "operators.h"
#include "target.h"
#include "window.h"

namespace requant {
namespace {

class MaximumKernel {
 public:
  explicit MaximumKernel(const ort::Node& node) : target_(chosen()) {
    read_window(node, window_);
    read_pair(node, "kernel_shape", window_.kernel);
    for (int axis = 0; axis < 2; ++axis)
      if (std::max(window_.before[axis], window_.after[axis]) > window_.dilation[axis] * (window_.kernel[axis] - 1))
        throw ort::Failure("ai.requant.MaxPool: pads must be smaller than the kernel");
  }

  void run(const ort::Run& run) const {
    const ort::Tensor x = run.input(0);
    if (x.shape.size() != 4) throw ort::Failure("ai.requant.MaxPool: x must be (batch, height, width, channels)");
    const Extent extent{x.shape[0], x.shape[1], x.shape[2], window_.length(0, x.shape[1]), window_.length(1, x.shape[2])};
    if (extent.rows < 1 || extent.columns < 1) throw ort::Failure("ai.requant.MaxPool: x is smaller than the kernel");
    uint8_t* y = run.output({extent.batch, extent.rows, extent.columns, x.shape[3]});
    if (x.size() == 0) return;
    run.parallel(static_cast<size_t>(extent.batch * extent.rows), [&](size_t index) {
      const int64_t image = static_cast<int64_t>(index) / extent.rows;
      row(x.as<uint8_t>() + image * extent.height * extent.width * x.shape[3], extent, x.shape[3],
          static_cast<int64_t>(index) % extent.rows, y + static_cast<int64_t>(index) * extent.columns * x.shape[3]);
    });
  }

 private:
  // Computes one row of the result.
  void row(const uint8_t* from, const Extent& extent, int64_t channels, int64_t row, uint8_t* to) const {
    thread_local std::vector<const uint8_t*> pixels;  // grows to the largest kernel
    for (int64_t column = 0; column < extent.columns; ++column, to += channels) {
      pixels.clear();
      for (int64_t ky = 0; ky < window_.kernel[0]; ++ky) {
        const int64_t y = row * window_.stride[0] - window_.before[0] + ky * window_.dilation[0];
        for (int64_t kx = 0; kx < window_.kernel[1]; ++kx) {
          const int64_t x = column * window_.stride[1] - window_.before[1] + kx * window_.dilation[1];
          const bool inside = y >= 0 && y < extent.height && x >= 0 && x < extent.width;
          if (inside) pixels.push_back(from + (y * extent.width + x) * channels);
        }
      }
      if (pixels.empty())  // the taps of a dilated kernel lie on both sides of a small image
        std::fill_n(to, channels, 0);
      else
        target_.max_pixels(pixels.data(), pixels.size(), static_cast<size_t>(channels), to);
    }
  }

  const Target& target_;
  Window window_;
};

}  // namespace

std::vector<ort::CustomOp*> maximum_operators() {
  return named<MaximumKernel>("MaxPool", 1, {ort::kUint8}, 1);
}

}  // namespace requant
