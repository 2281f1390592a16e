// A function of a sum as a piecewise polynomial: what is rounded is its result, not the sum in front of it.
#pragma once

#include <vector>

#include "target.h"

namespace requant::REQUANT_TARGET {

// c0 + t (c1 + t c2) with three coefficients for each of the segments [0, 1), [1, 2), ... of t. The tables stay in registers.
class Curve {
 public:
  explicit Curve(const std::vector<float>& coefficients)
      : Curve(coefficients.empty() ? kNone : coefficients.data()) {}

  Floats operator()(Floats t) const {
    const Floats inside = bounded(t, 0, kLast);
    const Ints segment = truncated(inside);
    const Floats slope = times_plus(inside, pick(quadratic_, segment), pick(linear_, segment));
    return times_plus(inside, slope, pick(constant_, segment));
  }

 private:
  static constexpr float kLast = 0x1.fffffep4f;  // the largest number below 32
  static constexpr float kNone[3 * kSegments] = {};

  explicit Curve(const float* coefficients)
      : constant_(load_entries(coefficients)),
        linear_(load_entries(coefficients + kSegments)),
        quadratic_(load_entries(coefficients + 2 * kSegments)) {}

  Entries constant_, linear_, quadratic_;
};

}  // namespace requant::REQUANT_TARGET
