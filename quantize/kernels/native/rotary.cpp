// RotaryEmbedding: pairs of values of a float tensor are turned by angles; the results are those of the body, bit for bit.
//
// Inputs: x, cos, sin. With the attribute `interleaved` 1, the pairs stand in the last axis of x, which has length 2, and cos and
// sin have the other axes, as ONNX repeats tensors:
//
//   y[..., 0] = x[..., 0] * cos - x[..., 1] * sin        y[..., 1] = x[..., 0] * sin + x[..., 1] * cos
//
// Otherwise the two values of a pair are half the last axis apart, and cos and sin repeat to the shape of x:
//
//   y[..., i] = x[..., i] * cos[..., i] + z[..., i] * sin[..., i]        z = (-x[..., half:], x[..., :half])
#include <algorithm>
#include <vector>

#include "operators.h"
#include "target.h"

namespace requant {
namespace {

constexpr Requirement require{"ai.requant.RotaryEmbedding"};

using Shape = std::vector<int64_t>;

Shape repeated(Shape one, Shape other) {
  const size_t axes = std::max(one.size(), other.size());
  one.insert(one.begin(), axes - one.size(), 1);
  other.insert(other.begin(), axes - other.size(), 1);
  for (size_t axis = 0; axis < axes; ++axis) {
    require(one[axis] == other[axis] || one[axis] == 1 || other[axis] == 1, "the shapes do not fit together");
    if (one[axis] == 1) one[axis] = other[axis];
  }
  return one;
}

// A tensor as a part of the result, which it repeats to.
struct Operand {
  Operand(const float* first, Shape own, const Shape& whole) : data(first) {
    own.insert(own.begin(), whole.size() - own.size(), 1);
    steps.resize(whole.size());
    for (size_t axis = whole.size(), step = 1; axis-- > 0; step *= own[axis])
      steps[axis] = own[axis] == 1 ? 0 : static_cast<int64_t>(step);
  }

  const float* data;
  Shape steps;
};

// The values of a row: the first one, and the step from one to the next.
struct Row {
  const float* first;
  int64_t step;
  float operator[](int64_t index) const { return first[index * step]; }
};

// Goes along the rows of the result: all axes but the last one. It knows where each row begins in three operands.
class Rows {
 public:
  Rows(const Operand (&operands)[3], const Shape& whole, int64_t row)
      : operands_(operands), whole_(whole), at_(whole.size() - 1) {
    for (size_t axis = at_.size(); axis-- > 0; row /= whole[axis]) add(axis, at_[axis] = row % whole[axis]);
  }

  void advance() {
    for (size_t axis = at_.size(); axis-- > 0;) {
      add(axis, 1);
      if (++at_[axis] < whole_[axis]) return;
      add(axis, -whole_[axis]);
      at_[axis] = 0;
    }
  }

  int64_t place(int operand) const { return places_[operand]; }
  Row row(int operand) const { return {operands_[operand].data + places_[operand], operands_[operand].steps.back()}; }

 private:
  void add(size_t axis, int64_t count) {
    for (int operand = 0; operand < 3; ++operand) places_[operand] += count * operands_[operand].steps[axis];
  }

  const Operand (&operands_)[3];
  const Shape& whole_;
  Shape at_;
  int64_t places_[3] = {};
};

class RotaryKernel {
 public:
  explicit RotaryKernel(const ort::Node& node) : interleaved_(node.attribute("interleaved", 0) != 0) {}

  void run(const ort::Run& run) const {
    const ort::Tensor x = run.input(0), cos = run.input(1), sin = run.input(2);
    require(x.shape.size() >= (interleaved_ ? 2u : 1u), "x must have an axis for pairs");
    require(x.shape.back() % 2 == 0 && (!interleaved_ || x.shape.back() == 2), "the last axis of x must have pairs");
    Shape inside = x.shape;
    if (interleaved_) inside.pop_back();
    const Shape whole = repeated(repeated(inside, cos.shape), sin.shape);
    require(!whole.empty() && (interleaved_ || whole.back() == x.shape.back()), "cos and sin must not repeat pairs");
    Shape made = whole;
    if (interleaved_) made.push_back(2);
    float* const y = reinterpret_cast<float*>(run.output(made));
    int64_t rows = 1;
    for (size_t axis = 0; axis + 1 < whole.size(); ++axis) rows *= whole[axis];
    const int64_t count = whole.back(), wide = interleaved_ ? 2 * count : count;
    if (rows * count == 0) return;
    const Operand operands[] = {{x.as<float>(), inside, whole}, {cos.as<float>(), cos.shape, whole},
                                {sin.as<float>(), sin.shape, whole}};
    const int64_t together = std::max<int64_t>(1, kTogether / count);
    run.parallel(static_cast<size_t>(divided(rows, together)), [&](size_t index) {
      const int64_t first = static_cast<int64_t>(index) * together;
      Rows at(operands, whole, first);
      for (int64_t row = first; row < std::min(first + together, rows); ++row, at.advance())
        if (interleaved_)
          turn_pairs({x.as<float>() + 2 * at.place(0), 2 * at.row(0).step}, at.row(1), at.row(2), y + row * wide, count);
        else
          turn_halves(at.row(0), at.row(1), at.row(2), y + row * wide, count);
    });
  }

 private:
  static constexpr int64_t kTogether = 1 << 13;  // values that one task computes, about

  // x has the first values of pairs, each before the second one.
  static void turn_pairs(const Row& x, const Row& cos, const Row& sin, float* y, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const float first = x[i], second = x.first[i * x.step + 1];
      y[2 * i] = first * cos[i] - second * sin[i];
      y[2 * i + 1] = first * sin[i] + second * cos[i];
    }
  }

  static void turn_halves(const Row& x, const Row& cos, const Row& sin, float* y, int64_t count) {
    const int64_t half = count / 2;
    for (int64_t i = 0; i < half; ++i) {
      y[i] = x[i] * cos[i] - x[half + i] * sin[i];
      y[half + i] = x[half + i] * cos[half + i] + x[i] * sin[half + i];
    }
  }

  bool interleaved_;
};

}  // namespace

std::vector<ort::CustomOp*> rotary_operators() {
  using enum ort::ElementType;
  return named<RotaryKernel>("RotaryEmbedding", {kFloat, kFloat, kFloat}, 3, {kFloat});
}

}  // namespace requant
