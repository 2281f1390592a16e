// MatMulNBits: rows in float times a constant matrix in blocks of 4 or 8 bits, in integers; float tensors with the rows along the
// last axis.
//
// Inputs: x, w, w_scale, B, residual; all but x and the residual are constants, and the last two may be missing. w is (outputs,
// blocks, bytes), uint8, and w_scale has a value for each block: as com.microsoft.MatMulNBits has them without zero points. Its
// attributes `K`, `N`, `bits` and `block_size` say how many inputs and outputs there are, the bits of a weight, and the inputs of
// a block. B is (outputs,); `function`, `gated` and the residual are those of MatMul. Each block of a row of x is rounded to
// integers from -127 to 127; on matrix tiles 32 rows or more are bf16.
#include <algorithm>
#include <bit>

#include "matrix_run.h"

namespace requant {
namespace {

constexpr Requirement require{"ai.requant.MatMulNBits"};

// Returns the product of a node. It points into constants of the node.
BlockMatrix matrix_of(const ort::Node& node) {
  const ort::Tensor w = node.constant(1), scale = node.constant(2), bias = node.constant(3);
  require(w && scale, "w and w_scale must be constants");
  BlockMatrix made{.inputs = node.attribute("K", 0),
                   .outputs = node.attribute("N", 0),
                   .bits = node.attribute("bits", 4),
                   .size = node.attribute("block_size", 0),
                   .codes = w.as<uint8_t>(),
                   .scale = scale.as<float>(),
                   .bias = std::vector<float>(),
                   .function = function_of(node, require),
                   .gated = node.attribute("gated", 0) != 0};
  const auto [least, most] = std::minmax(made.inputs, made.outputs);
  require(least > 0 && most <= INT32_MAX, "K and N must be positive, and below 2^31");
  require(made.bits == 4 || made.bits == 8, "bits must be 4 or 8");
  const bool power = std::has_single_bit(static_cast<uint64_t>(made.size));
  require(power && made.size >= 16 && made.size <= 256, "block_size must be 16, 32, 64, 128 or 256");
  require(w.size() == made.outputs * made.blocks() * made.bytes(), "w must have the codes of all blocks");
  require(scale.size() == made.outputs * made.blocks(), "w_scale must have one value for each block");
  require(!bias || bias.size() == made.outputs, "B must have one value for each output");
  for (int64_t i = 0; i < scale.size(); ++i) require(std::isfinite(made.scale[i]), "w_scale must be finite");
  made.bias.assign(made.outputs, 0);
  if (bias) std::copy_n(bias.as<float>(), made.outputs, made.bias.begin());
  return made;
}

class MatMulNBitsKernel : public MatrixRun {
 public:
  explicit MatMulNBitsKernel(const ort::Node& node) : MatMulNBitsKernel(node, matrix_of(node)) {}

 private:
  static constexpr size_t kResidual = 4;  // among the inputs

  MatMulNBitsKernel(const ort::Node& node, const BlockMatrix& made)
      : MatrixRun(node, require, kResidual, made, chosen().block_matrix(made)) {}
};

}  // namespace

std::vector<ort::CustomOp*> matmul_nbits_operators() {
  using enum ort::ElementType;
  return named<MatMulNBitsKernel>("MatMulNBits", {kFloat, kUint8, kFloat, kFloat, kFloat}, 3, {kFloat});
}

}  // namespace requant
