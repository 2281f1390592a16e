// GRU: the operator of ONNX in integers, with ranges that are found at run time (see target.h); sequences have the same length.
//
// Inputs: x (steps, items, inputs), w, w_scale, w_zero_point, r, r_scale, r_zero_point, B, start. w is (directions * 3 * size,
// inputs) and r (directions * 3 * size, size), int8 with a scale for each row; the zero points are 0. B is (directions, 6 * size)
// and start (directions, items, size); both may be missing. All but x and start are constants. The result y is (steps,
// directions, items, size). The attribute `backward` has a 1 for each direction that begins with the last step.
#include <algorithm>

#include "aligned.h"
#include "operators.h"
#include "target.h"

namespace requant {
namespace {

constexpr Requirement require{"ai.requant.GRU"};

// One direction of a GRU: the input is multiplied for many steps at once, the state at each step.
class Direction {
 public:
  // If there is a matrix `last`, the reset gate comes first.
  Direction(const Matrix& input, const Matrix& state, const Matrix& last, bool backward)
      : target_(chosen()),
        inputs_(input.inputs),
        size_(state.inputs),
        backward_(backward),
        input_(target_.matrix(input)),
        state_(target_.matrix(state)),
        last_(last.outputs > 0 ? target_.matrix(last) : nullptr) {}

  // x is (steps, items, inputs) and start (items, size); y has (items, size) for each step, `y_step` floats apart.
  struct Run {
    const float *x, *start;
    float* y;
    int64_t steps, items, y_step;
  };

  void run(const Run& run, const Parallel& parallel) const {
    thread_local Scratch products;
    const int64_t row = 3 * size_, most = std::max<int64_t>(1, kHeld / (run.items * row));
    for (int64_t done = 0; done < run.steps; done += most) {
      const int64_t steps = std::min(most, run.steps - done), first = backward_ ? run.steps - done - steps : done;
      float* const x = floats_of(products, steps * run.items * row);
      input_->run(run.x + first * run.items * inputs_, nullptr, x, steps * run.items, parallel);
      for (int64_t step = 0; step < steps; ++step) {
        const int64_t here = backward_ ? steps - 1 - step : step;
        float* const y = run.y + (first + here) * run.y_step;
        const float* const before = y + (backward_ ? 1 : -1) * run.y_step;
        advance(x + here * run.items * row, done + step == 0 ? run.start : before, y, run.items);
      }
    }
  }

 private:
  static constexpr int64_t kHeld = 1 << 18;  // products of the input that are computed at once, about

  static float* floats_of(Scratch& scratch, int64_t count) {
    return reinterpret_cast<float*>(scratch.bytes(count * static_cast<int64_t>(sizeof(float))));
  }

  // Computes the next states of some items from the products of their inputs.
  void advance(const float* x, const float* before, float* after, int64_t items) const {
    thread_local Scratch products, states, candidates;
    const int64_t gates = last_ ? 2 : 3;
    float* const h = floats_of(products, items * gates * size_);
    multiply(*state_, before, h, items);
    const auto step_of = [&](int64_t item, const float* last) {
      return GruStep{.x = x + 3 * item * size_,
                     .h = h + gates * item * size_,
                     .last = last,
                     .before = before + item * size_,
                     .size = size_,
                     .reset_first = last_ != nullptr};
    };
    const auto next = [&](const float* last, int64_t apart) {
      for (int64_t item = 0; item < items; ++item)
        target_.next_state(step_of(item, last + item * apart), after + item * size_);
    };
    if (!last_) return next(h + 2 * size_, gates * size_);
    float* const kept = floats_of(states, items * size_);
    for (int64_t item = 0; item < items; ++item) target_.reset_state(step_of(item, nullptr), kept + item * size_);
    float* const last = floats_of(candidates, items * size_);
    multiply(*last_, kept, last, items);
    next(last, size_);
  }

  // A product of a step is too small for several threads.
  static void multiply(const MatrixKernel& matrix, const float* x, float* y, int64_t rows) {
    static const Parallel serial = [](size_t count, const std::function<void(size_t)>& work) {
      for (size_t index = 0; index < count; ++index) work(index);
    };
    matrix.run(x, nullptr, y, rows, serial);
  }

