// What operators that multiply rows by a constant matrix have in common: the shapes of their tensors, and the residual.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "operators.h"
#include "target.h"

namespace requant {

// Returns what is applied to the results of a node.
inline Function function_of(const ort::Node& node, const Requirement& require) {
  const int64_t function = node.attribute("function", 0);
  require(function >= 0 && function <= static_cast<int64_t>(Function::kSilu), "the function must be from 0 to 4");
  return Function{function};
}

// Computes y = product of the rows of x + residual, or times it if `made` is gated. x has the rows along its last axis. The
// residual has the shape of the product; another one is added as ONNX adds tensors.
class MatrixRun {
 public:
  // `made` is what the kernel was made of, and `residual` the place of the residual among the inputs.
  template <class Made>
  MatrixRun(const ort::Node& node, const Requirement& require, size_t residual, const Made& made,
            std::unique_ptr<MatrixKernel> kernel)
      : require_(require),
        residual_(residual),
        count_(node.count()),
        inputs_(made.inputs),
        outputs_(made.outputs),
        gated_(made.gated),
        kernel_(std::move(kernel)) {}

  void run(const ort::Run& run) const {
    const ort::Tensor x = run.input(0), residual = count_ > residual_ ? run.input(residual_) : ort::Tensor{};
    require_(!x.shape.empty() && x.shape.back() == inputs_, "the last axis of x must be the inputs of w");
    std::vector<int64_t> shape = x.shape;
    shape.back() = outputs_;
    const int64_t rows = x.size() / inputs_;
    if (!residual || residual.shape == shape)
      return multiply(run, x.as<float>(), residual.as<float>(), reinterpret_cast<float*>(run.output(shape)), rows);
    if (!repeats(residual.shape, shape)) return add_other(run, x, residual, shape);
    float* const y = reinterpret_cast<float*>(run.output(shape));
    const int64_t some = residual.size() / outputs_;
    for (int64_t row = 0; row < rows; row += some)
      multiply(run, x.as<float>() + row * inputs_, residual.as<float>(), y + row * outputs_, some);
  }

 private:
  void multiply(const ort::Run& run, const float* x, const float* residual, float* y, int64_t rows) const {
    if (rows == 0) return;
    kernel_->run(x, residual, y, rows, [&](size_t count, const Work& work) {
      run.parallel(count, work);
    });
  }

  // Whether a residual of several rows repeats as a whole: its first axes have length 1 or are missing, the others are equal.
  static bool repeats(std::vector<int64_t> residual, const std::vector<int64_t>& shape) {
    if (residual.size() > shape.size()) return false;
    residual.insert(residual.begin(), shape.size() - residual.size(), 1);
    size_t axis = 0;
    while (axis < shape.size() && residual[axis] == 1) ++axis;
    return axis + 1 < shape.size() && std::equal(residual.begin() + axis, residual.end(), shape.begin() + axis);
  }

  // Adds a residual of another shape than that of the product; axes of length 1 repeat.
  void add_other(const ort::Run& run, const ort::Tensor& x, const ort::Tensor& residual, std::vector<int64_t> shape) const {
    std::vector<float> product(x.size() / inputs_ * outputs_);
    multiply(run, x.as<float>(), nullptr, product.data(), x.size() / inputs_);
    std::vector<int64_t> other = residual.shape, whole;
    const size_t axes = std::max(shape.size(), other.size());
    shape.insert(shape.begin(), axes - shape.size(), 1);
    other.insert(other.begin(), axes - other.size(), 1);
    for (size_t axis = 0; axis < axes; ++axis) {
      require_(shape[axis] == other[axis] || shape[axis] == 1 || other[axis] == 1, "the shapes do not fit together");
      whole.push_back(shape[axis] == 1 ? other[axis] : shape[axis]);
    }
    float* const y = reinterpret_cast<float*>(run.output(whole));
    int64_t count = 1;
    for (int64_t length : whole) count *= length;
    const float* const added = residual.as<float>();
    for (int64_t i = 0; i < count; ++i) {
      const float made = product[place_of(i, whole, shape)], more = added[place_of(i, whole, other)];
      y[i] = gated_ ? made * more : made + more;
    }
  }

  // Returns the place in a tensor that repeats along axes of length 1, for a place in the whole result.
  static int64_t place_of(int64_t place, const std::vector<int64_t>& whole, const std::vector<int64_t>& shape) {
    int64_t found = 0, step = 1;
    for (size_t axis = whole.size(); axis-- > 0; place /= whole[axis], step *= shape[axis])
      if (shape[axis] > 1) found += place % whole[axis] * step;
    return found;
  }

  Requirement require_;
  size_t residual_, count_;  // among the inputs of the node, and how many there are
  int64_t inputs_, outputs_;
  bool gated_;
  std::unique_ptr<MatrixKernel> kernel_;
};

}  // namespace requant
