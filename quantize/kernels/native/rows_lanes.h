// The inner product of rows and a panel in vectors of NEON.
//
// An instruction multiplies one lane of a vector, four bytes of a row, by a vector of weights. So one load reads four quads
// of a row, and no instruction repeats a quad.
#pragma once

#include "rows_finish.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

// Adds the products of one quad of each row, which is a lane of its vector.
template <int Lane, int Rows>
void add_quad(Ints (&sum)[Rows][2], const Bytes (&x)[Rows], const uint8_t* w) {
  const Bytes first = load_bytes(w), second = load_bytes(w + kBytes);
  for (int row = 0; row < Rows; ++row) {
    sum[row][0] = dot_lane<Lane>(sum[row][0], x[row], first);
    sum[row][1] = dot_lane<Lane>(sum[row][1], x[row], second);
  }
}

// Multiplies `Rows` rows by a panel, and passes the sums to finish(row, rows, sums). `dot_lane` is exact for all weights.
template <int Rows, bool, class Finish>
void multiply_rows(const uint8_t* rows, int64_t stride, const uint8_t* w, int64_t quads, const int32_t* start,
                   const Finish& finish) {
  constexpr int64_t kQuad = 2 * kBytes;  // bytes of the weights of a quad
  Ints sum[Rows][2];
  for (auto& each : sum) {
    each[0] = load_ints(start);
    each[1] = load_ints(start + kLanes);
  }
  Bytes x[Rows];
  for (; quads >= 4; quads -= 4, rows += 16, w += 4 * kQuad) {
    for (int row = 0; row < Rows; ++row) x[row] = load_bytes(rows + row * stride);
    add_quad<0>(sum, x, w);
    add_quad<1>(sum, x, w + kQuad);
    add_quad<2>(sum, x, w + 2 * kQuad);
    add_quad<3>(sum, x, w + 3 * kQuad);
  }
  for (; quads > 0; --quads, rows += 4, w += kQuad) {
    for (int row = 0; row < Rows; ++row) x[row] = repeat(rows + row * stride);
    add_quad<0>(sum, x, w);
  }
  finish_rows<Rows>(sum, finish);
}

}  // namespace requant::REQUANT_TARGET
