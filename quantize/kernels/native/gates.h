// The functions of a step of a GRU or LSTM, for one item.
#pragma once

#include <algorithm>

#include "softmax.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

// Returns tanh(x) to 1e-4; NaN for values that are not finite.
__attribute__((noinline)) inline Floats tanh_of(Floats x) {
  const Floats e = power<1>(bounded(times(x, fill_floats(-2 * 1.44269504f)), -30, 30)), one = fill_floats(1);
  return times_plus(x, fill_floats(0), quotient(times_plus(e, fill_floats(-1), one), plus(e, one)));
}

// Returns sigmoid(x + h) for a vector of values.
inline Floats gate(const float* x, const float* h, int64_t some) {
  const Floats half = fill_floats(0.5f), sum = plus(load_few(x, some), load_few(h, some));
  return times_plus(tanh_of(times(sum, half)), half, half);
}

inline void reset_state(const GruStep& step, float* kept) {
  for (int64_t i = 0; i < step.size; i += kLanes) {
    const int64_t some = std::min<int64_t>(kLanes, step.size - i), at = step.size + i;
    store_few(kept + i, times(gate(step.x + at, step.h + at, some), load_few(step.before + i, some)), some);
  }
}

inline void next_state(const GruStep& step, float* after) {
  for (int64_t i = 0; i < step.size; i += kLanes) {
    const int64_t some = std::min<int64_t>(kLanes, step.size - i), at = step.size + i;
    Floats added = load_few(step.last + i, some);
    if (!step.reset_first) added = times(gate(step.x + at, step.h + at, some), added);
    const Floats n = tanh_of(plus(load_few(step.x + step.size + at, some), added));
    const Floats away = times_plus(n, fill_floats(-1), load_few(step.before + i, some));
    store_few(after + i, times_plus(gate(step.x + i, step.h + i, some), away, n), some);
  }
}

inline void next_cell(const LstmStep& step, float* after) {
  for (int64_t i = 0; i < step.size; i += kLanes) {
    const int64_t some = std::min<int64_t>(kLanes, step.size - i), last = 3 * step.size + i;
    const auto opened = [&](int64_t index) {
      const int64_t at = index * step.size + i;
      return gate(step.x + at, step.h + at, some);
    };
    const Floats added = times(opened(0), tanh_of(plus(load_few(step.x + last, some), load_few(step.h + last, some))));
    const Floats cell = times_plus(opened(2), load_few(step.cell + i, some), added);
    store_few(step.cell + i, cell, some);
    store_few(after + i, times(opened(1), tanh_of(cell)), some);
  }
}

}  // namespace requant::REQUANT_TARGET
