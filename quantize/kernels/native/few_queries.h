// Attention of few queries in float: each key and each value is read once for a query, from floats or from the bytes of a cache.
#pragma once

#include <cmath>
#include <cstring>

#include "aligned.h"
#include "scaled.h"
#include "softmax.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

inline Floats load_values(const float* from) { return load_floats(from); }
inline Floats load_values(const uint8_t* from) { return floats(widen(from, kCacheZero)); }
inline float value_of(float x) { return x; }
inline float value_of(uint8_t x) { return static_cast<float>(x - kCacheZero); }

// Returns a vector whose first `count` values are there, and whose others are 0.
inline Floats load_part(const float* from, int64_t count) { return load_few(from, count); }
inline Floats load_part(const uint8_t* from, int64_t count) {
  uint8_t part[kLanes];
  std::memset(part, kCacheZero, sizeof part);
  std::memcpy(part, from, count);
  return load_values(part);
}

// Returns the sum of the products of two rows.
template <class Value>
float product_of(const float* x, const Value* y, int64_t count) {
  Floats sum = fill_floats(0);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sum = times_plus(load_floats(x + i), load_values(y + i), sum);
  if (i < count) sum = times_plus(load_few(x + i, count - i), load_part(y + i, count - i), sum);
  return sum_of(sum);
}

// Replaces scores by exp(score - most), exact to 1e-4, and returns their sum; shares below 2^-30 become 0. The arguments are
// those of `round_softmax`, and `most` is finite.
inline float shares_in_place(float* scores, int64_t count, float most) {
  const Floats tiny = fill_floats(-0x1.001p-30f), none = fill_floats(0);
  Floats sum = none;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats share = larger(plus(share_of<1>(scores + i, most), tiny), none);
    store_floats(scores + i, share);
    sum = plus(sum, share);
  }
  return sum_of(sum);
}

// Writes y[c] = factor * the sum of shares[k] * v[k][c] for `count` rows of v, which are `step` values apart.
template <int Vectors, class Value>
REQUANT_INLINE void weigh_columns(const float* shares, const Value* v, int64_t step, int64_t count, float factor, float* y) {
  Floats sum[Vectors];
  for (Floats& each : sum) each = fill_floats(0);
  for (int64_t key = 0; key < count; ++key, v += step) {
    const Floats share = fill_floats(shares[key]);
#pragma unroll
    for (int i = 0; i < Vectors; ++i) sum[i] = times_plus(share, load_values(v + i * kLanes), sum[i]);
  }
  for (int i = 0; i < Vectors; ++i) store_floats(y + i * kLanes, times(sum[i], fill_floats(factor)));
}

// The same for all columns.
template <class Value>
void weigh(const float* shares, const Value* v, int64_t step, int64_t count, float factor, float* y, int64_t width) {
  int64_t column = 0;
  for (; column + 4 * kLanes <= width; column += 4 * kLanes)
    weigh_columns<4>(shares, v + column, step, count, factor, y + column);
  for (; column + kLanes <= width; column += kLanes) weigh_columns<1>(shares, v + column, step, count, factor, y + column);
  for (; column < width; ++column) {
    float sum = 0;
    for (int64_t key = 0; key < count; ++key) sum += shares[key] * value_of(v[key * step + column]);
    y[column] = factor * sum;
  }
}

// Writes the scores of the first keys for a query.
inline void find_scores(const AttentionSize& size, const Head& head, const float* q, int64_t keys, float* scores) {
  if (head.k != nullptr) {
    for (int64_t key = 0; key < keys; ++key)
      scores[key] = size.scale * product_of(q, head.k + key * head.k_step, size.depth);
  } else {
    for (int64_t key = 0; key < keys; ++key)
      scores[key] = size.scale * head.k_cache.steps[key] * product_of(q, head.k_cache.bytes + key * size.depth, size.depth);
  }
}

// Writes the mean of the first values by their shares, whose sum is `sum`; changes the shares.
inline void find_mean(const AttentionSize& size, const Head& head, float* shares, int64_t keys, float sum, float* y) {
  if (head.v != nullptr) return weigh(shares, head.v, head.v_step, keys, 1 / sum, y, size.width);
  for (int64_t key = 0; key < keys; ++key) shares[key] *= head.v_cache.steps[key];
  weigh(shares, head.v_cache.bytes, size.width, keys, 1 / sum, y, size.width);
}

// Computes attention in float.
inline void attend_few(const AttentionSize& size, const Head& head) {
  thread_local Scratch scratch;
  float* const scores = reinterpret_cast<float*>(scratch.bytes((size.keys + 4 * kLanes) * static_cast<int64_t>(sizeof(float))));
  for (int64_t row = 0; row < size.queries; ++row) {
    const int64_t keys = size.seen_by(row);
    find_scores(size, head, head.q + row * head.q_step, keys, scores);
    const float most = greatest_seen(size, head, row, keys, scores);
    float* const y = head.y + row * head.y_step;
    if (std::isfinite(most)) {
      const float sum = shares_in_place(scores, divided(keys, kLanes) * kLanes, most) + std::exp(head.sink - most);
      find_mean(size, head, scores, keys, sum, y);
    } else {
      std::fill_n(y, size.width, std::isnan(most) ? NAN : 0.0f);
    }
  }
}

}  // namespace requant::REQUANT_TARGET
