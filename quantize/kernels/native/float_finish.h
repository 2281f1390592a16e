// What becomes of the sums of a product of rows in float: scale, bias and function.
#pragma once

#include <algorithm>
#include <cstring>

#include "aligned.h"
#include "panel.h"
#include "scaled.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

// For a = -|x|, GELU(x) = max(x, 0) + a P(a), where -a P(a) is |x| times the share of a normal distribution above |x|; or what
// GELU by tanh takes for it. P has the least greatest error from `least` to 0, and a below `least` counts as `least`.
constexpr int kGeluTerms = 7;
struct Gelu {
  float least, terms[kGeluTerms];
};
constexpr Gelu kGelu{-3.94f,
                     {4.997955859e-01f, 3.874331415e-01f, -4.845973849e-02f, -1.443708986e-01f, -5.931063369e-02f,
                      -1.026282553e-02f, -6.689906004e-04f}};
constexpr Gelu kGeluByTanh{-3.86f,
                           {4.992604852e-01f, 3.855929971e-01f, -5.028631166e-02f, -1.454097331e-01f, -5.974579975e-02f,
                            -1.037073415e-02f, -6.795859663e-04f}};

// Returns GELU(x) to 2e-4: a hundredth of a step of 8 bits, for results from -0.17 to 5. NaN stays NaN.
REQUANT_INLINE Floats gelu(Floats x, const Gelu& by) {
  const Floats below = smaller(x, times(x, fill_floats(-1))), a = larger(below, fill_floats(by.least));
  Floats sum = fill_floats(by.terms[kGeluTerms - 1]);
#pragma unroll
  for (int i = kGeluTerms - 2; i >= 0; --i) sum = times_plus(sum, a, fill_floats(by.terms[i]));
  const Floats above = times_plus(below, fill_floats(-0.5f), times(x, fill_floats(0.5f)));  // max(x, 0), or NaN
  return times_plus(a, sum, above);
}

template <Function Applied>
inline Floats applied(Floats x) {
  if constexpr (Applied == Function::kRelu) return larger(x, fill_floats(0));
  if constexpr (Applied == Function::kGelu) return gelu(x, kGelu);
  if constexpr (Applied == Function::kGeluByTanh) return gelu(x, kGeluByTanh);
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
  uint8_t* first;
  int64_t bytes;
  const float* residual;
};

// Writes results in float: f(step * scale * sum - step * zero * scale * (sum of weights) + bias) + residual.
class FloatFinish {
 public:
  FloatFinish(const Channels& channels, Function function, const Rounding* rows, const Results& results)
      : channels_(channels), function_(function), rows_(rows), results_(results) {}

  const Results& results() const { return results_; }

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
        switch (function_) {
          case Function::kNone: write_column<Function::kNone>(column, rounding, to); break;
          case Function::kRelu: write_column<Function::kRelu>(column, rounding, to); break;
          case Function::kGelu: write_column<Function::kGelu>(column, rounding, to); break;
          case Function::kGeluByTanh: write_column<Function::kGeluByTanh>(column, rounding, to); break;
        }
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
      store_few(reinterpret_cast<float*>(to), made, count);
    }
  }

  // Returns what is added to `count` results from `to` on.
  Floats residual(const uint8_t* to, int64_t count) const {
    const float* from = results_.residual + (to - results_.first) / static_cast<int64_t>(sizeof(float));
    return load_few(from, count);
  }

  const Channels& channels_;
  Function function_;
  const Rounding* rows_;
  Results results_;
};

}  // namespace requant::REQUANT_TARGET
