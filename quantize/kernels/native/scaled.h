// Sums in float, and how they are rounded.
#pragma once

#include <cstdint>

#include "target.h"

namespace requant::REQUANT_TARGET {

inline Floats scaled(Ints sum, const float* multiplier) { return times(floats(sum), load_floats(multiplier)); }

// Returns (from - zero) * ratio for as many bytes as a vector has int32.
inline Floats scaled(const uint8_t* from, int zero, float ratio) {
  return times(floats(widen(from, zero)), fill_floats(ratio));
}

// Returns rint(value) + zero, clipped to [0, 255], in the order of `bytes`.
REQUANT_INLINE Bytes rounded_bytes(const Floats (&value)[4], int zero) {
  const Halves add = fill_halves(static_cast<int16_t>(zero));
  const Halves first = halves(nearest(value[0]), nearest(value[1])), second = halves(nearest(value[2]), nearest(value[3]));
  return bytes(plus_halves(first, add), plus_halves(second, add));
}

// Returns rint(value), clipped to [least, most].
inline Ints rounded(Floats value, float least, float most) { return nearest(bounded(value, least, most)); }

}  // namespace requant::REQUANT_TARGET
