// Products of rows in float and a constant matrix, in integers. Each row is rounded to 8 bits with a range of its own.
#pragma once

#include <algorithm>
#include <cstring>

#include "float_finish.h"
#include "packed.h"
#include "rounded_rows.h"
#include "row_product.h"
#include "target.h"
#include "threads.h"

namespace requant::REQUANT_TARGET {

template <class Way>
class Rows final : public MatrixKernel {
 public:
  explicit Rows(const Matrix& made)
      : inputs_(made.inputs),
        outputs_(made.outputs),
        function_(made.function),
        gated_(made.gated),
        packed_(convolution_of(made)) {
    for (Aligned<float>* each : {&channels_.scale, &channels_.shift, &channels_.bias}) each->assign(outputs_ + kLanes, 0);
    for (int64_t o = 0; o < outputs_; ++o) {
      int64_t sum = 0;
      for (int64_t i = 0; i < inputs_; ++i) sum += made.weights[o * inputs_ + i];
      channels_.scale[o] = made.scale[o];
      channels_.shift[o] = made.scale[o] * static_cast<float>(sum);
      channels_.bias[o] = made.bias[o];
    }
  }

  void run(const float* x, const float* residual, float* y, int64_t rows, const Parallel& parallel) const override {
    const int64_t pitch = 4 * packed_.quads(), most = std::clamp<int64_t>(kHeld / pitch, kAtLeast, rows + kAtLeast);
    const int64_t blocks = divided(rows, most), each = divided(rows, blocks);
    for (int64_t first = 0; first < rows; first += each)
      multiply({.x = x + first * inputs_,
                .residual = residual ? residual + first * outputs_ : nullptr,
                .y = y + first * outputs_,
                .rows = std::min(each, rows - first)},
               parallel);
  }

 private:
  static constexpr int64_t kHeld = 1 << 20;     // bytes of rows that are rounded at once, about: they stay in the second cache
  static constexpr int64_t kAtLeast = 32;       // rows
  // Products of one task, about. Tiles have to be configured for each.
  static constexpr int64_t kWork = std::max<int64_t>(1 << 22, Way::kWork / 2);
  static constexpr int64_t kFar = 1 << 18;      // bytes of the weights of one task, at most about, in sessions with threads
  static constexpr int64_t kRounded = 1 << 14;  // values that one task rounds, about

  // Returns a product as a convolution of one pixel.
  static Convolution convolution_of(const Matrix& made) {
    Convolution conv;
    conv.inputs = made.inputs;
    conv.outputs = made.outputs;
    conv.weights = made.weights;
    conv.bias.assign(made.outputs, 0);
    conv.multiplier.assign(made.outputs, 0);
    return conv;
  }

  // Some rows, their residual (or null), and their results.
  struct Part {
    const float *x, *residual;
    float* y;
    int64_t rows;
  };

  void multiply(const Part& part, const Parallel& parallel) const {
    const int64_t rows = part.rows;
    thread_local Scratch bytes, roundings;
    const int64_t pitch = 4 * packed_.quads();
    uint8_t* const rounded = bytes.bytes(rows * pitch);
    Rounding* const how = roundings.values<Rounding>(rows);
    const int64_t together = std::max<int64_t>(1, kRounded / inputs_);
    parallel(static_cast<size_t>(divided(rows, together)), [&](size_t index) {
      const int64_t first = static_cast<int64_t>(index) * together;
      for (int64_t row = first; row < std::min(first + together, rows); ++row) {
        how[row] = round_row(part.x + row * inputs_, inputs_, rounded + row * pitch);
        std::memset(rounded + row * pitch + inputs_, 0, pitch - inputs_);  // its weights are 0
      }
    });
    uint8_t* const to = reinterpret_cast<uint8_t*>(part.y);
    const int64_t bytes_of_row = outputs_ * static_cast<int64_t>(sizeof(float));
    const FloatFinish finish(channels_, function_, how, {to, bytes_of_row, part.residual, gated_});
    const int64_t panels = static_cast<int64_t>(packed_.panels().size());
    // The weights of few rows are read from far, which takes longer than their products.
    const int64_t least = has_several_threads() ? inputs_ * outputs_ / kFar : 1;
    const int64_t tasks = std::clamp<int64_t>(std::max(rows * inputs_ * outputs_ / kWork, least), 1, panels);
    const int64_t some = divided(panels, tasks);
    parallel(static_cast<size_t>(divided(panels, some)), [&](size_t index) {
      const int64_t first = static_cast<int64_t>(index) * some;
      const Panels these{&packed_.panels()[first], std::min(some, panels - first), packed_.quads(), true};
      multiply_rows<Way>({rounded, pitch, rows}, these, finish);
    });
  }

  int64_t inputs_, outputs_;
  Function function_;
  bool gated_;
  Channels channels_;
  Packed<Way> packed_;
};

}  // namespace requant::REQUANT_TARGET
