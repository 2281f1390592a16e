// Vectors of AVX2. `dot_narrow` adds pairs of products in 16 bits, which saturate unless the weights are small.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace requant::REQUANT_TARGET {

constexpr int kLanes = 8;
constexpr int kBytes = 4 * kLanes;
constexpr int kPanelVectors = 2;
constexpr int panel_rows(int) { return 4; }
constexpr int kTogether = 2;
constexpr bool kSlides = false;
constexpr int kOffset = 0;

using Ints = __m256i;
using Bytes = __m256i;
using Floats = __m256;

inline Ints load_ints(const int32_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Bytes load_bytes(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline void store_bytes(uint8_t* to, Bytes value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value); }
inline Ints fill_ints(int32_t value) { return _mm256_set1_epi32(value); }
inline Bytes low_nibbles(Bytes value) { return _mm256_and_si256(value, _mm256_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes value) { return low_nibbles(_mm256_srli_epi16(value, 4)); }
inline Bytes fill(uint8_t value) { return _mm256_set1_epi8(static_cast<char>(value)); }

inline Bytes repeat(const uint8_t* four) {
  int32_t word;
  __builtin_memcpy(&word, four, 4);
  return _mm256_set1_epi32(word);
}

#ifdef __AVXVNNI__
constexpr bool kHasNarrow = false;
inline Ints dot(Ints sum, Bytes x, Bytes w) { return _mm256_dpbusd_avx_epi32(sum, x, w); }
inline Ints dot_narrow(Ints sum, Bytes x, Bytes w) { return dot(sum, x, w); }
inline bool fits_narrow(const int8_t*) { return true; }
#else
constexpr bool kHasNarrow = true;

// Bytes 0 and 2 of each group, then bytes 1 and 3, as pairs of int16.
inline Ints dot(Ints sum, Bytes x, Bytes w) {
  const Ints even_x = _mm256_and_si256(x, _mm256_set1_epi16(0xff)), odd_x = _mm256_srli_epi16(x, 8);
  const Ints even_w = _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8), odd_w = _mm256_srai_epi16(w, 8);
  const Ints even = _mm256_madd_epi16(even_x, even_w), odd = _mm256_madd_epi16(odd_x, odd_w);
  return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}

inline Ints dot_narrow(Ints sum, Bytes x, Bytes w) {
  const Ints pairs = _mm256_maddubs_epi16(x, w);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

inline bool fits_pair(int a, int b) {
  const int most = (a > 0 ? a : 0) + (b > 0 ? b : 0), least = (a < 0 ? a : 0) + (b < 0 ? b : 0);
  return 255 * most <= INT16_MAX && 255 * least >= INT16_MIN;
}

inline bool fits_narrow(const int8_t* four) { return fits_pair(four[0], four[1]) && fits_pair(four[2], four[3]); }
#endif

inline void transpose(const Bytes (&in)[4], Bytes (&out)[4]) {
  const Bytes low01 = _mm256_unpacklo_epi8(in[0], in[1]), high01 = _mm256_unpackhi_epi8(in[0], in[1]);
  const Bytes low23 = _mm256_unpacklo_epi8(in[2], in[3]), high23 = _mm256_unpackhi_epi8(in[2], in[3]);
  out[0] = _mm256_unpacklo_epi16(low01, low23);
  out[1] = _mm256_unpackhi_epi16(low01, low23);
  out[2] = _mm256_unpacklo_epi16(high01, high23);
  out[3] = _mm256_unpackhi_epi16(high01, high23);
}

inline Floats load_floats(const float* from) { return _mm256_loadu_ps(from); }
inline Floats fill_floats(float value) { return _mm256_set1_ps(value); }
inline Floats floats(Ints value) { return _mm256_cvtepi32_ps(value); }
inline Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats plus(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats quotient(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline void store_ints(int32_t* to, Ints value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value); }
inline void store_floats(float* to, Floats value) { _mm256_storeu_ps(to, value); }

inline Ints widen(const uint8_t* from, int zero) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return _mm256_sub_epi32(_mm256_cvtepu8_epi32(bytes), _mm256_set1_epi32(zero));
}

inline Floats times_plus(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Ints nearest(Floats value) { return _mm256_cvtps_epi32(value); }

inline Floats power_of_two(Ints n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}

inline Floats bounded(Floats value, float least, float most) {
  return _mm256_min_ps(_mm256_max_ps(value, _mm256_set1_ps(least)), _mm256_set1_ps(most));
}

using Halves = __m256i;

inline Halves halves(Ints a, Ints b) { return _mm256_packs_epi32(a, b); }
inline Bytes bytes(Halves a, Halves b) { return _mm256_packus_epi16(a, b); }
inline Halves fill_halves(int16_t value) { return _mm256_set1_epi16(value); }
inline Halves plus_halves(Halves a, Halves b) { return _mm256_adds_epi16(a, b); }
inline Halves flipped(Halves value) { return _mm256_xor_si256(value, fill_halves(INT16_MIN)); }
inline Halves times_halves(Halves a, Halves b) { return _mm256_mulhrs_epi16(a, b); }

template <int Bits>
Halves shifted_left(Halves value) { return _mm256_slli_epi16(value, Bits); }
template <int Bits>
Halves shifted_right(Halves value) { return _mm256_srai_epi16(value, Bits); }
template <int Bits>
Halves high_bits(Halves value) { return _mm256_srli_epi16(value, 16 - Bits); }

// Two tables of 64 numbers: the low bytes and the high bytes of each, in vectors of 16 entries, which both lanes have. A shuffle
// picks from 16 entries, and gives 0 for an index with the highest bit.
struct Lines {
  Bytes entries[4][4];

  explicit Lines(const int16_t* from) {
    for (int part = 0; part < 4; ++part)
      for (int i = 0; i < 64; ++i) {
        const uint16_t value = static_cast<uint16_t>(from[part / 2 * 64 + i]);
        uint8_t* const to = reinterpret_cast<uint8_t*>(&entries[part][i / 16]) + i % 16;
        to[0] = to[16] = static_cast<uint8_t>(value >> part % 2 * 8);
      }
  }

  // Returns the entries of both tables for two vectors of indices.
  void pick(const Halves (&index)[2], Halves (&at_middle)[2], Halves (&at_slope)[2]) const {
    const Bytes all = _mm256_packus_epi16(index[0], index[1]);
    Bytes found[4] = {};
    for (int sixteen = 0; sixteen < 4; ++sixteen) {  // an index of other entries becomes 0x80 or more
      const Bytes place = _mm256_adds_epu8(_mm256_sub_epi8(all, fill(static_cast<uint8_t>(16 * sixteen))), fill(0x70));
      for (int part = 0; part < 4; ++part)
        found[part] = _mm256_or_si256(found[part], _mm256_shuffle_epi8(entries[part][sixteen], place));
    }
    at_middle[0] = _mm256_unpacklo_epi8(found[0], found[1]);
    at_middle[1] = _mm256_unpackhi_epi8(found[0], found[1]);
    at_slope[0] = _mm256_unpacklo_epi8(found[2], found[3]);
    at_slope[1] = _mm256_unpackhi_epi8(found[2], found[3]);
  }
};

inline Bytes signed_groups(Bytes value) {
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm256_xor_si256(_mm256_shuffle_epi8(value, _mm256_broadcastsi128_si256(order)), fill(0x80));
}

inline Bytes ordered(Bytes value) {
  return _mm256_permutevar8x32_epi32(value, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

inline void store_narrow(uint8_t* to, Ints value, int zero) {
  const __m128i low = _mm256_castsi256_si128(value), high = _mm256_extracti128_si256(value, 1);
  const __m128i words = _mm_add_epi16(_mm_packs_epi32(low, high), _mm_set1_epi16(static_cast<int16_t>(zero)));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(words, words));
}

inline void look_up(const uint8_t* from, uint8_t* to, size_t count, const uint8_t* table) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {  // eight loads in flight; shuffles of 16 bytes are no faster
    uint64_t word = 0, made = 0;
    __builtin_memcpy(&word, from + i, 8);
    for (int k = 0; k < 8; ++k) made |= static_cast<uint64_t>(table[(word >> (8 * k)) & 0xff]) << (8 * k);
    __builtin_memcpy(to + i, &made, 8);
  }
  for (; i < count; ++i) to[i] = table[from[i]];
}

}  // namespace requant::REQUANT_TARGET
