// Attention of few queries in float: each key and each value is read once for a query.
#pragma once

#include <cmath>

#include "aligned.h"
#include "scaled.h"
#include "softmax.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

// Returns the sum of the products of two rows.
inline float product_of(const float* x, const float* y, int64_t count) {
  Floats sum = fill_floats(0);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sum = times_plus(load_floats(x + i), load_floats(y + i), sum);
  if (i < count) sum = times_plus(load_few(x + i, count - i), load_few(y + i, count - i), sum);
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

// Writes y[c] = factor * the sum of shares[k] * v[k][c] for `count` rows of v, which are `step` floats apart.
template <int Vectors>
REQUANT_INLINE void weigh_columns(const float* shares, const float* v, int64_t step, int64_t count, float factor, float* y) {
  Floats sum[Vectors];
  for (Floats& each : sum) each = fill_floats(0);
  for (int64_t key = 0; key < count; ++key, v += step) {
    const Floats share = fill_floats(shares[key]);
#pragma unroll
    for (int i = 0; i < Vectors; ++i) sum[i] = times_plus(share, load_floats(v + i * kLanes), sum[i]);
  }
  for (int i = 0; i < Vectors; ++i) store_floats(y + i * kLanes, times(sum[i], fill_floats(factor)));
}

// The same for all columns.
inline void weigh(const float* shares, const float* v, int64_t step, int64_t count, float factor, float* y, int64_t width) {
  int64_t column = 0;
  for (; column + 4 * kLanes <= width; column += 4 * kLanes)
    weigh_columns<4>(shares, v + column, step, count, factor, y + column);
  for (; column + kLanes <= width; column += kLanes) weigh_columns<1>(shares, v + column, step, count, factor, y + column);
  for (; column < width; ++column) {
    float sum = 0;
    for (int64_t key = 0; key < count; ++key) sum += shares[key] * v[key * step + column];
    y[column] = factor * sum;
  }
}

// Computes attention in float.
inline void attend_few(const AttentionSize& size, const Head& head) {
  thread_local Scratch scratch;
  float* const scores = reinterpret_cast<float*>(scratch.bytes((size.keys + 4 * kLanes) * static_cast<int64_t>(sizeof(float))));
  for (int64_t row = 0; row < size.queries; ++row) {
    const int64_t keys = size.seen_by(row);
    for (int64_t key = 0; key < keys; ++key)
      scores[key] = size.scale * product_of(head.q + row * head.q_step, head.k + key * head.k_step, size.depth);
    const float most = greatest_seen(size, head, row, keys, scores);
    float* const y = head.y + row * head.y_step;
    if (std::isfinite(most)) {
      const float sum = shares_in_place(scores, divided(keys, kLanes) * kLanes, most) + std::exp(head.sink - most);
      weigh(scores, head.v, head.v_step, keys, 1 / sum, y, size.width);
    } else {
      std::fill_n(y, size.width, std::isnan(most) ? NAN : 0.0f);
    }
  }
}

}  // namespace requant::REQUANT_TARGET
