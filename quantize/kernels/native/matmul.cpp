// MatMul: rows in float times a constant matrix of int8, in integers; float tensors with the rows along the last axis.
//
// Inputs: x, w, w_scale, w_zero_point, B, residual; all but x and the residual are constants, and the last two may be missing.
// w is (inputs, outputs), w_scale has one value or one for each output, the zero points are 0, B is (outputs,), and the residual
// has the shape of the product; another one is added as ONNX adds tensors. The attribute `function` is what is
// applied before the residual is added: 0 nothing, 1 Relu, 2 Gelu, 3 Gelu by tanh, 4 x * sigmoid(x). With `gated` 1 the result
// is multiplied by the residual. Each row of x is rounded to 8 bits with the
// smallest range that contains it and 0.
#include "matrix_run.h"

namespace requant {
namespace {

constexpr Requirement require{"ai.requant.MatMul"};

// Returns the product of a node.
Matrix matrix_of(const ort::Node& node) {
  const ort::Tensor w = node.constant(1), scale = node.constant(2), zero = node.constant(3), bias = node.constant(4);
  require(w && scale, "w and w_scale must be constants");
  require(w.shape.size() == 2 && w.size() > 0, "w must have two axes, and must not be empty");
  const int64_t inputs = w.shape[0], outputs = w.shape[1];
  require(scale.size() == 1 || scale.size() == outputs, "w_scale must have one value, or one for each output");
  require(!bias || bias.size() == outputs, "B must have one value for each output");
  for (int64_t i = 0; zero && i < zero.size(); ++i) require(zero.as<int8_t>()[i] == 0, "the zero points of w must be 0");
  Matrix made{inputs, outputs, std::vector<int8_t>(w.size()), {}, std::vector<float>(outputs), function_of(node, require),
              node.attribute("gated", 0) != 0};
  for (int64_t i = 0; i < inputs; ++i)
    for (int64_t o = 0; o < outputs; ++o) made.weights[o * inputs + i] = w.as<int8_t>()[i * outputs + o];
  for (int64_t o = 0; o < outputs; ++o) {
    made.scale.push_back(scale.as<float>()[scale.size() == 1 ? 0 : o]);
    require(made.scale[o] >= 0 && std::isfinite(made.scale[o]), "w_scale must be 0 or positive");  // 0: no weights but 0
    if (bias) made.bias[o] = bias.as<float>()[o];
  }
  require(made.fits(), "w has too many inputs");
  return made;
}

class MatMulKernel : public MatrixRun {
 public:
  explicit MatMulKernel(const ort::Node& node) : MatMulKernel(node, matrix_of(node)) {}

 private:
  static constexpr size_t kResidual = 5;  // among the inputs

  MatMulKernel(const ort::Node& node, const Matrix& made)
      : MatrixRun(node, require, kResidual, made, chosen().matrix(made)) {}
};

}  // namespace

std::vector<ort::CustomOp*> matmul_operators() {
  using enum ort::ElementType;
  return named<MatMulKernel>("MatMul", {kFloat, kInt8, kFloat, kInt8, kFloat, kFloat}, 4, {kFloat});
}

}  // namespace requant
