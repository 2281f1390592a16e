// Sums in float, before they are rounded.
#pragma once

#include <cstdint>

namespace requant::REQUANT_TARGET {

inline Floats scaled(Ints sum, const float* multiplier) { return times(floats(sum), load_floats(multiplier)); }

// Returns (from - zero) * ratio for as many bytes as a vector has int32.
inline Floats scaled(const uint8_t* from, int zero, float ratio) {
  return times(floats(widen(from, zero)), fill_floats(ratio));
}

}  // namespace requant::REQUANT_TARGET
