// Attention of few queries in float, from floats or from the bytes of a cache. Some queries share each key and value that is
// read: turning bytes into floats takes longer than a product.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "aligned.h"
#include "scaled.h"
#include "softmax.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

constexpr int kQueries = kLanes > 4 ? 4 : 1;  // so many queries share a key, if its vectors are whole
constexpr int kVectors = kLanes > 4 ? 2 : 1;  // of a value that are read at once

inline Floats load_values(const float* from) { return load_floats(from); }
inline Floats load_values(const uint8_t* from) { return floats(widen(from, kCacheZero)); }

// Returns a vector whose first `count` values are there, and whose others are 0.
inline Floats load_part(const float* from, int64_t count) { return load_few(from, count); }
inline Floats load_part(const uint8_t* from, int64_t count) {
  uint8_t part[kLanes];
  std::memset(part, kCacheZero, sizeof part);
  std::memcpy(part, from, count);
  return load_values(part);
}

// Keys or values of a head, `step` apart; each is multiplied by a number if there are `scales`.
template <class Value>
struct Stored {
  const Value* first;
  int64_t step;
  const float* scales;
};

// Neighbouring queries of a head, `step` floats apart.
struct Neighbours {
  const float* first;
  int64_t step;
};

// Writes the scores of the first keys for some queries, `pitch` apart.
template <int Queries, class Value>
void find_scores(const Neighbours& q, const Stored<Value>& k, int64_t depth, float scale, int64_t keys, float* scores,
                 int64_t pitch) {
  REQUANT_ROLLED
  for (int64_t key = 0; key < keys; ++key) {
    const Value* const row = k.first + key * k.step;
    Floats sum[Queries];
    for (Floats& each : sum) each = fill_floats(0);
    int64_t i = 0;
    REQUANT_ROLLED
    for (; i + kLanes <= depth; i += kLanes) {
      const Floats values = load_values(row + i);
#pragma unroll
      for (int j = 0; j < Queries; ++j) sum[j] = times_plus(load_floats(q.first + j * q.step + i), values, sum[j]);
    }
    if (Queries == 1 && i < depth)
      sum[0] = times_plus(load_few(q.first + i, depth - i), load_part(row + i, depth - i), sum[0]);
    const float factor = k.scales == nullptr ? scale : scale * k.scales[key];
    for (int j = 0; j < Queries; ++j) scores[j * pitch + key] = factor * sum_of(sum[j]);
  }
}

// Replaces scores by exp(score - most), exact to 1e-4, and returns their sum; shares below 2^-30 become 0. The arguments are
// those of `round_softmax`, and `most` is finite.
inline float shares_in_place(float* scores, int64_t count, float most) {
  const Floats tiny = fill_floats(-0x1.001p-30f), none = fill_floats(0);
  Floats sum = none;
  REQUANT_ROLLED
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats share = larger(plus(share_of<1>(scores + i, most), tiny), none);
    store_floats(scores + i, share);
    sum = plus(sum, share);
  }
  return sum_of(sum);
}

// Replaces the scores of a query by shares times `scales`, if there are any; returns what makes their sum with values the result.
__attribute__((noinline)) inline float weights_in_place(const AttentionSize& size, const Head& head, int64_t row, int64_t keys,
                                                        const float* scales, float* scores) {
  REQUANT_ROLLED
  for (int64_t key = keys; key % kLanes != 0; ++key) scores[key] = -INFINITY;
  const float most = greatest_seen(size, head, row, keys, scores);
  if (!std::isfinite(most)) {
    std::fill_n(scores, keys, 0.0f);
    return std::isnan(most) ? NAN : 0;
  }
  const float sum = shares_in_place(scores, divided(keys, kLanes) * kLanes, most) + std::exp(head.sink - most);
  REQUANT_ROLLED
  for (int64_t key = 0; scales != nullptr && key < keys; ++key) scores[key] *= scales[key];
  return 1 / sum;
}

