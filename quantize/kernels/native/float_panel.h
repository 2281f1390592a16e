// The product of rows and a panel of a constant matrix, all in float.
#pragma once

#include <algorithm>

#include "target.h"

namespace requant::REQUANT_TARGET {

// Multiplies some rows by two vectors of columns from `first` on.
template <int Rows>
REQUANT_INLINE void multiply_few(const FloatPanel& panel, int64_t first, const float* x, float* y) {
  Floats sum[Rows][2];
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < 2; ++v) sum[r][v] = load_floats(panel.bias + first + v * kLanes);
  const float* w = panel.weights + first;
  for (int64_t i = 0; i < panel.inputs; ++i, w += kFloatPanel) {
    const Floats columns[2] = {load_floats(w), load_floats(w + kLanes)};
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < 2; ++v) sum[r][v] = times_plus(fill_floats(x[r * panel.inputs + i]), columns[v], sum[r][v]);
  }
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < 2; ++v) {
      const int64_t at = first + v * kLanes, some = std::min<int64_t>(kLanes, panel.columns - at);
      if (some > 0) store_few(y + r * panel.step + at, sum[r][v], some);
    }
}

inline void multiply_floats(const FloatPanel& panel, const float* x, float* y, int64_t rows) {
  for (int64_t first = 0; first < panel.columns; first += 2 * kLanes) {
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) multiply_few<4>(panel, first, x + row * panel.inputs, y + row * panel.step);
    REQUANT_ROLLED
    for (; row < rows; ++row) multiply_few<1>(panel, first, x + row * panel.inputs, y + row * panel.step);
  }
}

}  // namespace requant::REQUANT_TARGET
