// Scores of a row as shares in integers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "exponential.h"
#include "scaled.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

// Size * 2^f for |f| <= 1/2, to 1e-4 of it.
template <int Size>
REQUANT_INLINE Floats power_of_fraction(Floats f) {
  constexpr float kTerms[] = {Size * 9.999244809e-01f, Size * 6.931210160e-01f, Size * 2.426400781e-01f, Size * 5.592203513e-02f};
  Floats sum = fill_floats(kTerms[3]);
#pragma unroll
  for (int i = 2; i >= 0; --i) sum = times_plus(sum, f, fill_floats(kTerms[i]));
  return sum;
}

// Returns Size * 2^t for t <= 0, to 1e-4 of it, and at least Size * 2^-30: numbers below the normal ones are slow.
template <int Size>
REQUANT_INLINE Floats power(Floats t) {
  const Floats inside = larger(t, fill_floats(-30));
  const Ints whole = nearest(inside);
  return times(power_of_fraction<Size>(times_plus(floats(whole), fill_floats(-1), inside)), power_of_two(whole));
}

// Adds the mask to scores: a value for each, or one for all. Scores behind them, up to a multiple of kLanes, change too.
__attribute__((noinline)) inline void add_mask(float* scores, const float* mask, int64_t count, bool repeats) {
  REQUANT_ROLLED
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats added = repeats ? fill_floats(mask[0]) : load_few(mask + i, std::min<int64_t>(kLanes, count - i));
    store_floats(scores + i, plus(load_floats(scores + i), added));
  }
}

// Replaces scores by cap * tanh(score / cap), up to a multiple of kLanes: |tanh(u)| = (1 - e) / (1 + e) with e = exp(-2 |u|).
inline void cap_scores(float* scores, int64_t count, float cap) {
  const Floats one = fill_floats(1), twice = fill_floats(2 / cap);
  REQUANT_ROLLED
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats u = times(load_floats(scores + i), twice);
    const Floats e = exponential(smaller(u, times(u, fill_floats(-1))));
    const Floats sign = bounded(times(u, fill_floats(0x1p100f)), -1, 1);  // where it is no sign, 1 - e is 0
    store_floats(scores + i, times(times(fill_floats(cap), sign), quotient(times_plus(e, fill_floats(-1), one), plus(one, e))));
  }
}

// Returns the greatest of some scores, whose number is a multiple of 4 * kLanes; NaN if one of them is NaN or infinite, except
// -infinity beside others.
inline float greatest(const float* scores, int64_t count) {
  Floats most[4], sum[4];
  for (int k = 0; k < 4; ++k) most[k] = fill_floats(-INFINITY), sum[k] = fill_floats(0);
  REQUANT_ROLLED
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

// Finds the greatest score as VectorKernels says.
inline float greatest_seen(const AttentionSize& size, const Head& head, int64_t row, int64_t count, float* scores) {
  const int64_t whole = divided(count, 4 * kLanes) * 4 * kLanes;
  if (size.cap > 0) cap_scores(scores, count, size.cap);
  if (head.mask != nullptr) add_mask(scores, head.mask + row * head.mask_step, count, head.mask_repeats);
  if (head.window != nullptr) add_mask(scores, head.window + row * head.window_step, count, false);
  std::fill_n(scores, std::min(count, size.hidden_before(row)), -INFINITY);
  // a vector waits for single numbers that were stored where it is loaded: so those behind the last key are not stored again
  const int64_t seen = std::min(count, size.seen_by(row));
  const bool filled = seen == size.keys && size.cap == 0;
  std::fill(scores + (filled ? divided(seen, kLanes) * kLanes : seen), scores + whole, -INFINITY);
  const float found = greatest(scores, whole);
  const bool hidden = size.unseen_is_zero && std::isnan(found) &&
                      std::all_of(scores, scores + count, [](float score) { return score == -INFINITY; });
  return hidden ? -INFINITY : found;
}

// How shares become the softmax: times `step`. They are rough if rounding changed their sum by more than a 32nd: many small ones
// count as none then.
struct Shares {
  float step;
  bool rough;
};

// Returns Size * exp(score - most) for a vector of scores.
template <int Size>
REQUANT_INLINE Floats share_of(const float* scores, float most) {
  const Floats below = plus(load_floats(scores), fill_floats(-most));
  return power<Size>(times(below, fill_floats(1.44269504f)));
}

// Writes shares[i] = rint(255 exp(scores[i] - most)), where `most` is the greatest score. Scores from `count` on are -infinity,
// up to a multiple of 4 * kLanes; so many are written. `sink` is a score beside them. If `most` is NaN the step is NaN, and if it
// is -infinity the step is 0.
inline Shares round_softmax(const float* scores, int64_t count, float most, float sink, uint8_t* shares) {
  const int64_t whole = divided(count, 4 * kLanes) * 4 * kLanes;
  if (!std::isfinite(most)) {
    std::memset(shares, 0, whole);
    return {std::isnan(most) ? NAN : 0, false};
  }
  Ints sum = nearest(fill_floats(0));
  Floats exact = fill_floats(0);
  for (int64_t i = 0; i < whole; i += 4 * kLanes) {
    Floats value[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      value[k] = i + k * kLanes < count ? share_of<255>(scores + i + k * kLanes, most) : fill_floats(0);
    exact = plus(exact, plus(plus(value[0], value[1]), plus(value[2], value[3])));
    const Bytes made = ordered(rounded_bytes(value, 0));
    sum = dot(sum, made, fill(1));
    store_bytes(shares + i, made);
  }
  const float rounded = sum_of(floats(sum)) + static_cast<float>(kOffset * whole);
  return {1 / (rounded + (sink > -INFINITY ? 255 * std::exp(sink - most) : 0)), std::abs(sum_of(exact) - rounded) * 32 > rounded};
}

// Writes the shares of a row in 16 bits: 256 * high[i] + low[i] = about 256 * 255 exp(scores[i] - most). The arguments are those
// of `round_softmax`; returns the inverse of the sum of all shares.
inline float round_finely(const float* scores, int64_t count, float most, float sink, uint8_t* high, uint8_t* low) {
  const int64_t whole = divided(count, 4 * kLanes) * 4 * kLanes;
  Ints sums[2] = {nearest(fill_floats(0)), nearest(fill_floats(0))};
  for (int64_t i = 0; i < whole; i += 4 * kLanes) {
    Floats above[4], below[4];
    for (int k = 0; k < 4; ++k) {
      const Floats value = i + k * kLanes < count ? share_of<255>(scores + i + k * kLanes, most) : fill_floats(0);
      above[k] = floats(nearest(plus(value, fill_floats(-0.5f))));  // rounded down
      below[k] = times(times_plus(above[k], fill_floats(-1), value), fill_floats(256));
    }
    const Bytes made[2] = {ordered(rounded_bytes(above, 0)), ordered(rounded_bytes(below, 0))};
    store_bytes(high + i, made[0]);
    store_bytes(low + i, made[1]);
    for (int part = 0; part < 2; ++part) sums[part] = dot(sums[part], made[part], fill(1));
  }
  const float zeros = static_cast<float>(kOffset * whole), unused = 256 * 255 * std::exp(sink - most);
  return 1 / (256 * (sum_of(floats(sums[0])) + zeros) + sum_of(floats(sums[1])) + zeros + unused);
}

}  // namespace requant::REQUANT_TARGET
