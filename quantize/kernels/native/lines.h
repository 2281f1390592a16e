// Functions of each channel that are two lines, which meet at one value, with a curve behind them or not.
#pragma once

#include <algorithm>
#include <optional>

#include "curve.h"
#include "scaled.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

static_assert(kBytes <= BentLines::kBehind);

// Computes whole vectors, as many as begin before `count`; their parameters begin at `place`, and after a period again at 0.
template <bool Curved>
__attribute__((noinline)) void bend_vectors(const BentLines& lines, const Curve* curve, const uint8_t* from, uint8_t* to,
                                            size_t count, size_t place) {
  const float least = static_cast<float>(lines.least), most = static_cast<float>(lines.most);
  const Floats none = fill_floats(0);
  for (size_t i = 0; i < count; i += kBytes) {
    Floats value[4];
    for (size_t k = 0; k < 4; ++k) {
      const size_t at = place + k * kLanes, same = at & lines.kept;
      const Floats x = floats(widen(from + i + k * kLanes, lines.bend));
      const Floats below = times_plus(smaller(x, none), load_floats(&lines.below[at]), load_floats(&lines.level[same]));
      value[k] = bounded(times_plus(larger(x, none), load_floats(&lines.above[same]), below), least, most);
    }
    store_bytes(to + i, ordered(Curved ? curve->bytes_of(value) : rounded_bytes(value, 0)));
    place = place + kBytes == lines.period ? 0 : place + kBytes;
  }
}

inline void bend_lines(const BentLines& lines, const uint8_t* from, uint8_t* to, size_t count) {
  const auto bend = lines.curve.empty() ? bend_vectors<false> : bend_vectors<true>;
  std::optional<Curve> made;  // its tables take as long as a thousand bytes
  const Curve* const curve = lines.curve.empty() ? nullptr : &made.emplace(lines.curve);
  const size_t step = lines.period % kBytes ? lines.period : count;
  for (size_t first = 0; first < count; first += step) {
    const size_t all = std::min(step, count - first), whole = all / kBytes * kBytes;
    bend(lines, curve, from + first, to + first, whole, 0);
    if (whole == all) continue;
    alignas(64) uint8_t part[kBytes] = {};
    std::copy_n(from + first + whole, all - whole, part);
    bend(lines, curve, part, part, kBytes, whole % lines.period);
    std::copy_n(part, all - whole, to + first + whole);
  }
}

}  // namespace requant::REQUANT_TARGET
