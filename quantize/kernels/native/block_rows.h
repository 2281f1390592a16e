// Products of rows in float and a constant matrix in blocks, in vectors. Each block of a row is rounded to 8 bits with a range of
// its own. The codes of weights are the unsigned factors, and the integers of a row the signed ones.
#pragma once

#include <algorithm>

#include "blocks.h"
#include "float_finish.h"
#include "target.h"
#include "threads.h"

namespace requant::REQUANT_TARGET {

// `Vectors`: those of a panel.
template <int Vectors>
class BlockRows : public MatrixKernel {
 public:
  explicit BlockRows(const BlockMatrix& made)
      : inputs_(made.inputs), outputs_(made.outputs), function_(made.function), gated_(made.gated), weights_(made, Vectors) {
    bias_.assign(outputs_ + kLanes, 0);
    std::copy(made.bias.begin(), made.bias.end(), bias_.begin());
  }

  void run(const float* x, const float* residual, float* y, int64_t rows, const Parallel& parallel) const override {
    if (rows == 0) return;
    const int64_t each = divided(rows, divided(rows, kHeld));  // evenly: the last rows are many, too
    for (int64_t first = 0; first < rows; first += each)
      multiply({x + first * inputs_, residual ? residual + first * outputs_ : nullptr, y + first * outputs_,
                std::min(each, rows - first)},
               parallel);
  }

 protected:
  // Some rows, their residual (or null), and their results.
  struct Part {
    const float *x, *residual;
    float* y;
    int64_t rows;
  };

  static constexpr int kRows = panel_rows(Vectors);  // that are multiplied together
  static constexpr int64_t kHeld = 256;              // rows that are rounded at once, at most
  static constexpr int64_t kWork = 1 << 20;          // products of one task, about; a quarter in sessions with threads
  static constexpr int64_t kRounded = 1 << 14;       // values that one task rounds, about
  static constexpr int64_t kAhead = 4096;            // bytes from the weights of a row to those that are fetched

  virtual void multiply(const Part& part, const Parallel& parallel) const {
    thread_local Scratch integers, steps, starts;
    const int64_t blocks = weights_.blocks(), pitch = blocks * weights_.size();
    const BlockRow first{integers.values<int8_t>(part.rows * pitch), steps.floats(part.rows * blocks),
                         starts.values<int32_t>(part.rows * blocks)};
    const int64_t together = std::max<int64_t>(1, kRounded / inputs_);
    parallel(static_cast<size_t>(divided(part.rows, together)), [&](size_t index) {
      const int64_t begin = static_cast<int64_t>(index) * together;
      for (int64_t row = begin; row < std::min(begin + together, part.rows); ++row)
        round_in_blocks(part.x + row * inputs_, inputs_, weights_, at(first, row));
    });
    const int64_t panels = static_cast<int64_t>(weights_.panels().size());
    const int64_t work = has_several_threads() ? kWork / 4 : kWork;
    const int64_t tasks = std::clamp<int64_t>(part.rows * inputs_ * outputs_ / work, 1, panels);
    const int64_t some = divided(panels, tasks);
    parallel(static_cast<size_t>(divided(panels, some)), [&](size_t index) {
      const int64_t begin = static_cast<int64_t>(index) * some;
      for (int64_t panel = begin; panel < std::min(begin + some, panels); ++panel)
        multiply_panel(part, first, weights_.panels()[panel]);
    });
  }

  // Returns a row, from the first one.
  BlockRow at(const BlockRow& first, int64_t row) const {
    const int64_t blocks = weights_.blocks();
    return {first.integers + row * blocks * weights_.size(), first.steps + row * blocks, first.starts + row * blocks};
  }

  // Writes the results of a row.
  template <int Wide>
  __attribute__((noinline)) void write(const Floats (&total)[Wide], const Part& part, int64_t row, const Panel& panel) const {
    for (int vector = 0; vector < Wide; ++vector) {
      const int64_t channel = panel.channel + panel.offset(vector, Wide), place = row * outputs_ + channel;
      Floats made = applied(plus(total[vector], load_floats(&bias_[channel])));
      if (part.residual != nullptr) made = with_residual(made, load_few(part.residual + place, panel.bytes), gated_);
      store_few(part.y + place, made, panel.bytes);
    }
  }

