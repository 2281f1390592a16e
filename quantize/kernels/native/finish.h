// What becomes of the sums of a product: the residual, and the requantization or the curve; or results in float.
#pragma once

#include <algorithm>
#include <cstring>

#include "curve.h"
#include "float_finish.h"
#include "panel.h"
#include "scaled.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

// Copies up to 16 bytes, without a call.
inline void* copy_few(uint8_t* to, const uint8_t* from, int64_t count) {
  if (count >= 8) {  // two that overlap
    std::memcpy(to + count - 8, from + count - 8, 8);
    return std::memcpy(to, from, 8);
  }
  if (count >= 4) {
    std::memcpy(to + count - 4, from + count - 4, 4);
    return std::memcpy(to, from, 4);
  }
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
  return to;
}

class Finish {
 public:
  explicit Finish(const Convolution& conv) : conv_(conv), curve_(conv.curve), curved_(!conv.curve.empty()) {}

  // Results in float; `conv` is read by nobody.
  Finish(const Convolution& conv, const FloatFinish& real) : Finish(conv) { real_ = &real; }

  // Writes the results of some pixels, from sums that include the bias. It is part of its caller, so that the sums stay in
  // registers; rarer cases get a copy of them.
  template <int Rows, int Vectors>
  REQUANT_INLINE void write(const Ints (&sum)[Rows][Vectors], const Panel& panel, const Place& place) const {
    if (real_ != nullptr) return write_real(sum, panel, place);
    if (panel.bytes == kLanes && place.residual == nullptr)
      return curved_ ? write_all<true, true, true>(sum, panel, place) : write_all<false, true, true>(sum, panel, place);
    if (panel.bytes == kLanes && !curved_) return write_all<false, true, false>(sum, panel, place);
    if constexpr (Vectors == 1)  // fewer channels than a vector has lanes
      if (place.residual == nullptr && !curved_) return write_all<false, false, true>(sum, panel, place);
    Ints copy[Rows][Vectors];
#pragma unroll
    for (int row = 0; row < Rows; ++row)
#pragma unroll
      for (int vector = 0; vector < Vectors; ++vector) copy[row][vector] = sum[row][vector];
    curved_ ? write_copy<true>(copy, Rows, panel, place) : write_copy<false>(copy, Rows, panel, place);
  }

  // Calls `work` with a writer of the results of a panel: write(sums, rows, place) takes the sums of neighbouring pixels, which
  // include the bias, from memory.
  template <int Vectors, class Work>
  void with_writer(const Panel& panel, bool plain, const Work& work) const {
    if (real_ != nullptr) return real_->with_writer<Vectors>(panel, work);
    if (panel.bytes != kLanes) return work(rare_writer<Vectors>(panel));  // fewer channels than a vector has lanes
    if (curved_) return plain ? work(writer<true, true, Vectors>(panel)) : work(writer<true, false, Vectors>(panel));
    plain ? work(writer<false, true, Vectors>(panel)) : work(writer<false, false, Vectors>(panel));
  }

 private:
  template <int Rows, int Vectors>
  REQUANT_INLINE void write_real(const Ints (&sum)[Rows][Vectors], const Panel& panel, const Place& place) const {
    alignas(64) int32_t sums[Rows * Vectors * kLanes];
#pragma unroll
    for (int row = 0; row < Rows; ++row)
#pragma unroll
      for (int vector = 0; vector < Vectors; ++vector) store_ints(sums + (row * Vectors + vector) * kLanes, sum[row][vector]);
    real_->write<Vectors>(sums, Rows, panel, place);
  }

  template <int Vectors>
  auto rare_writer(const Panel& panel) const {
    return [this, panel](const int32_t* sums, int rows, const Place& place) {
      for (int row = 0; row < rows; ++row) {
        Ints one[1][Vectors];
        for (int vector = 0; vector < Vectors; ++vector) one[0][vector] = load_ints(sums + (row * Vectors + vector) * kLanes);
        curved_ ? write_copy<true>(one, 1, panel, moved(place, row)) : write_copy<false>(one, 1, panel, moved(place, row));
      }
    };
  }

  template <bool Curved, bool Plain, int Vectors>
  auto writer(const Panel& panel) const {
    return [this, panel](const int32_t* sums, int rows, const Place& place) __attribute__((always_inline)) {
      constexpr int kStep = step(Vectors);
      int row = 0;
      for (; row + kStep <= rows; row += kStep) from_memory<kStep, Curved, Plain, Vectors>(sums, row, panel, place);
      for (; row < rows; ++row) from_memory<1, Curved, Plain, Vectors>(sums, row, panel, place);
    };
  }

