// What the check program compares with their definition, and what its parts have in common.
#pragma once

#include <cstdint>
#include <random>

#include "aligned.h"
#include "target.h"

namespace requant {

using Guarded = Aligned<uint8_t>;
using Random = std::mt19937_64;

inline constexpr auto serial = [](size_t count, const Work& work) {
  for (size_t i = 0; i < count; ++i) work(i);
};

inline int64_t draw(Random& random, int64_t least, int64_t most) {
  return least + static_cast<int64_t>(random() % static_cast<uint64_t>(most - least + 1));
}

// Returns whether an instruction set computes what has results in float: products, attention, steps of a GRU and an LSTM, and
// the softmax.
bool floats_are_right(const Target& target, Random& random);

}  // namespace requant
