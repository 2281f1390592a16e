// Add and Mul: the sum and the product of two uint8 tensors, with a table behind the requantization.
//
// Inputs: a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point, table. All but a and b are constants;
// the table is (256,). b has the shape of a; or one value for each index of the first and of the last axis of a, or of the
// last axis alone: (N, 1, 1, C) or (1, 1, 1, C) for (N, H, W, C).
#include <algorithm>

#include "operators.h"
#include "target.h"

namespace requant {
namespace {

constexpr size_t kChunk = 1 << 14;  // elements of one task, about

enum Input : size_t { kA, kAScale, kAZero, kB, kBScale, kBZero, kYScale, kYZero, kTable };

template <bool Product>
class PairKernel {
 public:
  explicit PairKernel(const ort::Node& node) {
    const float a = positive(one<float>(require, node, kAScale)), b = positive(one<float>(require, node, kBScale));
    const float y = positive(one<float>(require, node, kYScale));
    pair_ = {Product,
             {Product ? 1.0f : positive(a / y), positive(Product ? a * b / y : b / y)},
             {one<uint8_t>(require, node, kAZero), one<uint8_t>(require, node, kBZero)},
             one<uint8_t>(require, node, kYZero)};
    target_ = &chosen_for(pair_);
    const ort::Tensor table = node.constant(kTable);
    if (!table) return;
    require(table.shape == std::vector<int64_t>{256}, "the table must be (256,)");
    table_.assign(table.as<uint8_t>(), table.as<uint8_t>() + table.size());
  }

  void run(const ort::Run& run) const {
    const ort::Tensor a = run.input(kA), b = run.input(kB);
    const size_t size = static_cast<size_t>(a.size());
    const Match match = match_of(a, b);
    uint8_t* y = run.output(a.shape);
    if (size == 0) return;
    const size_t image = size / match.images, period = match.period;
    const size_t unit = period ? std::max<size_t>(1, kChunk / period) * period : kChunk;
    const size_t tasks = (image + unit - 1) / unit;  // of an image
    run.parallel(match.images * tasks, [&](size_t index) {
      const size_t inside = index % tasks * unit, first = index / tasks * image + inside;
      const size_t count = std::min(unit, image - inside);
      const uint8_t* other = b.as<uint8_t>() + (period ? index / tasks * match.step : first);
      target_->vectors.combine(pair_, a.as<uint8_t>() + first, other, count, period ? period : count, y + first);
      if (!table_.empty()) target_->vectors.lookup(y + first, y + first, count, table_.data());
    });
  }

 private:
  static constexpr Requirement require{Product ? "ai.requant.Mul" : "ai.requant.Add"};

  // Which elements of b belong to a: `period` of them stand for all of an image, and those of the next image begin `step`
  // behind them. A period of 0: b has an element for each of a.
  struct Match {
    size_t images, period, step;
  };

  static Match match_of(const ort::Tensor& a, const ort::Tensor& b) {
    if (a.shape == b.shape) return {1, 0, 0};
    const size_t axes = a.shape.size();
    bool fits = axes > 1 && axes == b.shape.size() && a.shape.back() == b.shape.back();
    for (size_t axis = 0; fits && axis + 1 < axes; ++axis)
      fits = b.shape[axis] == 1 || (axis == 0 && b.shape[axis] == a.shape[axis]);
    require(fits, "b must have the shape of a, or one value for each index of the last axis");
    const size_t period = static_cast<size_t>(a.shape.back());
    return {static_cast<size_t>(a.shape[0]), period, b.shape[0] == 1 ? 0 : period};
  }

  const Target* target_;
  Pair pair_;
  std::vector<uint8_t> table_;
};

template <bool Product>
std::vector<ort::CustomOp*> operators_of(const char* name) {
  using enum ort::ElementType;
  return named<PairKernel<Product>>(name, {kUint8, kFloat, kUint8, kUint8, kFloat, kUint8, kFloat, kUint8, kUint8}, 8);
}

}  // namespace

std::vector<ort::CustomOp*> sum_operators() { return operators_of<false>("Add"); }
std::vector<ort::CustomOp*> product_operators() { return operators_of<true>("Mul"); }

}  // namespace requant
