// Functions of two uint8 tensors, element by element.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "scaled.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

constexpr size_t kRow = 1024;  // elements of a row of repeated operands, about: they stay in the nearest cache

// Computes elements of y. `scaled_b(i)` returns ratio[1] * (b - zero[1]) for a vector that begins with element i, and
// `scaled_b.one(i)` for one element. The last vector of bytes begins earlier and computes some elements again.
template <bool Product, class Scaled>
void combine_some(const Pair& pair, const uint8_t* a, const Scaled& scaled_b, size_t count, uint8_t* y) {
  const float least = static_cast<float>(-pair.y_zero), most = static_cast<float>(255 - pair.y_zero);
  constexpr size_t kStep = kBytes;
  if (count < kStep) {
#pragma clang loop vectorize(disable) unroll(disable)
    for (size_t i = 0; i < count; ++i) {
      const float x = static_cast<float>(a[i] - pair.zero[0]), other = scaled_b.one(i);
      const float value = Product ? x * other : x * pair.ratio[0] + other;
      y[i] = static_cast<uint8_t>(static_cast<int>(std::nearbyintf(std::clamp(value, least, most))) + pair.y_zero);
    }
    return;
  }
  const Floats ratio = fill_floats(pair.ratio[0]);
  for (size_t i = 0; i < count; i += kStep) {
    const size_t at = std::min(i, count - kStep);
    Floats value[4];
    for (size_t k = 0; k < 4; ++k) {
      const Floats x = floats(widen(a + at + k * kLanes, pair.zero[0])), other = scaled_b(at + k * kLanes);
      value[k] = Product ? times(x, other) : plus(times(x, ratio), other);
    }
    store_bytes(y + at, ordered(rounded_bytes(value, pair.y_zero)));
  }
}

// b has an element for each of a.
struct Whole {
  const Pair& pair;
  const uint8_t* b;
  Floats operator()(size_t i) const { return scaled(b + i, pair.zero[1], pair.ratio[1]); }
  float one(size_t i) const { return static_cast<float>(b[i] - pair.zero[1]) * pair.ratio[1]; }
};

// b was scaled before, as often as it is used.
struct Row {
  const float* values;
  Floats operator()(size_t i) const { return load_floats(values + i); }
  float one(size_t i) const { return values[i]; }
};

template <bool Product>
void combine_all(const Pair& pair, const uint8_t* a, const uint8_t* b, size_t count, size_t period, uint8_t* y) {
  if (count == period) return combine_some<Product>(pair, a, Whole{pair, b}, count, y);
  const size_t length = std::max<size_t>(1, kRow / period) * period;
  thread_local std::vector<float> row;  // grows to the longest one
  if (row.size() < length) row.resize(length);
  const Whole whole{pair, b};
  for (size_t i = 0; i < std::min(length, count); ++i) row[i] = i < period ? whole.one(i) : row[i - period];
  for (size_t first = 0; first < count; first += length)
    combine_some<Product>(pair, a + first, Row{row.data()}, std::min(length, count - first), y + first);
}

inline void combine(const Pair& pair, const uint8_t* a, const uint8_t* b, size_t count, size_t period, uint8_t* y) {
  pair.product ? combine_all<true>(pair, a, b, count, period, y) : combine_all<false>(pair, a, b, count, period, y);
}

}  // namespace requant::REQUANT_TARGET
