// Lanes of vectors of floats in another order, where the compiler knows the type of the vectors.
#pragma once

#include <utility>

#include "target.h"

namespace requant::REQUANT_TARGET {

template <int Distance, int... Lane>
REQUANT_INLINE Floats swapped(Floats x, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(x, x, (Lane ^ Distance)...);
}

// Returns the numbers of a vector, each in the place of the one whose index differs by the bit `Distance`.
template <int Distance>
REQUANT_INLINE Floats swapped(Floats x) {
  return swapped<Distance>(x, std::make_integer_sequence<int, kLanes>());
}

}  // namespace requant::REQUANT_TARGET
