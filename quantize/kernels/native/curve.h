// A function of a sum as lines in segments: what is rounded is its result, not the sum in front of it.
#pragma once

#include <array>
#include <vector>

#include "target.h"

namespace requant::REQUANT_TARGET {

static_assert(kSegments == 64, "the tables of Lines have 64 entries");

class Curve {
 public:
  explicit Curve(const std::vector<int16_t>& lines) : lines_(turned(lines).data()) {}

  // Returns the results of four vectors, clipped to [0, 255], in the order of `bytes`. The highest bits of a sum tell the
  // segment; the others, as a signed number, how far it is from the middle of it.
  REQUANT_INLINE Bytes bytes_of(const Floats (&value)[4]) const {
    Halves sum[2] = {halves(nearest(value[0]), nearest(value[1])), halves(nearest(value[2]), nearest(value[3]))};
    const Halves segment[2] = {high_bits<kSegmentBits>(sum[0]), high_bits<kSegmentBits>(sum[1])};
    Halves middle[2], slope[2];
    lines_.pick(segment, middle, slope);
    for (int i = 0; i < 2; ++i) {
      const Halves away = flipped(shifted_left<kSegmentBits>(sum[i]));
      sum[i] = shifted_right<kStepBits>(plus_halves(middle[i], times_halves(slope[i], away)));
    }
    return bytes(sum[0], sum[1]);
  }

 private:
  // The highest bits of the first segment are those of a negative number: the second half of the tables comes first.
  static std::array<int16_t, 2 * kSegments> turned(const std::vector<int16_t>& lines) {
    std::array<int16_t, 2 * kSegments> made{};
    for (size_t i = 0; i < lines.size(); ++i) made[i ^ (kSegments / 2)] = lines[i];
    return made;
  }

  Lines lines_;
};

}  // namespace requant::REQUANT_TARGET
