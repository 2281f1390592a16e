// Tables of more than 256 entries, which no shuffle of bytes looks up.
#pragma once

#include <cstdint>
#include <cstring>

namespace requant::REQUANT_TARGET {

// Looks up two vectors of indices, each plus `zero`. Four results at a time go to `first` and to `second`, and the next four
// `step` bytes behind them.
inline void look_up_fine(Ints one, Ints other, int zero, const uint8_t* table, uint8_t* first, uint8_t* second, int step) {
  uint16_t index[2 * kLanes];
  store_words(index, one, other, zero);
  for (int quad = 0; quad < kLanes / 4; ++quad) {
    uint64_t four[2];  // one load for four indices
    std::memcpy(four, index + 8 * quad, sizeof four);
    uint32_t made[2] = {};
    for (int i = 0; i < 8; ++i)
      made[i / 4] |= static_cast<uint32_t>(table[four[i / 4] >> (16 * (i % 4)) & 0xffff]) << (8 * (i % 4));
    std::memcpy(first + step * quad, &made[0], sizeof made[0]);
    std::memcpy(second + step * quad, &made[1], sizeof made[1]);
  }
}

}  // namespace requant::REQUANT_TARGET
