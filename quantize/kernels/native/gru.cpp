// GRU: three gates, in the order z, r and n; see recurrent.h. If the attribute `linear_before_reset` is 0, the reset gate comes
// before the product of the state for n.
#include "recurrent.h"

namespace requant {
namespace {

constexpr Requirement require{"ai.requant.GRU"};
constexpr int64_t kGates = 3;

class GruCell : public Cell {
 public:
  // If there is a matrix `last`, the reset gate comes first.
  GruCell(const Matrix& state, const Matrix& last)
      : target_(chosen()), state_(target_.matrix(state)), last_(last.outputs > 0 ? target_.matrix(last) : nullptr) {}

  void advance(const Step& step) const override {
    thread_local Scratch products, states, candidates;
    const int64_t size = step.size, gates = last_ ? kGates - 1 : kGates;
    float* const h = products.floats(step.items * gates * size);
    multiply(*state_, step.before, h, step.items);
    const auto step_of = [&](int64_t item, const float* last) {
      return GruStep{.x = step.x + kGates * item * size,
                     .h = h + gates * item * size,
                     .last = last,
                     .before = step.before + item * size,
                     .size = size,
                     .reset_first = last_ != nullptr};
    };
    const auto next = [&](const float* last, int64_t apart) {
      for (int64_t item = 0; item < step.items; ++item)
        if (step.alive(item)) target_.vectors.next_state(step_of(item, last + item * apart), step.after + item * size);
    };
    if (!last_) return next(h + 2 * size, gates * size);
    float* const kept = states.floats(step.items * size);
    for (int64_t item = 0; item < step.items; ++item) target_.vectors.reset_state(step_of(item, nullptr), kept + item * size);
    float* const last = candidates.floats(step.items * size);
    multiply(*last_, kept, last, step.items);
    next(last, size);
  }

 private:
  const Target& target_;
  std::unique_ptr<MatrixKernel> state_, last_;  // the last one is null if the reset gate comes behind the product
};

// The biases of the state are added to the products of the input, except that of the candidate's product if the reset gate
// comes behind it.
std::unique_ptr<Cell> cell_of(const ort::Node& node, const Direction& direction) {
  const int64_t size = direction.size, first = direction.first;
  const bool reset_first = node.attribute("linear_before_reset", 0) == 0;
  Matrix state = rows_of(direction.state, first, (reset_first ? 2 : kGates) * size);
  for (int64_t i = 0; direction.state_bias && i < kGates * size; ++i)
    (reset_first || i < 2 * size ? direction.bias[i] : state.bias[i]) += direction.state_bias[i];
  require(state.fits(), "r has too many columns");
  return std::make_unique<GruCell>(state, reset_first ? rows_of(direction.state, first + 2 * size, size) : Matrix{});
}

struct GruOperator : Recurrent {
  explicit GruOperator(const ort::Node& node) : Recurrent(node, {require, kGates, false, cell_of}) {}
};

}  // namespace

std::vector<ort::CustomOp*> gru_operators() {
  using enum ort::ElementType;
  return named<GruOperator>(
      "GRU", {kFloat, kAny, kFloat, kInt8, kInt8, kFloat, kInt8, kFloat, kInt32, kFloat}, 2, {kFloat, kFloat});
}

}  // namespace requant
