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

// Returns what an operation makes of all numbers of a vector, by halves.
template <class Operation>
REQUANT_INLINE float joined(Floats value, const Operation& operation) {
  float all[kLanes];
  store_floats(all, value);
#pragma unroll
  for (int half = kLanes / 2; half > 0; half /= 2)
#pragma unroll
    for (int lane = 0; lane < half; ++lane) all[lane] = operation(all[lane], all[lane + half]);
  return all[0];
}

REQUANT_INLINE float least_of(Floats value) {
  return joined(value, [](float a, float b) { return b < a ? b : a; });
}
REQUANT_INLINE float greatest_of(Floats value) {
  return joined(value, [](float a, float b) { return a < b ? b : a; });
}
REQUANT_INLINE float sum_of(Floats value) {
  return joined(value, [](float a, float b) { return a + b; });
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
