// Sums in float, and how they are rounded.
#pragma once

#include <cstdint>

namespace requant::REQUANT_TARGET {

inline Floats scaled(Ints sum, const float* multiplier) { return times(floats(sum), load_floats(multiplier)); }

// Returns (from - zero) * ratio for as many bytes as a vector has int32.
inline Floats scaled(const uint8_t* from, int zero, float ratio) {
  return times(floats(widen(from, zero)), fill_floats(ratio));
}

// Returns rint(value), clipped to [least, most].
inline Ints rounded(Floats value, float least, float most) { return nearest(bounded(value, least, most)); }

}  // namespace requant::REQUANT_TARGET
