// The frame of GRU and LSTM; see recurrent.h.
#include "recurrent.h"

#include <algorithm>

namespace requant {
namespace {

constexpr size_t kW = 1, kR = 4, kBias = 7, kLengths = 8, kStart = 9, kStartCell = 10;  // among the inputs
constexpr int64_t kHeld = 1 << 18;  // products of the input that are computed at once, about

Stored stored(const ort::Node& node, size_t index, const ort::Tensor& weights, const Requirement& require) {
  const ort::Tensor scale = node.constant(index + 1), zero = node.constant(index + 2);
  require(scale && scale.size() == weights.shape[0], "there must be a scale for each row");
  for (int64_t i = 0; i < scale.size(); ++i)
    require(scale.as<float>()[i] >= 0 && std::isfinite(scale.as<float>()[i]), "scales must be 0 or positive");
  for (int64_t i = 0; zero && i < zero.size(); ++i) require(zero.as<int8_t>()[i] == 0, "the zero points must be 0");
  return {weights.as<int8_t>(), scale.as<float>(), weights.shape[1]};
}

// The product with some rows of a matrix of floats.
class FloatRows final : public MatrixKernel {
 public:
  // w is (outputs, inputs).
  FloatRows(const float* w, int64_t inputs, const std::vector<float>& bias)
      : inputs_(inputs), outputs_(std::ssize(bias)), panels_(divided(outputs_, kFloatPanel)) {
    weights_.assign(panels_ * inputs * kFloatPanel, 0);
    bias_.assign(panels_ * kFloatPanel, 0);
    for (int64_t o = 0; o < outputs_; ++o) {
      bias_[o] = bias[o];
      float* const to = &weights_[o / kFloatPanel * inputs * kFloatPanel + o % kFloatPanel];
      for (int64_t i = 0; i < inputs; ++i) to[i * kFloatPanel] = w[o * inputs + i];
    }
  }

  void run(const float* x, const float*, float* y, int64_t rows, const Parallel& parallel) const override {
    const int64_t tasks = std::clamp<int64_t>(rows * inputs_ * outputs_ / kWork, 1, panels_), some = divided(panels_, tasks);
    parallel(static_cast<size_t>(divided(panels_, some)), [&](size_t index) {
      const int64_t first = static_cast<int64_t>(index) * some;
      for (int64_t panel = first; panel < std::min(first + some, panels_); ++panel) {
        const int64_t at = panel * kFloatPanel;
        vectors_.multiply_floats({.weights = &weights_[at * inputs_],
                                  .bias = &bias_[at],
                                  .inputs = inputs_,
                                  .columns = std::min(kFloatPanel, outputs_ - at),
                                  .step = outputs_},
                                 x, y + at, rows);
      }
    });
  }

 private:
  static constexpr int64_t kWork = 1 << 20;  // products of one task, about

