// Parts of vectors of floats, where an instruction set has no masks for them.
#pragma once

#include <cstdint>
#include <cstring>

#include "target.h"

namespace requant::REQUANT_TARGET {

// Returns a vector whose first `count` numbers are there, and whose others are 0.
REQUANT_INLINE Floats load_few(const float* from, int64_t count) {
  if (count == kLanes) return load_floats(from);
  float part[kLanes] = {};
  std::memcpy(part, from, count * sizeof(float));
  return load_floats(part);
}

// Returns the first `count` numbers of a vector, and 0 behind them.
REQUANT_INLINE Floats first_of(Floats value, int64_t count) {
  if (count == kLanes) return value;
  float part[kLanes];
  store_floats(part, value);
  return load_few(part, count);
}

// Writes the first `count` numbers of a vector.
REQUANT_INLINE void store_few(float* to, Floats value, int64_t count) {
  if (count == kLanes) return store_floats(to, value);
  float made[kLanes];
  store_floats(made, value);
  std::memcpy(to, made, count * sizeof(float));
}

}  // namespace requant::REQUANT_TARGET
