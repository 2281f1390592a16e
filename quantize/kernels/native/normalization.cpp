// Normalization: y = (x - mean) / sqrt(variance + epsilon) * scale + B along the last axis of a float tensor.
//
// Inputs: x, scale, B; scale and B are constants with a value for each place of the last axis, and B may be missing. Attributes:
// `epsilon`, and `centred`: 1 for a layer norm, 0 for an RMS norm, where the mean counts as 0.
#include "operators.h"
#include "target.h"

namespace requant {
namespace {

constexpr Requirement require{"ai.requant.Normalization"};

class NormalizationKernel {
 public:
  explicit NormalizationKernel(const ort::Node& node) : target_(chosen()) {
    const ort::Tensor scale = node.constant(1), bias = node.constant(2);
    require(scale && scale.size() > 0, "scale must be a constant, and must not be empty");
    require(!bias || bias.size() == scale.size(), "B must have as many values as scale");
    norm_.scale.assign(scale.as<float>(), scale.as<float>() + scale.size());
    norm_.bias.assign(scale.size(), 0);
    if (bias) norm_.bias.assign(bias.as<float>(), bias.as<float>() + bias.size());
    norm_.epsilon = node.real_attribute("epsilon", 1e-5f);
    require(norm_.epsilon >= 0, "epsilon must not be negative");
    norm_.centred = node.attribute("centred", 1) != 0;
  }

  void run(const ort::Run& run) const {
    const ort::Tensor x = run.input(0);
    const int64_t count = static_cast<int64_t>(norm_.scale.size());
    require(!x.shape.empty() && x.shape.back() == count, "the last axis of x must have as many values as scale");
    float* const y = reinterpret_cast<float*>(run.output(x.shape));
    const int64_t rows = x.size() / count, together = std::max<int64_t>(1, kTogether / count);
    if (rows == 0) return;
    run.parallel(static_cast<size_t>(divided(rows, together)), [&](size_t index) {
      const int64_t first = static_cast<int64_t>(index) * together;
      target_.vectors.normalize(norm_, x.as<float>() + first * count, y + first * count, std::min(together, rows - first));
    });
  }

 private:
  static constexpr int64_t kTogether = 1 << 14;  // values that one task normalizes, about

  const Target& target_;
  Normalization norm_;
};

}  // namespace

std::vector<ort::CustomOp*> normalization_operators() {
  using enum ort::ElementType;
  return named<NormalizationKernel>("Normalization", {kFloat, kFloat, kFloat}, 2, {kFloat});
}

}  // namespace requant
