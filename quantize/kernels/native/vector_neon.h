// Vectors of NEON with products of bytes. The instructions of i8mm multiply uint8 by int8. Those before it multiply int8 by
// int8: then `dot` reads x as x - 128, and the sums begin with 128 times the sum of the weights.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

namespace requant::REQUANT_TARGET {

constexpr int kLanes = 4;
constexpr int kBytes = 4 * kLanes;
constexpr int kPanelVectors = 2;
constexpr int panel_rows(int) { return 8; }  // their sums, 16 bytes of each, and a vector of weights fit in 32 registers
constexpr int kTogether = 4;
constexpr bool kSlides = true;
constexpr bool kHasNarrow = false;

using Ints = int32x4_t;
using Bytes = uint8x16_t;
using Floats = float32x4_t;

inline Ints load_ints(const int32_t* from) { return vld1q_s32(from); }
inline Bytes load_bytes(const uint8_t* from) { return vld1q_u8(from); }
inline void store_bytes(uint8_t* to, Bytes value) { vst1q_u8(to, value); }
inline Ints fill_ints(int32_t value) { return vdupq_n_s32(value); }
inline Bytes low_nibbles(Bytes value) { return vandq_u8(value, vdupq_n_u8(15)); }
inline Bytes high_nibbles(Bytes value) { return vshrq_n_u8(value, 4); }
inline Bytes fill(uint8_t value) { return vdupq_n_u8(value); }

inline Bytes repeat(const uint8_t* four) {
  uint32_t word;
  __builtin_memcpy(&word, four, 4);
  return vreinterpretq_u8_u32(vdupq_n_u32(word));
}

// `dot_lane` multiplies four bytes of x, those of one lane, by the four bytes of each lane of w.
#ifdef __ARM_FEATURE_MATMUL_INT8
constexpr int kOffset = 0;

inline Ints dot(Ints sum, Bytes x, Bytes w) { return vusdotq_s32(sum, x, vreinterpretq_s8_u8(w)); }

template <int Lane>
Ints dot_lane(Ints sum, Bytes x, Bytes w) {
  return vsudotq_laneq_s32(sum, vreinterpretq_s8_u8(w), x, Lane);
}
#else
constexpr int kOffset = 128;

// Returns x - 128 as int8, which has the same bits but the highest.
inline int8x16_t lower(Bytes x) { return vreinterpretq_s8_u8(veorq_u8(x, fill(0x80))); }

inline Ints dot(Ints sum, Bytes x, Bytes w) { return vdotq_s32(sum, lower(x), vreinterpretq_s8_u8(w)); }

template <int Lane>
Ints dot_lane(Ints sum, Bytes x, Bytes w) {
  return vdotq_laneq_s32(sum, vreinterpretq_s8_u8(w), lower(x), Lane);
}
#endif

inline Ints dot_narrow(Ints sum, Bytes x, Bytes w) { return dot(sum, x, w); }
inline bool fits_narrow(const int8_t*) { return true; }

inline void transpose(const Bytes (&in)[4], Bytes (&out)[4]) {
  const uint16x8_t low01 = vreinterpretq_u16_u8(vzip1q_u8(in[0], in[1]));
  const uint16x8_t low23 = vreinterpretq_u16_u8(vzip1q_u8(in[2], in[3]));
  const uint16x8_t high01 = vreinterpretq_u16_u8(vzip2q_u8(in[0], in[1]));
  const uint16x8_t high23 = vreinterpretq_u16_u8(vzip2q_u8(in[2], in[3]));
  out[0] = vreinterpretq_u8_u16(vzip1q_u16(low01, low23));
  out[1] = vreinterpretq_u8_u16(vzip2q_u16(low01, low23));
  out[2] = vreinterpretq_u8_u16(vzip1q_u16(high01, high23));
  out[3] = vreinterpretq_u8_u16(vzip2q_u16(high01, high23));
}

// Returns the low halves of two vectors. The zero point is added to them: the result fits in their bits.
inline uint16x8_t low_words(Ints first, Ints second) {
  return vuzp1q_u16(vreinterpretq_u16_s32(first), vreinterpretq_u16_s32(second));
}

inline Bytes low_bytes(uint16x8_t first, uint16x8_t second) {
  return vuzp1q_u8(vreinterpretq_u8_u16(first), vreinterpretq_u8_u16(second));
}

inline Floats load_floats(const float* from) { return vld1q_f32(from); }
inline Floats fill_floats(float value) { return vdupq_n_f32(value); }
inline Floats floats(Ints value) { return vcvtq_f32_s32(value); }
inline Floats times(Floats a, Floats b) { return vmulq_f32(a, b); }
inline Floats plus(Floats a, Floats b) { return vaddq_f32(a, b); }
inline Floats quotient(Floats a, Floats b) { return vdivq_f32(a, b); }
inline Floats smaller(Floats a, Floats b) { return vminq_f32(a, b); }
inline Floats larger(Floats a, Floats b) { return vmaxq_f32(a, b); }
inline void store_ints(int32_t* to, Ints value) { vst1q_s32(to, value); }
inline void store_floats(float* to, Floats value) { vst1q_f32(to, value); }

inline Ints widen(const uint8_t* from, int zero) {
  uint32_t four;
  __builtin_memcpy(&four, from, 4);
  const uint16x8_t words = vmovl_u8(vcreate_u8(four));
  return vsubq_s32(vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(words))), vdupq_n_s32(zero));
}

