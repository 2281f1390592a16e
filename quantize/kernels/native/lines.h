// Functions of each channel that are two lines, which meet at one value.
#pragma once

#include <algorithm>
#include <cmath>

#include "scaled.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

// Computes `count` elements, fewer than a vector of bytes has, whose parameters begin at `place`.
inline void bend_few(const BentLines& lines, const uint8_t* from, uint8_t* to, size_t count, size_t place) {
  const float least = static_cast<float>(lines.least), most = static_cast<float>(lines.most);
#pragma clang loop vectorize(disable) unroll(disable)
  for (size_t i = 0; i < count; ++i) {
    const float x = static_cast<float>(from[i] - lines.bend);
    const float value = std::max(x, 0.0f) * lines.above[place + i] + std::min(x, 0.0f) * lines.below[place + i];
    to[i] = static_cast<uint8_t>(std::nearbyintf(std::clamp(value + lines.level[place + i], least, most)));
  }
}

inline void bend_lines(const BentLines& lines, const uint8_t* from, uint8_t* to, size_t count) {
  const float least = static_cast<float>(lines.least), most = static_cast<float>(lines.most);
  const Floats none = fill_floats(0);
  for (size_t first = 0; first < count; first += lines.period) {
    const size_t all = std::min(lines.period, count - first);
    size_t i = 0;
    for (; i + kBytes <= all; i += kBytes) {
      Floats value[4];
      for (size_t k = 0; k < 4; ++k) {
        const size_t at = i + k * kLanes;
        const Floats x = floats(widen(from + first + at, lines.bend));
        const Floats below = times_plus(smaller(x, none), load_floats(&lines.below[at]), load_floats(&lines.level[at]));
        value[k] = bounded(times_plus(larger(x, none), load_floats(&lines.above[at]), below), least, most);
      }
      store_bytes(to + first + i, ordered(rounded_bytes(value, 0)));
    }
    bend_few(lines, from + first + i, to + first + i, all - i, i);
  }
}

}  // namespace requant::REQUANT_TARGET
