// Vectors of AVX-512 with VNNI (products of bytes) and VBMI (tables of bytes).
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace requant::REQUANT_TARGET {

constexpr int kLanes = 16;
constexpr int kBytes = 4 * kLanes;
constexpr int kPanelVectors = 4;
constexpr int panel_rows(int vectors) { return vectors == 4 ? 6 : 8; }  // 24 sums at most, of 32 registers
constexpr int kTogether = 4;
constexpr bool kSlides = true;
constexpr int kOffset = 0;
constexpr bool kHasNarrow = false;

using Ints = __m512i;
using Bytes = __m512i;
using Floats = __m512;

inline Ints load_ints(const int32_t* from) { return _mm512_loadu_si512(from); }
inline Bytes load_bytes(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline void store_bytes(uint8_t* to, Bytes value) { _mm512_storeu_si512(to, value); }
inline __mmask64 first_bytes(int64_t count) { return count >= kBytes ? ~0ull : (1ull << count) - 1; }
inline Bytes load_some(const uint8_t* from, int64_t count) { return _mm512_maskz_loadu_epi8(first_bytes(count), from); }
inline void store_some(uint8_t* to, Bytes value, int64_t count) { _mm512_mask_storeu_epi8(to, first_bytes(count), value); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints fill_ints(int32_t value) { return _mm512_set1_epi32(value); }
inline Bytes low_nibbles(Bytes value) { return _mm512_and_si512(value, _mm512_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes value) { return low_nibbles(_mm512_srli_epi16(value, 4)); }
inline Bytes fill(uint8_t value) { return _mm512_set1_epi8(static_cast<char>(value)); }

inline Bytes repeat(const uint8_t* four) {
  int32_t word;
  __builtin_memcpy(&word, four, 4);
  return _mm512_set1_epi32(word);
}

inline Ints dot(Ints sum, Bytes x, Bytes w) { return _mm512_dpbusd_epi32(sum, x, w); }
inline Ints dot_narrow(Ints sum, Bytes x, Bytes w) { return dot(sum, x, w); }
inline bool fits_narrow(const int8_t*) { return true; }

inline void transpose(const Bytes (&in)[4], Bytes (&out)[4]) {
  const Bytes low01 = _mm512_unpacklo_epi8(in[0], in[1]), high01 = _mm512_unpackhi_epi8(in[0], in[1]);
  const Bytes low23 = _mm512_unpacklo_epi8(in[2], in[3]), high23 = _mm512_unpackhi_epi8(in[2], in[3]);
  out[0] = _mm512_unpacklo_epi16(low01, low23);
  out[1] = _mm512_unpackhi_epi16(low01, low23);
  out[2] = _mm512_unpacklo_epi16(high01, high23);
  out[3] = _mm512_unpackhi_epi16(high01, high23);
}

inline Floats load_floats(const float* from) { return _mm512_loadu_ps(from); }
inline __mmask16 first_floats(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }
inline Floats load_few(const float* from, int64_t count) { return _mm512_maskz_loadu_ps(first_floats(count), from); }
inline Floats first_of(Floats value, int64_t count) { return _mm512_maskz_mov_ps(first_floats(count), value); }
inline void store_few(float* to, Floats value, int64_t count) { _mm512_mask_storeu_ps(to, first_floats(count), value); }
inline Floats fill_floats(float value) { return _mm512_set1_ps(value); }
inline Floats floats(Ints value) { return _mm512_cvtepi32_ps(value); }
inline Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats plus(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats quotient(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline void store_ints(int32_t* to, Ints value) { _mm512_storeu_si512(to, value); }
inline void store_floats(float* to, Floats value) { _mm512_storeu_ps(to, value); }

inline Ints widen(const uint8_t* from, int zero) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm512_sub_epi32(_mm512_cvtepu8_epi32(bytes), _mm512_set1_epi32(zero));
}

inline Floats times_plus(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Ints nearest(Floats value) { return _mm512_cvtps_epi32(value); }

inline Floats power_of_two(Ints n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}

inline Floats bounded(Floats value, float least, float most) {
  return _mm512_min_ps(_mm512_max_ps(value, _mm512_set1_ps(least)), _mm512_set1_ps(most));
}

using Halves = __m512i;

inline Halves halves(Ints a, Ints b) { return _mm512_packs_epi32(a, b); }
inline Bytes bytes(Halves a, Halves b) { return _mm512_packus_epi16(a, b); }
inline Halves fill_halves(int16_t value) { return _mm512_set1_epi16(value); }
inline Halves plus_halves(Halves a, Halves b) { return _mm512_adds_epi16(a, b); }
inline Halves flipped(Halves value) { return _mm512_xor_si512(value, fill_halves(INT16_MIN)); }
inline Halves times_halves(Halves a, Halves b) { return _mm512_mulhrs_epi16(a, b); }

template <int Bits>
Halves shifted_left(Halves value) { return _mm512_slli_epi16(value, Bits); }
template <int Bits>
Halves shifted_right(Halves value) { return _mm512_srai_epi16(value, Bits); }
template <int Bits>
Halves high_bits(Halves value) { return _mm512_srli_epi16(value, 16 - Bits); }

// Entries of two tables of 64 numbers; they stay in registers.
struct Lines {
  Halves middle[2], slope[2];

  explicit Lines(const int16_t* from) {
    for (int i = 0; i < 2; ++i) middle[i] = _mm512_loadu_si512(from + 32 * i);
    for (int i = 0; i < 2; ++i) slope[i] = _mm512_loadu_si512(from + 32 * (2 + i));
  }

  // Returns the entries of both tables for two vectors of indices.
  void pick(const Halves (&index)[2], Halves (&at_middle)[2], Halves (&at_slope)[2]) const {
    for (int i = 0; i < 2; ++i) {
      at_middle[i] = _mm512_permutex2var_epi16(middle[0], index[i], middle[1]);
      at_slope[i] = _mm512_permutex2var_epi16(slope[0], index[i], slope[1]);
    }
  }
};

inline Bytes signed_groups(Bytes value) {
  const Bytes order = _mm512_set4_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400);
  return _mm512_xor_si512(_mm512_shuffle_epi8(value, order), fill(0x80));
}

inline Bytes ordered(Bytes value) {
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), value);
}

inline void store_narrow(uint8_t* to, Ints value, int zero) {
  const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_add_epi32(value, _mm512_set1_epi32(zero)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}

// A permutation of two registers looks up 7 bits of the index, and its sign bit chooses between two of them.
inline void look_up(const uint8_t* from, uint8_t* to, size_t count, const uint8_t* table) {
  const Bytes part[4] = {load_bytes(table), load_bytes(table + 64), load_bytes(table + 128), load_bytes(table + 192)};
  for (size_t i = 0; i < count; i += 64) {
    const __mmask64 mask = first_bytes(static_cast<int64_t>(count - i));
    const Bytes index = _mm512_maskz_loadu_epi8(mask, from + i);
    const Bytes low = _mm512_permutex2var_epi8(part[0], index, part[1]);
    const Bytes high = _mm512_permutex2var_epi8(part[2], index, part[3]);
    _mm512_mask_storeu_epi8(to + i, mask, _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high));
  }
}

}  // namespace requant::REQUANT_TARGET
