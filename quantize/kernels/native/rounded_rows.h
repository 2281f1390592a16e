// Rows of floats that are rounded to 8 bits, each with a range of its own.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "float_finish.h"
#include "scaled.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

// The smallest range that contains 0 and a row, and whether all values of the row are finite.
struct Range {
  float least, most;
  bool finite;
};

inline Range range_of(const float* x, int64_t count) {
  constexpr int64_t kStep = 4 * kLanes;
  const Floats none = fill_floats(0);
  Floats least[4] = {none, none, none, none}, most[4] = {none, none, none, none}, odd[4] = {none, none, none, none};
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep)
    for (int k = 0; k < 4; ++k) {  // four at a time, because each waits for the one before
      const Floats each = load_floats(x + i + k * kLanes);
      least[k] = smaller(least[k], each);
      most[k] = larger(most[k], each);
      odd[k] = times_plus(each, none, odd[k]);  // NaN if a value is infinite or NaN
    }
  for (; i + kLanes <= count; i += kLanes) {
    const Floats each = load_floats(x + i);
    least[0] = smaller(least[0], each);
    most[0] = larger(most[0], each);
    odd[0] = times_plus(each, none, odd[0]);
  }
  float bottom = least_of(smaller(smaller(least[0], least[1]), smaller(least[2], least[3])));
  float top = greatest_of(larger(larger(most[0], most[1]), larger(most[2], most[3])));
  float any = sum_of(plus(plus(odd[0], odd[1]), plus(odd[2], odd[3])));
  for (; i < count; ++i) {
    bottom = std::min(bottom, x[i]);
    top = std::max(top, x[i]);
    any += 0 * x[i];
  }
  return {bottom, top, any == 0};
}

// Writes to[i] = clip(rint(x[i] * inverse) + zero, 0, 255).
inline void round_values(const float* x, int64_t count, float inverse, int zero, uint8_t* to) {
  const auto round_some = [&](const float* from) {
    Floats value[4];
    for (int k = 0; k < 4; ++k) value[k] = times(load_floats(from + k * kLanes), fill_floats(inverse));
    return ordered(rounded_bytes(value, zero));
  };
  int64_t i = 0;
  for (; i + kBytes <= count; i += kBytes) store_bytes(to + i, round_some(x + i));
  if (i == count) return;
  float part[kBytes];
  REQUANT_ROLLED
  for (int64_t k = 0; k < kBytes; k += kLanes)
    store_floats(part + k, load_few(x + i + k, std::clamp<int64_t>(count - i - k, 0, kLanes)));
  store_some(to + i, round_some(part), count - i);
}

// Rounds a row of `count` floats as `Matrix` says. A row that is all 0, or whose step is no normal number, has the step 0. A row
// with an infinity or NaN has the step NaN.
__attribute__((noinline)) inline Rounding round_row(const float* x, int64_t count, uint8_t* to) {
  const Range range = range_of(x, count);
  const float step = range.finite ? range.most / 255 - range.least / 255 : NAN;
  if (!(step >= FLT_MIN)) {
    std::memset(to, 0, count);
    return range.finite ? Rounding{0, 0} : Rounding{NAN, NAN};
  }
  const float inverse = 1 / step;
  const int zero = static_cast<int>(std::clamp(std::nearbyint(-range.least * inverse), 0.0f, 255.0f));
  round_values(x, count, inverse, zero, to);
  return {step, step * static_cast<float>(zero)};
}

// How values are rounded evenly: to integers from -127 to 127, with the same step on both sides of 0.
struct Even {
  float step, inverse;  // the inverse is 0 where nothing is rounded
};

// Returns how to round the values of a range. A step that is no normal number becomes 0, and NaN for values that are not finite.
inline Even even_of(const Range& range) {
  const float step = std::max(-range.least, range.most) / 127;
  if (!range.finite) return {NAN, 0};
  return step >= FLT_MIN ? Even{step, 1 / step} : Even{0, 0};
}

// Rounds a row evenly, writes the integers plus 128, and returns the step.
__attribute__((noinline)) inline float round_row_evenly(const float* x, int64_t count, uint8_t* to) {
  const Even even = even_of(range_of(x, count));
  if (even.inverse > 0) {
    round_values(x, count, even.inverse, 128, to);
  } else {
    std::memset(to, 128, count);
  }
  return even.step;
}

}  // namespace requant::REQUANT_TARGET
