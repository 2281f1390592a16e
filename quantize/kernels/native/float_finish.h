// What becomes of the sums of a product of rows in float: scale, bias and function.
#pragma once

#include <algorithm>
#include <cstring>

#include "aligned.h"
#include "exponential.h"
#include "panel.h"
#include "scaled.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

constexpr float kMostGelu = 5;
constexpr int kGeluTerms = 12;
// 1/2 + x P(u) with u = 2 (x / 5)^2 - 1 is the share of a normal distribution below x; or what GELU by tanh takes for it. P has
// the least greatest error where |x| <= 5, with the share 1 at 5.
constexpr float kGelu[kGeluTerms] = {1.413637549e-01f, -7.029844075e-02f, 5.152461678e-02f, -4.038664699e-02f,
                                     3.136502951e-02f, -2.366185188e-02f, 1.688032411e-02f, -1.006356347e-02f,
                                     5.155723542e-03f, -4.007847048e-03f, 3.173768055e-03f, -1.044869889e-03f};
constexpr float kGeluByTanh[kGeluTerms] = {1.413784772e-01f, -7.036800683e-02f, 5.166145787e-02f, -4.048439115e-02f,
                                           3.126670420e-02f, -2.342097834e-02f, 1.654087007e-02f, -9.331471287e-03f,
                                           4.460314289e-03f, -4.404340871e-03f, 4.154995549e-03f, -1.453634584e-03f};

// Returns x times the share below x, to 3e-6; for |x| above 5 the share is that of 5.
REQUANT_INLINE Floats gelu(Floats x, const float (&terms)[kGeluTerms]) {
  const Floats inside = bounded(x, -kMostGelu, kMostGelu);
  const Floats u = times_plus(times(inside, inside), fill_floats(2 / (kMostGelu * kMostGelu)), fill_floats(-1));
  Floats sum = fill_floats(terms[kGeluTerms - 1]);
#pragma unroll
  for (int i = kGeluTerms - 2; i >= 0; --i) sum = times_plus(sum, u, fill_floats(terms[i]));
  return times(x, times_plus(inside, sum, fill_floats(0.5f)));
}

// Returns x / (1 + e^-x), which is x * sigmoid(x). NaN stays NaN.
REQUANT_INLINE Floats silu(Floats x) {
  const Floats one = fill_floats(1), most = fill_floats(kMostExponent);
  return quotient(x, plus(one, exponential(smaller(most, times(x, fill_floats(-1))))));
}

template <Function Applied>
inline Floats applied(Floats x) {
  if constexpr (Applied == Function::kRelu) return larger(x, fill_floats(0));
  if constexpr (Applied == Function::kGelu) return gelu(x, kGelu);
  if constexpr (Applied == Function::kGeluByTanh) return gelu(x, kGeluByTanh);
  if constexpr (Applied == Function::kSilu) return silu(x);
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

// The results of a product: the first one, the bytes from one row to the next, and the residual, which lies as they do and may be
// null. They are multiplied by it if it is a gate.
struct Results {
  uint8_t* first;
  int64_t bytes;
  const float* residual;
  bool gated;
};

// Returns a result with its residual.
REQUANT_INLINE Floats with_residual(Floats made, Floats residual, bool gated) {
  return gated ? times(made, residual) : plus(made, residual);
}

// Writes results in float: f(step * scale * sum - step * zero * scale * (sum of weights) + bias) with the residual.
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
          case Function::kSilu: write_column<Function::kSilu>(column, rounding, to); break;
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
      if (results_.residual != nullptr) made = with_residual(made, residual(to, count), results_.gated);
      store_few(reinterpret_cast<float*>(to), made, count);
    }
  }

  // Returns the residual of `count` results from `to` on.
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
