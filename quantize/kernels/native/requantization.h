// The inputs of convolutions that are constants: how sums become uint8.
#pragma once

#include <algorithm>
#include <cmath>

#include "operators.h"
#include "target.h"

namespace requant {

// A ConvTranspose has those up to the table.
enum ConvolutionInput : size_t {
  kX, kXScale, kXZero, kW, kWScale, kWZero, kYScale, kYZero,
  kBias, kTable, kResidual, kResidualScale, kResidualZero, kCurve, kGrid
};

// Reads the constants of a convolution; messages begin with the name of the operator.
struct Constants {
  const Requirement& require;
  const ort::Node& node;

  ort::Tensor tensor(ConvolutionInput index) const {
    ort::Tensor found = node.constant(index);
    require(static_cast<bool>(found), "all inputs but x must be constants");
    return found;
  }

  template <class T>
  T scalar(ConvolutionInput index) const {
    return one<T>(require, node, index);
  }

  // Reads the zero points and biases, and the multipliers from sums to multiples of `unit`.
  void read_sums(float unit, Convolution& made) const {
    const float x_scale = positive(scalar<float>(kXScale));
    const ort::Tensor w_scale = tensor(kWScale);
    require(w_scale.size() == 1 || w_scale.size() == made.outputs, "w_scale must have one value, or one for each output");
    made.x_zero = scalar<uint8_t>(kXZero);
    made.y_zero = scalar<uint8_t>(kYZero);
    for (int64_t o = 0; o < made.outputs; ++o) {  // in float and in this order, as ONNX Runtime does
      const float scale = w_scale.as<float>()[w_scale.size() == 1 ? 0 : o];
      // 0: the channel has no weights but 0
      require(scale >= 0 && std::isfinite(x_scale * scale / unit), "w_scale must be 0 or positive");
      made.multiplier.push_back(x_scale * scale / unit);
    }
    const ort::Tensor bias = node.constant(kBias);
    require(!bias || bias.size() == made.outputs, "B must have one value for each output");
    made.bias.assign(made.outputs, 0);
    if (bias) std::copy_n(bias.as<int32_t>(), made.outputs, made.bias.begin());
  }

  void read_table(Convolution& made) const {
    const ort::Tensor table = node.constant(kTable);
    if (!table) return;
    const bool each = table.shape == std::vector<int64_t>{made.outputs, 256};
    require(each || table.shape == std::vector<int64_t>{256}, "the table must be (256,) or (outputs, 256)");
    require(made.curve.empty(), "a convolution has a table or a curve");
    made.table.assign(table.as<uint8_t>(), table.as<uint8_t>() + table.size());
  }
};

}  // namespace requant
