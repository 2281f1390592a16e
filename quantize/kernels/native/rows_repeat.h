// The inner product of rows and a panel, where each quad of a row is repeated over a vector.
#pragma once

#include "target.h"

namespace requant::REQUANT_TARGET {

// Bytes from the weights to those that are fetched into the nearest cache: a panel is larger than that, and what is read in
// order still comes too late from the second one.
constexpr int64_t kWeightsAhead = 2048;

// Adds the products of `quads` quads of some rows, from byte `at` of each on, and a panel; `w` moves behind them. `Cold`: one
// vector of each quad is fetched into the second cache, `beyond` bytes behind the weights.
template <bool Narrow, bool Cold, int Rows, int Vectors>
REQUANT_INLINE void add_products(Ints (&sum)[Rows][Vectors], const uint8_t* const (&rows)[Rows], int64_t at,
                                 const uint8_t*& w, int64_t quads, int64_t beyond) {
  for (; quads > 0; --quads, at += 4, w += Vectors * kBytes) {
    if (Cold) __builtin_prefetch(w + beyond, 0, 2);
    Bytes weights[Vectors];
#pragma unroll
    for (int vector = 0; vector < Vectors; ++vector) {
      weights[vector] = load_bytes(w + vector * kBytes);
      __builtin_prefetch(w + vector * kBytes + kWeightsAhead, 0, 3);
    }
#pragma unroll
    for (int row = 0; row < Rows; ++row) {
      const Bytes x = repeat(rows[row] + at);
#pragma unroll
      for (int vector = 0; vector < Vectors; ++vector)
        sum[row][vector] = Narrow ? dot_narrow(sum[row][vector], x, weights[vector]) : dot(sum[row][vector], x, weights[vector]);
    }
  }
}

}  // namespace requant::REQUANT_TARGET
