// Softmax: y = exp(x - most) / sum of exp(x - most) along an axis of a float tensor, where `most` is the greatest value.
//
// Input: x. Attribute: `axis`, -1 if it is not there.
//
// DequantizeSoftmax: the same of DequantizeLinear(x, x_scale, x_zero_point), where x is uint8. The last two are constants with
// one value.
#include <algorithm>
#include <numeric>

#include "operators.h"
#include "target.h"

namespace requant {
namespace {

class Softmax {
 public:
  Softmax(const ort::Node& node, const Requirement& require) : require_(require), axis_(node.attribute("axis", -1)) {}

  // Calls work(size, at) for the items of each task: they begin at an index of x.
  template <class Work>
  void run(const ort::Run& run, const std::vector<int64_t>& shape, const Work& work) const {
    const int64_t rank = static_cast<int64_t>(shape.size()), axis = axis_ < 0 ? axis_ + rank : axis_;
    require_(axis >= 0 && axis < rank, "x does not have the axis");
    const int64_t whole = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    if (whole == 0) return;
    const int64_t classes = shape[axis];
    const int64_t inner = std::accumulate(shape.begin() + axis + 1, shape.end(), int64_t{1}, std::multiplies<>());
    // If the axis is the last one, its rows are the items; else the values behind the axis, for each index in front of it.
    const int64_t groups = inner == 1 ? 1 : whole / (classes * inner), items = whole / classes / groups;
    const int64_t together = divided(std::max<int64_t>(1, kTogether / classes), kAligned) * kAligned;
    const int64_t tasks = divided(items, together), item = inner == 1 ? classes : 1;
    run.parallel(static_cast<size_t>(groups * tasks), [&](size_t index) {
      const int64_t group = static_cast<int64_t>(index) / tasks, first = static_cast<int64_t>(index) % tasks * together;
      work(Classes{classes, inner, std::min(together, items - first)}, group * classes * inner + first * item);
    });
  }

 private:
  static constexpr int64_t kTogether = 1 << 15;  // values of one task, about
  static constexpr int64_t kAligned = 16;        // items of a task are whole vectors

  const Requirement& require_;
  int64_t axis_;
};

constexpr Requirement of_floats{"ai.requant.Softmax"}, of_bytes{"ai.requant.DequantizeSoftmax"};

class SoftmaxKernel {
 public:
  explicit SoftmaxKernel(const ort::Node& node) : target_(chosen()), softmax_(node, of_floats) {}

  void run(const ort::Run& run) const {
    const ort::Tensor x = run.input(0);
    float* const y = reinterpret_cast<float*>(run.output(x.shape));
    softmax_.run(run, x.shape, [&](const Classes& size, int64_t at) {
      target_.vectors.softmax(size, x.as<float>() + at, y + at);
    });
  }

 private:
  const Target& target_;
  Softmax softmax_;
};

class DequantizeSoftmaxKernel {
 public:
  explicit DequantizeSoftmaxKernel(const ort::Node& node) : target_(chosen()), softmax_(node, of_bytes) {
    scale_ = positive(one<float>(of_bytes, node, 1));
  }

  void run(const ort::Run& run) const {
    const ort::Tensor x = run.input(0);
    float* const y = reinterpret_cast<float*>(run.output(x.shape));
    softmax_.run(run, x.shape, [&](const Classes& size, int64_t at) {
      target_.vectors.softmax_of_bytes(size, x.as<uint8_t>() + at, scale_, y + at);
    });
  }

 private:
  const Target& target_;
  Softmax softmax_;
  float scale_;
};

}  // namespace

std::vector<ort::CustomOp*> softmax_operators() {
  return named<SoftmaxKernel>("Softmax", {ort::kFloat}, 1, {ort::kFloat});
}

std::vector<ort::CustomOp*> dequantize_softmax_operators() {
  using enum ort::ElementType;
  return named<DequantizeSoftmaxKernel>("DequantizeSoftmax", {kUint8, kFloat, kUint8}, 3, {kFloat});
}

}  // namespace requant