  template <int Rows, bool Curved, bool Plain, int Vectors>
  REQUANT_INLINE void from_memory(const int32_t* sums, int first, const Panel& panel, const Place& place) const {
    Ints sum[Rows][Vectors];
#pragma unroll
    for (int row = 0; row < Rows; ++row)
#pragma unroll
      for (int vector = 0; vector < Vectors; ++vector)
        sum[row][vector] = load_ints(sums + ((first + row) * Vectors + vector) * kLanes);
    write_some<Curved, true, Plain>(sum, Rows, panel, moved(place, first));
  }

  // Returns how many rows become one vector of bytes.
  static constexpr int step(int vectors) { return vectors < 3 ? 4 / vectors : 1; }

  Place moved(const Place& place, int rows) const {
    return {place.to + rows * conv_.outputs, place.residual ? place.residual + rows * conv_.outputs : nullptr};
  }

  template <bool Curved, bool Whole, bool Plain, int Rows, int Vectors>
  REQUANT_INLINE void write_all(const Ints (&sum)[Rows][Vectors], const Panel& panel, const Place& place) const {
    constexpr int kStep = step(Vectors);
#pragma unroll
    for (int row = 0; row < Rows; row += kStep)
      write_some<Curved, Whole, Plain>(&sum[row], std::min(kStep, Rows - row), panel, moved(place, row));
  }

  template <bool Curved, int Vectors>
  __attribute__((noinline)) void write_copy(const Ints (*sum)[Vectors], int rows, const Panel& panel, const Place& place) const {
    constexpr int kStep = step(Vectors);
    for (int row = 0; row < rows; row += kStep)
      write_some<Curved, false, false>(sum + row, std::min(kStep, rows - row), panel, moved(place, row));
  }

  // Up to four vectors of sums, those of some rows, become one of bytes. `Whole`: the panel has all channels of its vectors;
  // `Plain`: there is no residual.
  template <bool Curved, bool Whole, bool Plain, int Vectors>
  REQUANT_INLINE void write_some(const Ints (*sum)[Vectors], int rows, const Panel& panel, const Place& place) const {
    Floats value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = std::min(i / Vectors, rows - 1), vector = i / Vectors < rows ? i % Vectors : 0;
      value[i] = real<Curved>(sum[row][vector], panel.multiplier + vector * kLanes);
      if (Plain || place.residual == nullptr) continue;
      value[i] = plus(value[i], residual<Whole>(place.residual + row * conv_.outputs + panel.offset(vector, Vectors), panel));
    }
    alignas(64) uint8_t made[kBytes];  // in one cache line
    store_bytes(made, ordered(Curved ? curve_.bytes_of(value) : rounded_bytes(value, conv_.y_zero)));
    const uint8_t* from = made;
    uint8_t* to = place.to;
    for (int row = 0; row < rows; ++row, from += Vectors * kLanes, to += conv_.outputs)
      panel.even ? std::memcpy(to, from, Vectors * kLanes) : store_apart<Whole, Vectors>(from, panel, to);
  }

  // Copies the vectors of a row to where each begins.
  template <bool Whole, int Vectors>
  REQUANT_INLINE static void* store_apart(const uint8_t* from, const Panel& panel, uint8_t* to) {
    for (int vector = 0; vector < Vectors; ++vector, from += kLanes)
      Whole ? std::memcpy(to + panel.offset(vector, Vectors), from, kLanes)
            : copy_few(to + panel.offset(vector, Vectors), from, panel.bytes);
    return to;
  }

  // Returns what is rounded, or what the curve is a function of.
  template <bool Curved>
  REQUANT_INLINE Floats real(Ints sum, const float* multiplier) const {
    return Curved ? times_plus(floats(sum), load_floats(multiplier), fill_floats(conv_.offset)) : scaled(sum, multiplier);
  }

  // Returns what a vector of the residual adds.
  template <bool Whole>
  Floats residual(const uint8_t* from, const Panel& panel) const {
    alignas(64) uint8_t part[kBytes];  // in one piece: two smaller stores would delay the load
    if (!Whole) {
      store_bytes(part, load_some(from, panel.bytes));
      from = part;
    }
    return scaled(from, conv_.residual_zero, conv_.residual_ratio);
  }

  const Convolution& conv_;
  Curve curve_;
  bool curved_;
  const FloatFinish* real_ = nullptr;
};

}  // namespace requant::REQUANT_TARGET
