// LSTM: four gates, in the order i, o, f and c; see recurrent.h. It has no peepholes.
#include "recurrent.h"

namespace requant {
namespace {

constexpr Requirement require{"ai.requant.LSTM"};
constexpr int64_t kGates = 4;

class LstmCell : public Cell {
 public:
  explicit LstmCell(const Matrix& state) : target_(chosen()), state_(target_.matrix(state)) {}

  void advance(const Step& step) const override {
    thread_local Scratch products;
    const int64_t size = step.size, row = kGates * size;
    float* const h = products.floats(step.items * row);
    multiply(*state_, step.before, h, step.items);
    for (int64_t item = 0; item < step.items; ++item)
      if (step.alive(item))
        target_.vectors.next_cell({.x = step.x + item * row, .h = h + item * row, .cell = step.cell + item * size, .size = size},
                          step.after + item * size);
  }

 private:
  const Target& target_;
  std::unique_ptr<MatrixKernel> state_;
};

std::unique_ptr<Cell> cell_of(const ort::Node&, const Direction& direction) {
  const Matrix state = rows_of(direction.state, direction.first, kGates * direction.size);
  for (int64_t i = 0; direction.state_bias && i < state.outputs; ++i) direction.bias[i] += direction.state_bias[i];
  require(state.fits(), "r has too many columns");
  return std::make_unique<LstmCell>(state);
}

struct LstmOperator : Recurrent {
  explicit LstmOperator(const ort::Node& node) : Recurrent(node, {require, kGates, true, cell_of}) {}
};

}  // namespace

std::vector<ort::CustomOp*> lstm_operators() {
  using enum ort::ElementType;
  return named<LstmOperator>(
      "LSTM", {kFloat, kAny, kFloat, kInt8, kInt8, kFloat, kInt8, kFloat, kInt32, kFloat, kFloat}, 2, {kFloat, kFloat, kFloat});
}

}  // namespace requant
