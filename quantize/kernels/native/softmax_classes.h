// The softmax over few values of many items, exact to the last bits of float.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "aligned.h"
#include "exponential.h"
#include "scaled.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

// Joins the numbers of each group of neighbours, whose size is a power of two: each of them becomes the result.
template <class Operation>
REQUANT_INLINE Floats joined_groups(Floats x, int64_t size, const Operation& operation) {
  if (size > 1) x = operation(x, swapped<1>(x));
  if (size > 2) x = operation(x, swapped<2>(x));
  if constexpr (kLanes > 4)
    if (size > 4) x = operation(x, swapped<4>(x));
  if constexpr (kLanes > 8)
    if (size > 8) x = operation(x, swapped<8>(x));
  return x;
}

// What a softmax is of: numbers in float.
struct FloatScores {
  const float* from;
  REQUANT_INLINE Floats few(int64_t at, int64_t count) const { return load_few(from + at, count); }
  float one(int64_t at) const { return from[at]; }
};

// Numbers in uint8, times a scale. The zero point would change all of them by the same amount, and the softmax not at all.
struct ByteScores {
  const uint8_t* from;
  float scale;

  REQUANT_INLINE Floats few(int64_t at, int64_t count) const {
    if (count == kLanes) return scaled(from + at, 0, scale);
    uint8_t part[kLanes] = {};
    std::copy_n(from + at, count, part);
    return scaled(part, 0, scale);
  }

  float one(int64_t at) const { return static_cast<float>(from[at]) * scale; }
};

// The softmax of items that are groups of neighbours in vectors.
template <class Scores>
void softmax_of_groups(int64_t classes, const Scores& x, float* y, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t some = std::min<int64_t>(kLanes, count - i);
    const Floats value = x.few(i, some), most = joined_groups(value, classes, larger);
    const Floats made = exponential(times_plus(most, fill_floats(-1), value));
    store_few(y + i, quotient(made, joined_groups(made, classes, plus)), some);
  }
}

// Replaces the `classes` values, `step` apart, of each of `count` items side by side by their softmax; whole vectors.
inline void softmax_in_place(float* x, int64_t classes, int64_t step, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    Floats most = load_floats(x + i), sum = fill_floats(0);
    for (int64_t c = 1; c < classes; ++c) most = larger(most, load_floats(x + c * step + i));
    most = times(most, fill_floats(-1));
    for (int64_t c = 0; c < classes; ++c) {
      const Floats made = exponential(plus(load_floats(x + c * step + i), most));
      sum = plus(sum, made);
      store_floats(x + c * step + i, made);
    }
    const Floats factor = quotient(fill_floats(1), sum);
    for (int64_t c = 0; c < classes; ++c) store_floats(x + c * step + i, times(load_floats(x + c * step + i), factor));
  }
}

// Copies `count` scores, `step` apart, so that they lie side by side.
template <class Scores>
void copy_together(const Scores& x, int64_t first, int64_t step, float* to, int64_t count) {
  for (int64_t i = 0; step > 1 && i < count; ++i) to[i] = x.one(first + i * step);
  for (int64_t i = 0; step == 1 && i < count; i += kLanes) {
    const int64_t some = std::min<int64_t>(kLanes, count - i);
    store_few(to + i, x.few(first + i, some), some);
  }
}

// Copies `count` values that lie side by side, so that they are `step` apart.
inline void copy_apart(const float* from, float* to, int64_t step, int64_t count) {
  if (step == 1) return void(std::copy_n(from, count, to));
  for (int64_t i = 0; i < count; ++i) to[i * step] = from[i];
}

// Items that are not groups in vectors are copied, some at a time, so that they lie side by side and their classes do not have
// the same place in the cache.
template <class Scores>
void softmax_of(const Classes& size, const Scores& x, float* y) {
  if (size.step == 1 && size.classes <= kLanes && std::has_single_bit(static_cast<uint64_t>(size.classes)))
    return softmax_of_groups(size.classes, x, y, size.classes * size.count);
  constexpr int64_t kHeld = 1 << 12;  // values that are copied at once, about: they stay in the first cache
  thread_local Scratch scratch;
  const int64_t classes = size.classes, step = size.step, apart = step == 1 ? classes : 1;
  const int64_t most = std::clamp<int64_t>(kHeld / classes / kLanes * kLanes, kLanes, divided(size.count, kLanes) * kLanes);
  float* const copies = scratch.floats(classes * most);
  for (int64_t first = 0; first < size.count; first += most) {
    const int64_t count = std::min(most, size.count - first), whole = divided(count, kLanes) * kLanes, at = first * apart;
    for (int64_t c = 0; c < classes; ++c) {
      copy_together(x, at + c * step, apart, copies + c * most, count);
      std::fill(copies + c * most + count, copies + c * most + whole, 0.0f);
    }
    softmax_in_place(copies, classes, most, whole);
    for (int64_t c = 0; c < classes; ++c) copy_apart(copies + c * most, y + at + c * step, apart, count);
  }
}

inline void softmax(const Classes& size, const float* x, float* y) { softmax_of(size, FloatScores{x}, y); }

inline void softmax_of_bytes(const Classes& size, const uint8_t* x, float scale, float* y) {
  softmax_of(size, ByteScores{x, scale}, y);
}

}  // namespace requant::REQUANT_TARGET
