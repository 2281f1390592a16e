// Sums of the values of some places in rows of bytes, and of their squares.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "pool.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

// Adds `Count` places of some rows, `step` bytes apart. The compiler turns the loops into vectors.
template <size_t Count>
__attribute__((noinline)) void add_moments_of(const uint8_t* row, size_t rows, size_t step, uint32_t* sum, uint32_t* squares) {
  uint32_t part[Count], product[Count];
  std::copy_n(sum, Count, part);
  std::copy_n(squares, Count, product);
  for (; rows > 0; --rows, row += step)
    for (size_t c = 0; c < Count; ++c) {
      const uint16_t x = row[c];
      part[c] += x;
      product[c] += static_cast<uint16_t>(x * x);
    }
  std::copy_n(part, Count, sum);
  std::copy_n(product, Count, squares);
}

// moments[i] += the sum of from[r, i] over all rows r, and moments[stride + i] += that of their squares.
inline void add_moments(const uint8_t* from, size_t rows, size_t length, size_t stride, uint32_t* moments) {
  size_t at = 0;
  const auto add = [&]<size_t Count>() __attribute__((always_inline)) {
    for (; at + Count <= length; at += Count)
      add_moments_of<Count>(from + at, rows, length, moments + at, moments + stride + at);
  };
  add.template operator()<kChannels>();
  add.template operator()<kChannels / 4>();
  add.template operator()<1>();
}

}  // namespace requant::REQUANT_TARGET
