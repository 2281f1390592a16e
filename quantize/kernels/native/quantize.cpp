// Quantize: QuantizeLinear of an image in float, whose result is in NHWC.
//
// Inputs: x, y_scale, y_zero_point; the last two are constants with one value. x is (batch, channels, height, width) with one
// to three channels, and the result (batch, height, width, channels).
#include <algorithm>

#include "operators.h"
#include "target.h"

namespace requant {
namespace {

constexpr Requirement require{"ai.requant.Quantize"};

class QuantizeKernel {
 public:
  explicit QuantizeKernel(const ort::Node& node) : target_(chosen()) {
    planes_.scale = positive(one<float>(require, node, 1));
    require(planes_.scale > 0x1p-60f && planes_.scale < 0x1p60f, "y_scale must be between 2^-60 and 2^60");
    planes_.zero = one<uint8_t>(require, node, 2);
  }

  void run(const ort::Run& run) const {
    const ort::Tensor x = run.input(0);
    require(x.shape.size() == 4, "x must be (batch, channels, height, width)");
    require(x.shape[1] >= 1 && x.shape[1] <= 3, "x must have 1 to 3 channels");
    const int64_t batch = x.shape[0], pixels = x.shape[2] * x.shape[3], parts = divided(pixels, kPixels);
    uint8_t* const y = run.output({batch, x.shape[2], x.shape[3], x.shape[1]});
    Planes planes = planes_;
    planes.channels = x.shape[1];
    planes.step = pixels;
    run.parallel(static_cast<size_t>(batch * parts), [&](size_t index) {
      const int64_t image = static_cast<int64_t>(index) / parts * pixels, first = static_cast<int64_t>(index) % parts * kPixels;
      target_.vectors.quantize_pixels(x.as<float>() + image * planes.channels + first, std::min(kPixels, pixels - first), planes,
                              y + (image + first) * planes.channels);
    });
  }

 private:
  static constexpr int64_t kPixels = 1 << 12;  // of one task

  const Target& target_;
  Planes planes_{};
};

}  // namespace

std::vector<ort::CustomOp*> quantize_operators() {
  using enum ort::ElementType;
  return named<QuantizeKernel>("Quantize", {kFloat, kFloat, kUint8}, 3);
}

}  // namespace requant
