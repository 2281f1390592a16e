// Tables behind the requantization of a convolution.
#pragma once

#include "target.h"

namespace requant::REQUANT_TARGET {

// Looks up the results of some pixels, `count` channels from one on; `to` is the first of them. Does nothing without a table.
inline void look_up_all(const Convolution& conv, uint8_t* to, int64_t pixels, int64_t channel, int64_t count) {
  const std::vector<uint8_t>& table = conv.table;
  if (table.size() == 256 && count == conv.outputs) return look_up(to, to, pixels * count, table.data());
  for (int64_t pixel = 0; !table.empty() && pixel < pixels; ++pixel, to += conv.outputs) {
    if (table.size() == 256) look_up(to, to, count, table.data());
    for (int64_t c = 0; table.size() > 256 && c < count; ++c) to[c] = table[256 * (channel + c) + to[c]];
  }
}

}  // namespace requant::REQUANT_TARGET
