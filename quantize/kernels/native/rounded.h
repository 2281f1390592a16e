// How a real value becomes a byte: in steps, or by a curve.
#pragma once

#include <cmath>
#include <vector>

#include "operators.h"
#include "target.h"

namespace requant {

// The value is v * unit. With a curve, t = rint(v + offset) is the place in it; without one, v is in steps of the result.
struct Rounded {
  float unit = 0, offset = 0;
  std::vector<int16_t> curve;  // (2, kSegments) or empty

  // Reads the scale of the result at the input `scale`; or, if there is one, a curve at `curve`, and the grid behind it.
  static Rounded of(const Requirement& require, const ort::Node& node, size_t scale, size_t curve, bool curved) {
    if (!curved) return {positive(one<float>(require, node, scale)), 0, {}};
    require(node.type(curve) == ort::kInt16 && node.type(curve + 1) == ort::kFloat, "the curve must be int16, the grid float");
    const ort::Tensor lines = node.constant(curve), grid = node.constant(curve + 1);
    require(lines.shape == std::vector<int64_t>{2, kSegments}, "the curve must be (2, 64)");
    require(grid.size() == 2 && std::isfinite(grid.as<float>()[0]) && grid.as<float>()[1] > 0,
            "the grid must be a beginning and a width");
    const float unit = positive(grid.as<float>()[1] / (0x10000 / kSegments));
    Rounded made{unit, -grid.as<float>()[0] / unit - 0x8000, {lines.as<int16_t>(), lines.as<int16_t>() + lines.size()}};
    for (int16_t each : made.curve) require(each > INT16_MIN, "the curve must be above -32768");
    return made;
  }
};

}  // namespace requant
