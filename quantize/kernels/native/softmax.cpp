// Softmax: y = exp(x - most) / sum of exp(x - most) along an axis of a float tensor, where `most` is the greatest value.
//
// Input: x. Attribute: `axis`, -1 if it is not there.
#include <algorithm>
#include <numeric>

#include "operators.h"
#include "target.h"

namespace requant {
namespace {

constexpr Requirement require{"ai.requant.Softmax"};

class SoftmaxKernel {
 public:
  explicit SoftmaxKernel(const ort::Node& node) : target_(chosen()), axis_(node.attribute("axis", -1)) {}

  void run(const ort::Run& run) const {
    const ort::Tensor x = run.input(0);
    const int64_t rank = static_cast<int64_t>(x.shape.size()), axis = axis_ < 0 ? axis_ + rank : axis_;
    require(axis >= 0 && axis < rank, "x does not have the axis");
    float* const y = reinterpret_cast<float*>(run.output(x.shape));
    if (x.size() == 0) return;
    const int64_t classes = x.shape[axis];
    const int64_t inner = std::accumulate(x.shape.begin() + axis + 1, x.shape.end(), int64_t{1}, std::multiplies<>());
    // If the axis is the last one, its rows are the items; else the values behind the axis, for each index in front of it.
    const int64_t groups = inner == 1 ? 1 : x.size() / (classes * inner), items = x.size() / classes / groups;
    const int64_t together = divided(std::max<int64_t>(1, kTogether / classes), kAligned) * kAligned;
    const int64_t tasks = divided(items, together), item = inner == 1 ? classes : 1;
    run.parallel(static_cast<size_t>(groups * tasks), [&](size_t index) {
      const int64_t group = static_cast<int64_t>(index) / tasks, first = static_cast<int64_t>(index) % tasks * together;
      const int64_t at = group * classes * inner + first * item;
      target_.softmax({classes, inner, std::min(together, items - first)}, x.as<float>() + at, y + at);
    });
  }

 private:
  static constexpr int64_t kTogether = 1 << 15;  // values of one task, about
  static constexpr int64_t kAligned = 16;        // items of a task are whole vectors

  const Target& target_;
  int64_t axis_;
};

}  // namespace

std::vector<ort::CustomOp*> softmax_operators() {
  return named<SoftmaxKernel>("Softmax", {ort::kFloat}, 1, ort::kFloat);
}

}  // namespace requant
