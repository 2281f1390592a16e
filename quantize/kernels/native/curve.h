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

  // Returns the results of sums in parts of a segment. The highest bits tell the segment; the others, as a signed number,
  // how far it is from the middle of it.
  REQUANT_INLINE Halves operator()(Halves sum) const {
    Halves middle, slope;
    lines_.pick(high_bits<kSegmentBits>(sum), middle, slope);
    const Halves away = flipped(shifted_left<kSegmentBits>(sum));
    return shifted_right<kStepBits>(plus_halves(middle, times_halves(slope, away)));
  }

  // Returns the results of four vectors, clipped to [0, 255], in the order of `bytes`.
  REQUANT_INLINE Bytes bytes_of(const Floats (&value)[4]) const {
    const Halves first = halves(nearest(value[0]), nearest(value[1])), second = halves(nearest(value[2]), nearest(value[3]));
    return bytes((*this)(first), (*this)(second));
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