 private:
  void multiply_panel(const Part& part, const BlockRow& first, const Panel& panel) const {
    if (panel.vectors < Vectors) return weights_.halves() ? all<1, true>(part, first, panel) : all<1, false>(part, first, panel);
    weights_.halves() ? all<Vectors, true>(part, first, panel) : all<Vectors, false>(part, first, panel);
  }

  // Multiplies all rows by a panel. The last rows that are multiplied together may begin earlier.
  template <int Wide, bool Halves>
  void all(const Part& part, const BlockRow& first, const Panel& panel) const {
    if (part.rows < kRows)
      for (int64_t row = 0; row < part.rows; ++row) product<1, Wide, Halves>(part, first, row, panel);
    else
      for (int64_t row = 0; row < part.rows; row += kRows)
        product<kRows, Wide, Halves>(part, first, std::min(row, part.rows - kRows), panel);
  }

  // Multiplies some neighbouring rows by a panel.
  template <int Rows, int Wide, bool Halves>
  void product(const Part& part, const BlockRow& first, int64_t row, const Panel& panel) const {
    const int64_t blocks = weights_.blocks(), size = weights_.size(), pitch = blocks * size;
    const BlockRow x = at(first, row);
    const uint8_t* w = panel.weights;
    Floats total[Rows][Wide];
    for (auto& each : total) std::fill_n(each, Wide, fill_floats(0));
    for (int64_t block = 0; block < blocks; ++block) {
      Ints sum[Rows][Wide];
#pragma unroll
      for (int i = 0; i < Rows; ++i)
#pragma unroll
        for (int vector = 0; vector < Wide; ++vector) sum[i][vector] = fill_ints(x.starts[i * blocks + block]);
      const float* const scale = reinterpret_cast<const float*>(w);
      w += weights_.scales(Wide);
      add_codes<Halves>(sum, x.integers + block * size, pitch, w, size / 4);
#pragma unroll
      for (int vector = 0; vector < Wide; ++vector) {
        const Floats scales = load_floats(scale + vector * kLanes);
#pragma unroll
        for (int i = 0; i < Rows; ++i) {
          const Floats step = times(scales, fill_floats(x.steps[i * blocks + block]));
          total[i][vector] = times_plus(step, floats(sum[i][vector]), total[i][vector]);
        }
      }
    }
    for (int i = 0; i < Rows; ++i) write<Wide>(total[i], part, row + i, panel);
  }

  // Adds the products of some rows, which are `pitch` bytes apart, and the codes of a block; `w` moves behind them.
  template <bool Halves, int Rows, int Wide>
  REQUANT_INLINE static void add_codes(Ints (&sum)[Rows][Wide], const int8_t* x, int64_t pitch, const uint8_t*& w,
                                       int64_t quads) {
    for (; quads > 0; quads -= Halves ? 2 : 1, w += Wide * kBytes) {
#pragma unroll
      for (int half = 0; half < (Halves ? 2 : 1); ++half, x += 4) {
        Bytes codes[Wide];
#pragma unroll
        for (int vector = 0; vector < Wide; ++vector) {
          const Bytes both = load_bytes(w + vector * kBytes);
          if (Rows == 1 && half == 0) __builtin_prefetch(w + vector * kBytes + kAhead, 0, 3);
          codes[vector] = !Halves ? both : half ? high_nibbles(both) : low_nibbles(both);
        }
#pragma unroll
        for (int i = 0; i < Rows; ++i) {
          const Bytes four = repeat(reinterpret_cast<const uint8_t*>(x + i * pitch));
#pragma unroll
          for (int vector = 0; vector < Wide; ++vector)  // products of codes of 4 bits fit in 16 bits
            sum[i][vector] = Halves ? dot_narrow(sum[i][vector], codes[vector], four) : dot(sum[i][vector], codes[vector], four);
        }
      }
    }
  }

  Floats applied(Floats x) const {
    switch (function_) {
      case Function::kRelu: return REQUANT_TARGET::applied<Function::kRelu>(x);
      case Function::kGelu: return REQUANT_TARGET::applied<Function::kGelu>(x);
      case Function::kGeluByTanh: return REQUANT_TARGET::applied<Function::kGeluByTanh>(x);
      case Function::kSilu: return REQUANT_TARGET::applied<Function::kSilu>(x);
      default: return x;
    }
  }

 protected:
  int64_t inputs_, outputs_;
  Function function_;
  bool gated_;
  Aligned<float> bias_;
  BlockWeights weights_;
};

}  // namespace requant::REQUANT_TARGET