inline Floats times_plus(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
inline Ints nearest(Floats value) { return vcvtnq_s32_f32(value); }

inline Floats power_of_two(Ints n) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23)); }

inline Floats bounded(Floats value, float least, float most) {
  return vminq_f32(vmaxq_f32(value, vdupq_n_f32(least)), vdupq_n_f32(most));
}

using Halves = int16x8_t;

inline Halves halves(Ints a, Ints b) { return vqmovn_high_s32(vqmovn_s32(a), b); }
inline Bytes bytes(Halves a, Halves b) { return vqmovun_high_s16(vqmovun_s16(a), b); }
inline Halves fill_halves(int16_t value) { return vdupq_n_s16(value); }
inline Halves plus_halves(Halves a, Halves b) { return vqaddq_s16(a, b); }
inline Halves flipped(Halves value) { return veorq_s16(value, fill_halves(INT16_MIN)); }
inline Halves times_halves(Halves a, Halves b) { return vqrdmulhq_s16(a, b); }

template <int Bits>
Halves shifted_left(Halves value) { return vshlq_n_s16(value, Bits); }
template <int Bits>
Halves shifted_right(Halves value) { return vshrq_n_s16(value, Bits); }
template <int Bits>
Halves high_bits(Halves value) { return vreinterpretq_s16_u16(vshrq_n_u16(vreinterpretq_u16_s16(value), 16 - Bits)); }

// Entries of two tables of 64 numbers.
struct Lines {
  uint8x16x4_t entries[4];  // the low bytes and the high bytes of each table

  explicit Lines(const int16_t* from) {
    for (int table = 0; table < 2; ++table)
      for (int i = 0; i < 4; ++i) {
        const uint8x16x2_t parts = vld2q_u8(reinterpret_cast<const uint8_t*>(from + 64 * table + 16 * i));
        entries[2 * table].val[i] = parts.val[0];
        entries[2 * table + 1].val[i] = parts.val[1];
      }
  }

  // Returns the entries of both tables for two vectors of indices.
  void pick(const Halves (&index)[2], Halves (&at_middle)[2], Halves (&at_slope)[2]) const {
    const uint8x16_t all = vcombine_u8(vqmovun_s16(index[0]), vqmovun_s16(index[1]));
    uint8x16_t found[4];
    for (int part = 0; part < 4; ++part) found[part] = vqtbl4q_u8(entries[part], all);
    at_middle[0] = vreinterpretq_s16_u8(vzip1q_u8(found[0], found[1]));
    at_middle[1] = vreinterpretq_s16_u8(vzip2q_u8(found[0], found[1]));
    at_slope[0] = vreinterpretq_s16_u8(vzip1q_u8(found[2], found[3]));
    at_slope[1] = vreinterpretq_s16_u8(vzip2q_u8(found[2], found[3]));
  }
};

inline Bytes signed_groups(Bytes value) {
  const uint8_t order[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  return veorq_u8(vqtbl1q_u8(value, vld1q_u8(order)), fill(0x80));
}

inline Bytes ordered(Bytes value) { return value; }

inline void store_narrow(uint8_t* to, Ints value, int zero) {
  const uint16x8_t words = low_words(value, value);
  const Bytes bytes = vaddq_u8(low_bytes(words, words), fill(static_cast<uint8_t>(zero)));
  const uint32_t four = vgetq_lane_u32(vreinterpretq_u32_u8(bytes), 0);
  __builtin_memcpy(to, &four, 4);
}

// An instruction reads 64 entries. The first writes 0 where the index is larger; the others leave such bytes as they are.
inline void look_up(const uint8_t* from, uint8_t* to, size_t count, const uint8_t* table) {
  size_t i = 0;
  if (count >= kBytes) {
    const uint8x16x4_t part[4] = {vld1q_u8_x4(table), vld1q_u8_x4(table + 64), vld1q_u8_x4(table + 128),
                                  vld1q_u8_x4(table + 192)};
    for (; i + kBytes <= count; i += kBytes) {
      const Bytes index = load_bytes(from + i);
      Bytes made = vqtbl4q_u8(part[0], index);
      for (int k = 1; k < 4; ++k) made = vqtbx4q_u8(made, part[k], vsubq_u8(index, fill(static_cast<uint8_t>(64 * k))));
      store_bytes(to + i, made);
    }
  }
  for (; i < count; ++i) to[i] = table[from[i]];
}

}  // namespace requant::REQUANT_TARGET
