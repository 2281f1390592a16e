// The inner product of rows and a panel in vectors of NEON.
//
// An instruction multiplies one lane of a vector, four bytes of a row, by a vector of weights. So one load reads four quads
// of a row, and no instruction repeats a quad.
#pragma once

#include "target.h"

namespace requant::REQUANT_TARGET {

// Adds the products of one quad of each row, which is a lane of its vector; `w` moves behind its weights.
template <int Lane, int Rows, int Vectors>
REQUANT_INLINE void add_quad(Ints (&sum)[Rows][Vectors], const Bytes (&x)[Rows], const uint8_t*& w) {
#pragma unroll
  for (int vector = 0; vector < Vectors; ++vector, w += kBytes) {
    const Bytes weights = load_bytes(w);
#pragma unroll
    for (int row = 0; row < Rows; ++row) sum[row][vector] = dot_lane<Lane>(sum[row][vector], x[row], weights);
  }
}

// Adds the products of `quads` quads of some rows, from byte `at` of each on, and a panel; `w` moves behind them. `Cold`: one
// vector of each quad is fetched into the second cache, `beyond` bytes behind the weights.
// `dot_lane` is exact for all weights.
template <bool, bool Cold, int Rows, int Vectors>
REQUANT_INLINE void add_products(Ints (&sum)[Rows][Vectors], const uint8_t* const (&rows)[Rows], int64_t at,
                                 const uint8_t*& w, int64_t quads, int64_t beyond) {
  Bytes x[Rows];
  for (; quads >= 4; quads -= 4, at += 16) {
    for (int quad = 0; Cold && quad < 4; ++quad) __builtin_prefetch(w + quad * Vectors * kBytes + beyond, 0, 2);
    for (int row = 0; row < Rows; ++row) x[row] = load_bytes(rows[row] + at);
    add_quad<0>(sum, x, w);
    add_quad<1>(sum, x, w);
    add_quad<2>(sum, x, w);
    add_quad<3>(sum, x, w);
  }
  for (; quads > 0; --quads, at += 4) {
    for (int row = 0; row < Rows; ++row) x[row] = repeat(rows[row] + at);
    add_quad<0>(sum, x, w);
  }
}

}  // namespace requant::REQUANT_TARGET