  const VectorKernels& vectors_ = chosen().vectors;  // to choose takes longer than a panel
  int64_t inputs_, outputs_, panels_;
  Aligned<float> weights_, bias_;
};

}  // namespace

Matrix rows_of(const Stored& from, int64_t first, int64_t count) {
  Matrix made{from.columns, count, {}, {}, std::vector<float>(count)};
  made.weights.assign(from.weights + first * from.columns, from.weights + (first + count) * from.columns);
  made.scale.assign(from.scale + first, from.scale + first + count);
  return made;
}

void Cell::multiply(const MatrixKernel& matrix, const float* x, float* y, int64_t rows) {
  constexpr auto serial = [](size_t count, const Work& work) {
    for (size_t index = 0; index < count; ++index) work(index);
  };
  matrix.run(x, nullptr, y, rows, serial);
}

Recurrent::Recurrent(const ort::Node& node, const Kind& kind) : kind_(kind), count_(node.count()) {
  const Requirement& require = kind_.require;
  const std::vector<int64_t> backward = node.attributes("backward", {0});
  const ort::Tensor w = node.constant(kW), r = node.constant(kR), bias = node.constant(kBias);
  const auto directions = std::ssize(backward);
  require(directions == 1 || directions == 2, "backward must have one or two numbers");
  const bool in_float = node.type(kW) == ort::kFloat;
  require(in_float || node.type(kW) == ort::kInt8, "w must be a tensor of int8 or float");
  require(r && w.shape.size() == (in_float ? 3 : 2) && r.shape.size() == 2 && std::min(w.size(), r.size()) > 0,
          "w and r must be matrices of constants");
  inputs_ = w.shape.back();
  size_ = r.shape[1];
  const int64_t rows = kind_.gates * size_;
  require(w.size() == directions * rows * inputs_ && r.shape[0] == directions * rows,
          "w and r must have a row for each gate of a value");
  require(!bias || bias.size() == directions * 2 * rows, "B must have two values for each row of w");
  const Stored state = stored(node, kR, r, require);
  Input input{{nullptr, nullptr, inputs_}, in_float ? w.as<float>() : nullptr, nullptr};
  if (!in_float) input.stored = stored(node, kW, w, require);
  for (int64_t direction = 0; direction < directions; ++direction) {
    input.bias = bias ? bias.as<float>() + direction * 2 * rows : nullptr;
    const float* const of_state = input.bias ? input.bias + rows : nullptr;
    add(node, input, {state, direction * rows, size_, of_state, nullptr}, backward[direction] != 0);
  }
}

void Recurrent::add(const ort::Node& node, const Input& w, const Direction& direction, bool backward) {
  const int64_t rows = kind_.gates * size_;
  std::vector<float> bias(rows);
  if (w.bias != nullptr) std::copy_n(w.bias, rows, bias.begin());
  Direction of_state = direction;
  of_state.bias = bias.data();
  auto cell = kind_.cell(node, of_state);
  std::unique_ptr<MatrixKernel> product;
  if (w.floats != nullptr) {
    product = std::make_unique<FloatRows>(w.floats + direction.first * inputs_, inputs_, bias);
  } else {
    Matrix input = rows_of(w.stored, direction.first, rows);
    input.bias = std::move(bias);
    kind_.require(input.fits(), "w has too many columns");
    product = chosen().matrix(std::move(input));
  }
  parts_.push_back({std::move(product), std::move(cell), backward});
}

// Returns a first state; empty if there is none.
ort::Tensor Recurrent::state_of(const ort::Run& run, size_t index, int64_t items) const {
  const ort::Tensor state = count_ > index ? run.input(index) : ort::Tensor{};
  const std::vector<int64_t> shape{std::ssize(parts_), items, size_};
  kind_.require(!state || state.shape == shape, "a first state must have a row for each item");
  return state;
}

const int32_t* Recurrent::lengths_of(const ort::Tensor& lengths, int64_t steps, int64_t items) const {
  if (!lengths) return nullptr;
  kind_.require(lengths.size() == items, "there must be a length for each item");
  const int32_t* const each = lengths.as<int32_t>();
  for (int64_t item = 0; item < items; ++item)
    kind_.require(each[item] >= 0 && each[item] <= steps, "a length must be at most the number of steps");
  return each;
}

void Recurrent::run(const ort::Run& run) const {
  const ort::Tensor x = run.input(0);
  kind_.require(x.shape.size() == 3 && x.shape[2] == inputs_, "x must have three axes, the last one with the columns of w");
  const int64_t steps = x.shape[0], items = x.shape[1], directions = std::ssize(parts_), states = items * size_;
  const ort::Tensor lengths = count_ > kLengths ? run.input(kLengths) : ort::Tensor{};
  const int32_t* const ends = lengths_of(lengths, steps, items);
  float* const y = reinterpret_cast<float*>(run.output({steps, directions, items, size_}));
  // the last states are the states of each step; those of an item whose length is 0 are 0, as in ONNX Runtime
  const auto begun = [&](size_t input, size_t output) {
    const ort::Tensor start = state_of(run, input, items);
    float* const state = reinterpret_cast<float*>(run.output({directions, items, size_}, output));
    std::fill_n(state, directions * states, 0.0f);
    for (int64_t row = 0; start && row < directions * items; ++row)
      if (ends == nullptr || ends[row % items] > 0) std::copy_n(start.as<float>() + row * size_, size_, state + row * size_);
    return state;
  };
  float* const state = begun(kStart, 1);
  float* const cell = kind_.has_cell ? begun(kStartCell, 2) : nullptr;
  if (steps * items == 0) return;
  for (int64_t direction = 0; direction < directions; ++direction)
    this->run(parts_[direction],
              {.x = x.as<float>(),
               .y = y + direction * states,
               .state = state + direction * states,
               .cell = cell == nullptr ? nullptr : cell + direction * states,
               .steps = steps,
               .items = items,
               .y_step = directions * states,
               .lengths = ends},
              [&](size_t count, const Work& work) { run.parallel(count, work); });
}

// Multiplies the input for many steps at once, the state at each step.
void Recurrent::run(const Part& part, const Sequence& sequence, const Parallel& parallel) const {
  thread_local Scratch products;
  const int64_t row = kind_.gates * size_, items = sequence.items;
  const int64_t most = std::max<int64_t>(1, kHeld / (items * row));
  for (int64_t done = 0; done < sequence.steps; done += most) {
    const int64_t steps = std::min(most, sequence.steps - done);
    const int64_t first = part.backward ? sequence.steps - done - steps : done;
    float* const x = products.floats(steps * items * row);
    part.input->run(sequence.x + first * items * inputs_, nullptr, x, steps * items, parallel);
    for (int64_t count = 0; count < steps; ++count) {
      const int64_t here = part.backward ? steps - 1 - count : count;
      float* const y = sequence.y + (first + here) * sequence.y_step;
      const Step step{.x = x + here * items * row,
                      .before = sequence.state,
                      .cell = sequence.cell,
                      .after = y,
                      .items = items,
                      .size = size_,
                      .time = first + here,
                      .lengths = sequence.lengths};
      part.cell->advance(step);
      for (int64_t item = 0; item < items; ++item)
        if (step.alive(item)) std::copy_n(y + item * size_, size_, sequence.state + item * size_);
        else std::fill_n(y + item * size_, size_, 0.0f);
    }
  }
}

}  // namespace requant
