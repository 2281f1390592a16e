// Products of rows of bytes and a panel of weights, in vectors: all sums of some rows stay in registers.
//
// The file that includes this has included `multiply_rows` of its instruction set: rows_repeat.h or rows_lanes.h.
#pragma once

#include "target.h"

namespace requant::REQUANT_TARGET {

constexpr int kPanel = 2 * kLanes;     // output channels of a panel
constexpr int kRows = kVectorRows;     // rows of one product
constexpr int64_t kDepth = 4;          // rows are padded to a multiple of this many bytes
constexpr int64_t kPatches = 1 << 15;  // bytes of the rows of one task, about: they stay in the nearest cache

// What a thread does before and after it multiplies: nothing.
struct Multiplier {};

// Multiplies up to `kRows` rows by a panel. The number of rows is a constant in `multiply_rows`, so that its sums stay in
// registers.
//
//   rows, count, stride: the first row, their number, and the bytes from one to the next
//   w, quads: the panel: for each four bytes of a row the four weights of each channel
//   start: what the sums of a panel begin with
//   narrow: whether `dot_narrow` is exact
template <class Finish, int Rows = kRows>
void multiply(const uint8_t* rows, int64_t count, int64_t stride, const uint8_t* w, int64_t quads, const int32_t* start,
              bool narrow, const Finish& finish) {
  if constexpr (Rows > 1)
    if (count < Rows) return multiply<Finish, Rows - 1>(rows, count, stride, w, quads, start, narrow, finish);
  narrow ? multiply_rows<Rows, true>(rows, stride, w, quads, start, finish)
         : multiply_rows<Rows, false>(rows, stride, w, quads, start, finish);
}

}  // namespace requant::REQUANT_TARGET
