// Scores of a row as shares in integers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "scaled.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

// 2^f for |f| <= 1/2, to 1e-4.
REQUANT_INLINE Floats power_of_fraction(Floats f) {
  constexpr float kTerms[] = {9.999244809e-01f, 6.931210160e-01f, 2.426400781e-01f, 5.592203513e-02f};
  Floats sum = fill_floats(kTerms[3]);
#pragma unroll
  for (int i = 2; i >= 0; --i) sum = times_plus(sum, f, fill_floats(kTerms[i]));
  return sum;
}

// Returns 2^t for t <= 0, to 1e-4, and at least 2^-30: numbers below the normal ones are slow.
REQUANT_INLINE Floats power(Floats t) {
  const Floats inside = bounded(t, -30, 0);
  const Ints whole = nearest(inside);
  return times(power_of_fraction(times_plus(floats(whole), fill_floats(-1), inside)), power_of_two(whole));
}

// Adds the mask to scores: a value for each, or one for all.
inline void add_mask(float* scores, const float* mask, int64_t count, bool repeats) {
  const auto add_some = [](float* to, Floats value) { store_floats(to, plus(load_floats(to), value)); };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) add_some(scores + i, repeats ? fill_floats(mask[0]) : load_floats(mask + i));
  for (; i < count; ++i) scores[i] += mask[repeats ? 0 : i];
}

// Returns the greatest of some scores, whose number is a multiple of 4 * kLanes; NaN if one of them is NaN or infinite, except
// -infinity beside others.
inline float greatest(const float* scores, int64_t count) {
  Floats most[4], sum[4];
  for (int k = 0; k < 4; ++k) most[k] = fill_floats(-INFINITY), sum[k] = fill_floats(0);
  for (int64_t i = 0; i < count; i += 4 * kLanes)
    for (int k = 0; k < 4; ++k) {
      const Floats each = load_floats(scores + i + k * kLanes);
      most[k] = larger(most[k], each);
      sum[k] = times_plus(each, fill_floats(0x1p-40f), sum[k]);  // NaN if a score is NaN; it overflows for no finite scores
    }
  const float found = greatest_of(larger(larger(most[0], most[1]), larger(most[2], most[3])));
  const float any = sum_of(plus(plus(sum[0], sum[1]), plus(sum[2], sum[3])));
  return std::isfinite(found) && !std::isnan(any) ? found : NAN;
}

// Writes shares[i] = rint(255 exp(scores[i] - greatest score)), and returns 1 / (sum of shares): times it, they are the softmax.
// Scores behind the first `count` count as none, up to a multiple of 4 * kLanes; so many are read and written. Without a finite
// greatest score the result is NaN.
inline float round_softmax(float* scores, int64_t count, uint8_t* shares) {
  const int64_t whole = divided(count, 4 * kLanes) * 4 * kLanes;
  std::fill(scores + count, scores + whole, -INFINITY);
  const float most = greatest(scores, whole);
  if (std::isnan(most)) {
    std::memset(shares, 0, whole);
    return NAN;
  }
  Ints sum = nearest(fill_floats(0));
  for (int64_t i = 0; i < whole; i += 4 * kLanes) {
    Floats value[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const Floats below = plus(load_floats(scores + i + k * kLanes), fill_floats(-most));
      value[k] = times(power(times(below, fill_floats(1.44269504f))), fill_floats(255));
    }
    const Bytes made = ordered(rounded_bytes(value, 0));
    sum = dot(sum, made, fill(1));
    store_bytes(shares + i, made);
  }
  return 1 / (sum_of(floats(sum)) + static_cast<float>(kOffset * whole));
}

}  // namespace requant::REQUANT_TARGET