// Results of some queries, `step` floats apart, and what each is multiplied by.
template <int Queries>
struct Weighed {
  float* first;
  int64_t step;
  float factors[Queries];
};

// Writes a column of vectors of the results: factors[j] * the sum of shares[j][k] * v[k] for `count` rows of v, which are `step`
// apart. The shares of the queries are `pitch` apart. `load` reads a vector of v, and `store` writes one.
template <int Vectors, int Queries, class Value, class Load, class Store>
REQUANT_INLINE void weigh_columns(const float* shares, int64_t pitch, const Value* v, int64_t step, int64_t count,
                                  const Weighed<Queries>& y, int64_t column, const Load& load, const Store& store) {
  Floats sum[Queries][Vectors];
  for (auto& row : sum)
    for (Floats& each : row) each = fill_floats(0);
  REQUANT_ROLLED
  for (int64_t key = 0; key < count; ++key)
#pragma unroll
    for (int i = 0; i < Vectors; ++i) {
      const Floats values = load(v + key * step + column + i * kLanes);
#pragma unroll
      for (int j = 0; j < Queries; ++j) sum[j][i] = times_plus(fill_floats(shares[j * pitch + key]), values, sum[j][i]);
    }
#pragma unroll
  for (int j = 0; j < Queries; ++j)
#pragma unroll
    for (int i = 0; i < Vectors; ++i)
      store(y.first + j * y.step + column + i * kLanes, times(sum[j][i], fill_floats(y.factors[j])));
}

// Computes neighbouring queries from one on.
template <int Queries, class Value>
__attribute__((noinline)) void attend_neighbours(const AttentionSize& size, const Head& head, int64_t first,
                                                 const Stored<Value>& k, const Stored<Value>& v) {
  thread_local Scratch scratch;
  const int64_t keys = size.seen_by(first + Queries - 1), pitch = divided(keys, 4 * kLanes) * 4 * kLanes;
  float* const scores = scratch.floats(Queries * pitch);
  find_scores<Queries>({head.q + first * head.q_step, head.q_step}, k, size.depth, size.scale, keys, scores, pitch);
  Weighed<Queries> y{head.y + first * head.y_step, head.y_step, {}};
  for (int j = 0; j < Queries; ++j)
    y.factors[j] = weights_in_place(size, head, first + j, keys, v.scales, scores + j * pitch);
  int64_t column = 0;
  REQUANT_ROLLED
  for (; column + kVectors * kLanes <= size.width; column += kVectors * kLanes)
    weigh_columns<kVectors>(scores, pitch, v.first, v.step, keys, y, column, [](const Value* from) { return load_values(from); },
                            store_floats);
  REQUANT_ROLLED
  for (; Queries == 1 && column < size.width; column += kLanes) {
    const int64_t there = std::min<int64_t>(kLanes, size.width - column);
    weigh_columns<1>(scores, pitch, v.first, v.step, keys, y, column, [=](const Value* from) { return load_part(from, there); },
                     [=](float* to, Floats value) { store_few(to, value, there); });
  }
}

// Computes attention in float.
template <class Value>
void attend_stored(const AttentionSize& size, const Head& head, const Stored<Value>& k, const Stored<Value>& v) {
  int64_t row = 0;
  if (size.depth % kLanes == 0 && size.width % (kVectors * kLanes) == 0)  // all rows are whole vectors
    for (; row + kQueries <= size.queries; row += kQueries) attend_neighbours<kQueries>(size, head, row, k, v);
  for (; row < size.queries; ++row) attend_neighbours<1>(size, head, row, k, v);
}

inline void attend_few(const AttentionSize& size, const Head& head) {
  const Cached &k = head.k_cache, &v = head.v_cache;
  if (head.k != nullptr)
    return attend_stored<float>(size, head, {head.k, head.k_step, nullptr}, {head.v, head.v_step, nullptr});
  attend_stored<uint8_t>(size, head, {k.bytes, size.depth, k.steps}, {v.bytes, size.width, v.steps});
}

}  // namespace requant::REQUANT_TARGET
