// What becomes of the sums of some rows.
#pragma once

#include "target.h"

namespace requant::REQUANT_TARGET {

// Calls finish(row, rows, sums) for each two rows; the last row may stand alone, and then its sums are repeated.
template <int Rows, class Finish>
void finish_rows(const Ints (&sum)[Rows][2], const Finish& finish) {
  for (int row = 0; row < Rows; row += 2) {
    const int next = row + 1 < Rows ? row + 1 : row;
    const Ints pair[4] = {sum[row][0], sum[row][1], sum[next][0], sum[next][1]};
    finish(row, next - row + 1, pair);
  }
}

}  // namespace requant::REQUANT_TARGET
