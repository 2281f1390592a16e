// GlobalAveragePool: the mean of each channel of an image, uint8 NHWC (N, H, W, C) to (N, 1, 1, C).
//
// Inputs: x, x_scale, x_zero_point, y_scale, y_zero_point; all but x are constants.
//
//   y = clip(rint(x_scale / (y_scale H W) * (sum x - H W x_zero_point)) + y_zero_point)
#include <algorithm>
#include <cmath>

#include "operators.h"
#include "target.h"

namespace requant {
namespace {

class AverageKernel {
 public:
  explicit AverageKernel(const ort::Node& node)
      : target_(chosen()),
        ratio_(one<float>(node, 1) / one<float>(node, 3)),
        x_zero_(one<uint8_t>(node, 2)),
        y_zero_(one<uint8_t>(node, 4)) {}

  void run(const ort::Run& run) const {
    const ort::Tensor x = run.input(0);
    if (x.shape.size() != 4) throw ort::Failure("ai.requant.GlobalAveragePool: x must be (batch, height, width, channels)");
    const int64_t pixels = x.shape[1] * x.shape[2], channels = x.shape[3];
    if (pixels < 1 || pixels > kMost) throw ort::Failure("ai.requant.GlobalAveragePool: x has no pixels, or too many");
    uint8_t* y = run.output({x.shape[0], 1, 1, channels});
    if (x.size() == 0) return;
    run.parallel(static_cast<size_t>(x.shape[0]), [&](size_t image) {
      const uint8_t* from = x.as<uint8_t>() + static_cast<int64_t>(image) * pixels * channels;
      average(from, pixels, channels, y + static_cast<int64_t>(image) * channels);
    });
  }

 private:
  static constexpr int64_t kMost = int64_t{1} << 23;  // pixels whose sum fits in 31 bits

  template <class T>
  static T one(const ort::Node& node, size_t index) {
    const ort::Tensor tensor = node.constant(index);
    if (!tensor || tensor.size() != 1)
      throw ort::Failure("ai.requant.GlobalAveragePool: scales and zero points must be constants of one value");
    return tensor.as<T>()[0];
  }

  void average(const uint8_t* from, int64_t pixels, int64_t channels, uint8_t* to) const {
    thread_local std::vector<uint32_t> sums;  // grows to the largest number of channels
    if (sums.size() < static_cast<size_t>(channels)) sums.resize(channels);
    target_.add_pixels(from, pixels, channels, sums.data());
    const float multiplier = ratio_ / static_cast<float>(pixels);
    for (int64_t c = 0; c < channels; ++c) {
      const float mean = multiplier * static_cast<float>(static_cast<int64_t>(sums[c]) - pixels * x_zero_);
      to[c] = static_cast<uint8_t>(std::clamp(std::nearbyintf(mean) + static_cast<float>(y_zero_), 0.0f, 255.0f));
    }
  }

  const Target& target_;
  float ratio_;
  int x_zero_, y_zero_;
};

}  // namespace

std::vector<ort::CustomOp*> average_operators() {
  using enum ort::ElementType;
  return named<AverageKernel>("GlobalAveragePool", 1, {kUint8, kFloat, kUint8, kFloat, kUint8}, 5);
}

}  // namespace requant