  const Target& target_;
  int64_t inputs_, size_;
  bool backward_;
  std::unique_ptr<MatrixKernel> input_, state_, last_;  // the last one is null if the reset gate comes behind the product
};

class GruOperator {
 public:
  explicit GruOperator(const ort::Node& node) : count_(node.count()) {
    const std::vector<int64_t> backward = node.attributes("backward", {0});
    const ort::Tensor w = node.constant(1), r = node.constant(4), bias = node.constant(7);
    const auto directions = std::ssize(backward);
    require(directions == 1 || directions == 2, "backward must have one or two numbers");
    require(w && r && w.shape.size() == 2 && r.shape.size() == 2 && r.size() > 0, "w and r must be matrices of constants");
    inputs_ = w.shape[1];
    size_ = r.shape[1];
    require(w.shape[0] == directions * 3 * size_ && r.shape[0] == w.shape[0], "w and r must have 3 rows for each value");
    require(!bias || bias.size() == directions * 6 * size_, "B must have 6 values for each value of the state");
    const Stored input = stored(node, 1, w), state = stored(node, 4, r);
    const bool reset_first = node.attribute("linear_before_reset", 0) == 0;
    for (int64_t direction = 0; direction < directions; ++direction) {
      const float* const added = bias ? bias.as<float>() + direction * 6 * size_ : nullptr;
      add_direction(input, state, direction * 3 * size_, added, reset_first, backward[direction] != 0);
    }
  }

  void run(const ort::Run& run) const {
    const ort::Tensor x = run.input(0), start = count_ > kStart ? run.input(kStart) : ort::Tensor{};
    require(x.shape.size() == 3 && x.shape[2] == inputs_, "x must have three axes, the last one with the columns of w");
    const int64_t steps = x.shape[0], items = x.shape[1], directions = std::ssize(directions_), states = items * size_;
    require(!start || start.shape == std::vector<int64_t>{directions, items, size_}, "start must have a state for each item");
    float* const y = reinterpret_cast<float*>(run.output({steps, directions, items, size_}));
    if (steps * items == 0) return;
    thread_local std::vector<float> zeros;
    zeros.assign(start ? 0 : states, 0.0f);
    for (int64_t direction = 0; direction < directions; ++direction)
      directions_[direction].run({.x = x.as<float>(),
                                  .start = start ? start.as<float>() + direction * states : zeros.data(),
                                  .y = y + direction * states,
                                  .steps = steps,
                                  .items = items,
                                  .y_step = directions * states},
                                 [&](size_t count, const std::function<void(size_t)>& work) { run.parallel(count, work); });
  }

 private:
  static constexpr size_t kStart = 8;  // among the inputs

  // Weights with a scale for each row.
  struct Stored {
    const int8_t* weights;
    const float* scale;
    int64_t columns;
  };

  static Stored stored(const ort::Node& node, size_t index, const ort::Tensor& weights) {
    const ort::Tensor scale = node.constant(index + 1), zero = node.constant(index + 2);
    require(scale && scale.size() == weights.shape[0], "there must be a scale for each row");
    for (int64_t i = 0; i < scale.size(); ++i)
      require(scale.as<float>()[i] >= 0 && std::isfinite(scale.as<float>()[i]), "scales must be 0 or positive");
    for (int64_t i = 0; zero && i < zero.size(); ++i) require(zero.as<int8_t>()[i] == 0, "the zero points must be 0");
    return {weights.as<int8_t>(), scale.as<float>(), weights.shape[1]};
  }

  static Matrix rows_of(const Stored& from, int64_t first, int64_t count) {
    Matrix made{from.columns, count, {}, {}, std::vector<float>(count)};
    made.weights.assign(from.weights + first * from.columns, from.weights + (first + count) * from.columns);
    made.scale.assign(from.scale + first, from.scale + first + count);
    return made;
  }

  // Adds a direction, whose rows begin with `first`. Biases of input and state are added to the products of the input, except
  // that of the candidate's product if the reset gate comes behind it.
  void add_direction(const Stored& w, const Stored& r, int64_t first, const float* bias, bool reset_first, bool backward) {
    Matrix input = rows_of(w, first, 3 * size_), state = rows_of(r, first, (reset_first ? 2 : 3) * size_);
    for (int64_t i = 0; bias && i < 3 * size_; ++i) {
      const bool apart = !reset_first && i >= 2 * size_;
      input.bias[i] = bias[i] + (apart ? 0 : bias[3 * size_ + i]);
      if (apart) state.bias[i] = bias[3 * size_ + i];
    }
    require(input.fits() && state.fits(), "w or r has too many columns");
    directions_.emplace_back(input, state, reset_first ? rows_of(r, first + 2 * size_, size_) : Matrix{}, backward);
  }

  int64_t inputs_ = 0, size_ = 0;
  size_t count_;  // of the node's inputs
  std::vector<Direction> directions_;
};

}  // namespace

std::vector<ort::CustomOp*> gru_operators() {
  using enum ort::ElementType;
  return named<GruOperator>("GRU", {kFloat, kInt8, kFloat, kInt8, kInt8, kFloat, kInt8, kFloat, kFloat}, 7, kFloat);
}

}  // namespace requant
