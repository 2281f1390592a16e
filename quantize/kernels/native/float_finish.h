// What becomes of the sums of a product of rows in float: scale, bias and function.
#pragma once

#include <algorithm>
#include <cstring>

#include "aligned.h"
#include "panel.h"
#include "scaled.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

// Returns x times the share of a normal distribution below x, to 3e-6. The share is 1/2 + x P(u) with u = 2 (x / 5)^2 - 1; P is
// the polynomial of degree 11 with the least greatest error where |x| <= 5 and with the share 1 at 5. For greater |x| the
// share is that of 5.
inline Floats gelu(Floats x) {
  constexpr float kMost = 5, kTerms[] = {1.413637549e-01f, -7.029844075e-02f, 5.152461678e-02f, -4.038664699e-02f,
                                         3.136502951e-02f, -2.366185188e-02f, 1.688032411e-02f, -1.006356347e-02f,
                                         5.155723542e-03f, -4.007847048e-03f, 3.173768055e-03f, -1.044869889e-03f};
  const Floats inside = bounded(x, -kMost, kMost);
  const Floats u = times_plus(times(inside, inside), fill_floats(2 / (kMost * kMost)), fill_floats(-1));
  Floats sum = fill_floats(kTerms[11]);
#pragma unroll
  for (int i = 10; i >= 0; --i) sum = times_plus(sum, u, fill_floats(kTerms[i]));
  return times(x, times_plus(inside, sum, fill_floats(0.5f)));
}

template <Function Applied>
inline Floats applied(Floats x) {
  if constexpr (Applied == Function::kRelu) return larger(x, fill_floats(0));
  if constexpr (Applied == Function::kGelu) return gelu(x);
  return x;
}

// What belongs to the output channels of a product.
struct Channels {
  Aligned<float> scale, shift, bias;  // shift: the scale times the sum of the weights
};

// How rows were rounded: x is about step * (integer - zero), and `shift` is step * zero.
struct Rounding {
  float step, shift;
};

// The results of a product: the first one, the bytes from one row to the next, and what is added to them, which lies as they do
// and may be null.
struct Results {
  const uint8_t* first;
  int64_t bytes;
  const float* residual;
};

// Writes results in float: f(step * scale * sum - step * zero * scale * (sum of weights) + bias) + residual.
class FloatFinish {
 public:
  FloatFinish(const Channels& channels, Function function, const Rounding* rows, const Results& results)
      : channels_(channels), function_(function), rows_(rows), results_(results) {}

  // Writes the results of neighbouring rows, from sums in memory.
  template <int Vectors>
  __attribute__((noinline)) void write(const int32_t* sums, int rows, const Panel& panel, const Place& place) const {
    with_writer<Vectors>(panel, [&](const auto& write) { write(sums, rows, place); });
  }

  // Calls `work` with a writer of the results of a panel, as `Finish` does.
  template <int Vectors, class Work>
  void with_writer(const Panel& panel, const Work& work) const {
    work([this, panel](const int32_t* sums, int rows, const Place& place) {
      for (int vector = 0; vector < Vectors; ++vector) {
        const int64_t offset = panel.offset(vector, Vectors);
        const Column column{sums + vector * kLanes, Vectors * kLanes, rows, panel.channel + offset, panel.bytes};
        uint8_t* const to = place.to + offset * static_cast<int64_t>(sizeof(float));
        const Rounding* const rounding = rows_ + (place.to - results_.first) / results_.bytes;
        if (function_ == Function::kGelu)
          write_column<Function::kGelu>(column, rounding, to);
        else
          function_ == Function::kRelu ? write_column<Function::kRelu>(column, rounding, to)
                                       : write_column<Function::kNone>(column, rounding, to);
      }
    });
  }

 private:
  // A vector of sums in some rows, which are `step` apart, and the channels that it stands for.
  struct Column {
    const int32_t* sums;
    int step, rows;
    int64_t channel, count;
  };

  template <Function Applied>
  __attribute__((noinline)) void write_column(const Column& column, const Rounding* rounding, uint8_t* to) const {
    const auto [sums, step, rows, channel, count] = column;
    const Floats scale = load_floats(&channels_.scale[channel]), shift = load_floats(&channels_.shift[channel]);
    const Floats bias = load_floats(&channels_.bias[channel]);
    const int32_t* from = sums;
    for (int row = 0; row < rows; ++row, from += step, to += results_.bytes) {
      const Floats start = times_plus(fill_floats(-rounding[row].shift), shift, bias);
      const Floats scaled = times(floats(load_ints(from)), scale);
      Floats made = applied<Applied>(times_plus(fill_floats(rounding[row].step), scaled, start));
      if (results_.residual != nullptr) made = plus(made, residual(to, count));
      count == kLanes ? store_floats(reinterpret_cast<float*>(to), made) : store_few(to, made, count);
    }
  }

  // Returns what is added to `count` results from `to` on.
  Floats residual(const uint8_t* to, int64_t count) const {
    const float* from = results_.residual + (to - results_.first) / static_cast<int64_t>(sizeof(float));
    if (count == kLanes) return load_floats(from);
    float part[kLanes] = {};
    std::memcpy(part, from, count * sizeof(float));
    return load_floats(part);
  }

  static void store_few(uint8_t* to, Floats value, int64_t count) {
    float made[kLanes];
    store_floats(made, value);
    std::memcpy(to, made, count * sizeof(float));
  }

  const Channels& channels_;
  Function function_;
  const Rounding* rows_;
  Results results_;
};

}  // namespace requant::REQUANT_TARGET
