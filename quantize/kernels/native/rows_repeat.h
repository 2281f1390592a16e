// The inner product of rows and a panel, where each quad of a row is repeated over a vector.
#pragma once

#include "target.h"

namespace requant::REQUANT_TARGET {

// Adds the products of `quads` quads of some rows, which are `stride` bytes apart, and a panel; `w` moves behind them.
template <bool Narrow, int Rows, int Vectors>
REQUANT_INLINE void add_products(Ints (&sum)[Rows][Vectors], const uint8_t* rows, int64_t stride,
                                                        const uint8_t*& w, int64_t quads) {
  for (; quads > 0; --quads, rows += 4, w += Vectors * kBytes) {
    Bytes weights[Vectors];
#pragma unroll
    for (int vector = 0; vector < Vectors; ++vector) weights[vector] = load_bytes(w + vector * kBytes);
#pragma unroll
    for (int row = 0; row < Rows; ++row) {
      const Bytes x = repeat(rows + row * stride);
#pragma unroll
      for (int vector = 0; vector < Vectors; ++vector)
        sum[row][vector] = Narrow ? dot_narrow(sum[row][vector], x, weights[vector]) : dot(sum[row][vector], x, weights[vector]);
    }
  }
}

}  // namespace requant::REQUANT_TARGET
