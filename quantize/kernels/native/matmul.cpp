// MatMul: rows in float times a constant matrix of int8, in integers; float tensors with the rows along the last axis.
//
// Inputs: x, w, w_scale, w_zero_point, B, residual; all but x and the residual are constants, and the last two may be missing.
// w is (inputs, outputs), w_scale has one value or one for each output, the zero points are 0, B is (outputs,), and the residual
// has the shape of the product; another one is added as ONNX adds tensors. The attribute `function` is what is
// applied before the residual is added: 0 nothing, 1 Relu, 2 Gelu, 3 Gelu by tanh. Each row of x is rounded to 8 bits with the
// smallest range that contains it and 0.
#include <algorithm>

#include "operators.h"
#include "target.h"

namespace requant {
namespace {

constexpr Requirement require{"ai.requant.MatMul"};

class MatMulKernel {
 public:
  explicit MatMulKernel(const ort::Node& node) : count_(node.count()) {
    const ort::Tensor w = node.constant(1), scale = node.constant(2), zero = node.constant(3), bias = node.constant(4);
    require(w && scale, "w and w_scale must be constants");
    require(w.shape.size() == 2 && w.size() > 0, "w must have two axes, and must not be empty");
    inputs_ = w.shape[0];
    outputs_ = w.shape[1];
    require(scale.size() == 1 || scale.size() == outputs_, "w_scale must have one value, or one for each output");
    require(!bias || bias.size() == outputs_, "B must have one value for each output");
    for (int64_t i = 0; zero && i < zero.size(); ++i) require(zero.as<int8_t>()[i] == 0, "the zero points of w must be 0");
    const int64_t function = node.attribute("function", 0);
    require(function >= 0 && function <= static_cast<int64_t>(Function::kGeluByTanh), "the function must be from 0 to 3");
    Matrix made{inputs_, outputs_, std::vector<int8_t>(w.size()), {}, std::vector<float>(outputs_), Function{function}};
    for (int64_t i = 0; i < inputs_; ++i)
      for (int64_t o = 0; o < outputs_; ++o) made.weights[o * inputs_ + i] = w.as<int8_t>()[i * outputs_ + o];
    for (int64_t o = 0; o < outputs_; ++o) {
      made.scale.push_back(scale.as<float>()[scale.size() == 1 ? 0 : o]);
      require(made.scale[o] >= 0 && std::isfinite(made.scale[o]), "w_scale must be 0 or positive");  // 0: no weights but 0
      if (bias) made.bias[o] = bias.as<float>()[o];
    }
    require(made.fits(), "w has too many inputs");
    kernel_ = chosen().matrix(std::move(made));
  }

  void run(const ort::Run& run) const {
    const ort::Tensor x = run.input(0);
    require(!x.shape.empty() && x.shape.back() == inputs_, "the last axis of x must be the inputs of w");
    std::vector<int64_t> shape = x.shape;
    shape.back() = outputs_;
    const ort::Tensor residual = count_ > kResidual ? run.input(kResidual) : ort::Tensor{};
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
    kernel_->run(x, residual, y, rows, [&](size_t count, const std::function<void(size_t)>& work) {
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
      require(shape[axis] == other[axis] || shape[axis] == 1 || other[axis] == 1, "the shapes do not fit together");
      whole.push_back(shape[axis] == 1 ? other[axis] : shape[axis]);
    }
    float* const y = reinterpret_cast<float*>(run.output(whole));
    int64_t count = 1;
    for (int64_t length : whole) count *= length;
    const float* const added = residual.as<float>();
    for (int64_t i = 0; i < count; ++i) y[i] = product[place_of(i, whole, shape)] + added[place_of(i, whole, other)];
  }

  // Returns the place in a tensor that repeats along axes of length 1, for a place in the whole result.
  static int64_t place_of(int64_t place, const std::vector<int64_t>& whole, const std::vector<int64_t>& shape) {
    int64_t found = 0, step = 1;
    for (size_t axis = whole.size(); axis-- > 0; place /= whole[axis], step *= shape[axis])
      if (shape[axis] > 1) found += place % whole[axis] * step;
    return found;
  }

  static constexpr size_t kResidual = 5;  // among the inputs

  int64_t inputs_, outputs_;
  size_t count_;  // of the node's inputs
  std::unique_ptr<MatrixKernel> kernel_;
};

}  // namespace

std::vector<ort::CustomOp*> matmul_operators() {
  using enum ort::ElementType;
  return named<MatMulKernel>("MatMul", {kFloat, kInt8, kFloat, kInt8, kFloat, kFloat}, 4, kFloat);
}

}  // namespace requant
