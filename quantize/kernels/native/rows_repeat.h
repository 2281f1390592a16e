// The inner product of rows and a panel, where each quad of a row is repeated over a vector.
#pragma once

#include "rows_finish.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

// Multiplies `Rows` rows by a panel, and passes the sums to finish(row, rows, sums).
template <int Rows, bool Narrow, class Finish>
void multiply_rows(const uint8_t* rows, int64_t stride, const uint8_t* w, int64_t quads, const int32_t* start,
                   const Finish& finish) {
  Ints sum[Rows][2];
  for (auto& each : sum) {
    each[0] = load_ints(start);
    each[1] = load_ints(start + kLanes);
  }
  for (int64_t quad = 0; quad < quads; ++quad, w += 2 * kBytes) {
    const Bytes first = load_bytes(w), second = load_bytes(w + kBytes);
    for (int row = 0; row < Rows; ++row) {
      const Bytes x = repeat(rows + row * stride + 4 * quad);
      sum[row][0] = Narrow ? dot_narrow(sum[row][0], x, first) : dot(sum[row][0], x, first);
      sum[row][1] = Narrow ? dot_narrow(sum[row][1], x, second) : dot(sum[row][1], x, second);
    }
  }
  finish_rows<Rows>(sum, finish);
}

}  // namespace requant::REQUANT_TARGET
