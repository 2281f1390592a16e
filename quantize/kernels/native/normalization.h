// Normalization of rows of floats.
#pragma once

#include <algorithm>
#include <cmath>

#include "scaled.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

// Returns the sum of what a function makes of the vectors of a row; it gets the place and the number of values, and returns 0
// for those that are not there.
template <class Work>
REQUANT_INLINE float summed(int64_t count, const Work& work) {
  Floats sum[2] = {fill_floats(0), fill_floats(0)};
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes)
    for (int k = 0; k < 2; ++k) sum[k] = plus(sum[k], work(i + k * kLanes, int64_t{kLanes}));
  for (; i < count; i += kLanes) sum[0] = plus(sum[0], work(i, std::min<int64_t>(kLanes, count - i)));
  return sum_of(plus(sum[0], sum[1]));
}

inline void normalize_row(const Normalization& norm, const float* x, float* y) {
  const int64_t count = static_cast<int64_t>(norm.scale.size());
  const float of_each = 1 / static_cast<float>(count);
  float mean = 0;
  if (norm.centred) mean = of_each * summed(count, [&](int64_t i, int64_t some) { return load_few(x + i, some); });
  const Floats shift = fill_floats(-mean);
  const auto squares = [&](int64_t i, int64_t some) {
    const Floats centred = first_of(plus(load_few(x + i, some), shift), some);
    return times(centred, centred);
  };
  const float variance = of_each * summed(count, squares), factor = 1 / std::sqrt(variance + norm.epsilon);
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t some = std::min<int64_t>(kLanes, count - i);
    const Floats scaled = times(plus(load_few(x + i, some), shift), fill_floats(factor));
    store_few(y + i, times_plus(scaled, load_few(&norm.scale[i], some), load_few(&norm.bias[i], some)), some);
  }
}

inline void normalize(const Normalization& norm, const float* x, float* y, int64_t rows) {
  const int64_t count = static_cast<int64_t>(norm.scale.size());
  for (int64_t row = 0; row < rows; ++row) normalize_row(norm, x + row * count, y + row * count);
}

}  // namespace requant::REQUANT_TARGET
