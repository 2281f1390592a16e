// What GRU and LSTM have in common: operators of ONNX in integers, with ranges that are found at run time (see target.h).
//
// Inputs: x (steps, items, inputs), w, w_scale, w_zero_point, r, r_scale, r_zero_point, B, lengths, start; an LSTM has one more,
// cell. w is (directions * gates * size, inputs) and r (directions * gates * size, size), int8 with a scale for each row;
// the zero points are 0. w may have floats (directions, gates * size, inputs) instead, without scales and zero points; then the
// input is not rounded, and its product is that of floats. B is (directions, 2 * gates * size), lengths int32 (items,), and both
// starts are (directions, items, size); each of these may be missing. w, r, their scales and zero points, and B are constants.
// The attribute `backward` has a 1 for each direction that begins with the last step.
//
// Results: y (steps, directions, items, size), and the last states (directions, items, size); an LSTM has the last cells too.
// From the length of its sequence on, y of an item is 0. A direction that begins with the last step begins at the item's own end.
#pragma once

#include "aligned.h"
#include "operators.h"
#include "target.h"

namespace requant {

// Weights with a scale for each row.
struct Stored {
  const int8_t* weights;
  const float* scale;
  int64_t columns;
};

// Returns some rows as a matrix whose biases are 0.
Matrix rows_of(const Stored& from, int64_t first, int64_t count);

// Weights of the input, and their biases: in integers, or in float.
struct Input {
  Stored stored;
  const float* floats;  // null for integers
  const float* bias;    // of a direction; null without B
};

// One step of some items.
struct Step {
  const float *x, *before;  // the products of the input (items, gates * size) with their biases; the states (items, size)
  float *cell, *after;      // what an LSTM keeps, changed in place, and the next states: (items, size)
  int64_t items, size, time;
  const int32_t* lengths;  // null if no item ends before the last step

  bool alive(int64_t item) const { return lengths == nullptr || time < lengths[item]; }
};

// Computes a step from the states of one direction.
class Cell {
 public:
  virtual ~Cell() = default;
  // Leaves items alone that have ended.
  virtual void advance(const Step& step) const = 0;

 protected:
  // y (rows, outputs) = x (rows, inputs) times a matrix. The product of a step is too small for several threads.
  static void multiply(const MatrixKernel& matrix, const float* x, float* y, int64_t rows);
};

// The constants of one direction, of which a cell is made.
struct Direction {
  Stored state;             // r of all directions
  int64_t first, size;      // the first row of the direction in r
  const float* state_bias;  // (gates * size,); null without B
  float* bias;              // of the products of the input, (gates * size,): a cell adds those of the state that it can
};

// The frame of both operators.
class Recurrent {
 public:
  struct Kind {
    Requirement require;
    int64_t gates;
    bool has_cell;
    std::unique_ptr<Cell> (*cell)(const ort::Node& node, const Direction& direction);
  };

  Recurrent(const ort::Node& node, const Kind& kind);
  void run(const ort::Run& run) const;

 private:
  struct Part {
    std::unique_ptr<MatrixKernel> input;
    std::unique_ptr<Cell> cell;
    bool backward;
  };

  // x is (steps, items, inputs), the states are (items, size); y has (items, size) for each step, `y_step` floats apart.
  struct Sequence {
    const float* x;
    float *y, *state, *cell;
    int64_t steps, items, y_step;
    const int32_t* lengths;
  };

  void add(const ort::Node& node, const Input& w, const Direction& direction, bool backward);
  ort::Tensor state_of(const ort::Run& run, size_t index, int64_t items) const;
  const int32_t* lengths_of(const ort::Tensor& lengths, int64_t steps, int64_t items) const;
  void run(const Part& part, const Sequence& sequence, const Parallel& parallel) const;

  Kind kind_;
  int64_t inputs_ = 0, size_ = 0;
  size_t count_;  // of the node's inputs
  std::vector<Part> parts_;
};

}  // namespace requant
