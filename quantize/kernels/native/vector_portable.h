// Vectors as arrays, in plain C++: for any CPU, and the measure for all other instruction sets.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace requant::REQUANT_TARGET {

constexpr int kLanes = 4;           // int32 of one vector
constexpr int kBytes = 4 * kLanes;  // bytes of one vector
constexpr int kPanelVectors = 2;    // the most vectors of output channels that share a load of x
constexpr int panel_rows(int) { return 1; }  // pixels that share a load of their weights; more would fill the library
constexpr int kTogether = 1;                 // rows of a depthwise convolution that share a transposition; as above
constexpr bool kSlides = false;              // whether three transposed columns fit in the registers of a depthwise kernel
constexpr int kOffset = 0;                   // what `dot` subtracts from each x
constexpr bool kHasNarrow = false;           // whether `dot_narrow` is faster than `dot`

struct Ints {
  int32_t at[kLanes];
};
struct Floats {
  float at[kLanes];
};
struct Halves {
  int16_t at[kBytes / 2];
};
struct Bytes {
  uint8_t at[kBytes];
};

inline Ints load_ints(const int32_t* from) {
  Ints made;
  std::memcpy(made.at, from, sizeof made.at);
  return made;
}

inline Bytes load_bytes(const uint8_t* from) {
  Bytes made;
  std::memcpy(made.at, from, sizeof made.at);
  return made;
}

inline void store_bytes(uint8_t* to, Bytes value) { std::memcpy(to, value.at, sizeof value.at); }

inline Ints fill_ints(int32_t value) {
  Ints made;
  std::fill_n(made.at, kLanes, value);
  return made;
}

// Returns the low 4 bits of each byte.
inline Bytes low_nibbles(Bytes value) {
  for (uint8_t& each : value.at) each &= 15;
  return value;
}

// Returns the high 4 bits of each byte.
inline Bytes high_nibbles(Bytes value) {
  for (uint8_t& each : value.at) each >>= 4;
  return value;
}

inline Bytes fill(uint8_t value) {
  Bytes made;
  std::memset(made.at, value, sizeof made.at);
  return made;
}

// Returns four bytes, repeated.
inline Bytes repeat(const uint8_t* four) {
  Bytes made;
  for (int i = 0; i < kBytes; ++i) made.at[i] = four[i % 4];
  return made;
}

// Adds to each int32 the four products of its bytes, (x - kOffset) * w: x is uint8, w is int8.
inline Ints dot(Ints sum, Bytes x, Bytes w) {
  for (int i = 0; i < kBytes; ++i) sum.at[i / 4] += x.at[i] * static_cast<int8_t>(w.at[i]);
  return sum;
}

// The same, for weights that `fits_narrow`.
inline Ints dot_narrow(Ints sum, Bytes x, Bytes w) { return dot(sum, x, w); }

// Whether the sums of `dot_narrow` are exact for four weights and any x.
inline bool fits_narrow(const int8_t*) { return true; }

// Turns four vectors of bytes into four vectors of groups of four, one from each. Which group stands where is its own
// affair: `bytes` of `halves` undo it.
inline void transpose(const Bytes (&in)[4], Bytes (&out)[4]) {
  for (int group = 0; group < kBytes; ++group)
    for (int i = 0; i < 4; ++i) out[group / kLanes].at[4 * (group % kLanes) + i] = in[i].at[group];
}

inline Floats load_floats(const float* from) {
  Floats made;
  std::memcpy(made.at, from, sizeof made.at);
  return made;
}

inline Floats fill_floats(float value) {
  Floats made;
  std::fill_n(made.at, kLanes, value);
  return made;
}

inline Floats floats(Ints value) {
  Floats made;
  for (int i = 0; i < kLanes; ++i) made.at[i] = static_cast<float>(value.at[i]);
  return made;
}

inline Floats times(Floats a, Floats b) {
  for (int i = 0; i < kLanes; ++i) a.at[i] *= b.at[i];
  return a;
}

inline Floats plus(Floats a, Floats b) {
  for (int i = 0; i < kLanes; ++i) a.at[i] += b.at[i];
  return a;
}

inline Floats quotient(Floats a, Floats b) {
  for (int i = 0; i < kLanes; ++i) a.at[i] /= b.at[i];
  return a;
}

inline Floats smaller(Floats a, Floats b) {
  for (int i = 0; i < kLanes; ++i) a.at[i] = std::min(a.at[i], b.at[i]);
  return a;
}

// Returns the larger numbers; b where one of them is NaN.
inline Floats larger(Floats a, Floats b) {
  for (int i = 0; i < kLanes; ++i) a.at[i] = a.at[i] > b.at[i] ? a.at[i] : b.at[i];
  return a;
}

// Returns the numbers of a vector, each in the place of the one whose index differs by the bit `Distance`.
template <int Distance>
Floats swapped(Floats x) {
  Floats made;
  for (int i = 0; i < kLanes; ++i) made.at[i] = x.at[i ^ Distance];
  return made;
}

inline void store_ints(int32_t* to, Ints value) { std::memcpy(to, value.at, sizeof value.at); }
inline void store_floats(float* to, Floats value) { std::memcpy(to, value.at, sizeof value.at); }

// Reads as many bytes as a vector has int32, and subtracts `zero` from each.
inline Ints widen(const uint8_t* from, int zero) {
  Ints made;
  for (int i = 0; i < kLanes; ++i) made.at[i] = from[i] - zero;
  return made;
}

// Returns a * b + c, rounded once.
inline Floats times_plus(Floats a, Floats b, Floats c) {
  for (int i = 0; i < kLanes; ++i) a.at[i] = std::fma(a.at[i], b.at[i], c.at[i]);
  return a;
}

// Returns 2^n for n from -126 to 127, and 0 for -127.
inline Floats power_of_two(Ints n) {
  Floats made;
  for (int i = 0; i < kLanes; ++i) made.at[i] = n.at[i] == -127 ? 0.0f : std::ldexp(1.0f, n.at[i]);
  return made;
}

inline Floats bounded(Floats value, float least, float most) {
  for (float& each : value.at) each = std::min(std::max(each, least), most);
  return value;
}

// Returns the nearest integers, halves to even. Other instruction sets have it for numbers that int32 can hold; this one
// has it for all.
inline Ints nearest(Floats value) {
  const Floats inside = bounded(value, -0x1p31f, 0x1.fffffep30f);
  Ints made;
  for (int i = 0; i < kLanes; ++i) made.at[i] = static_cast<int32_t>(std::nearbyintf(inside.at[i]));
  return made;
}

inline int16_t clipped_half(int32_t value) { return static_cast<int16_t>(std::clamp(value, -0x8000, 0x7fff)); }

// Returns two vectors as one of int16, clipped.
inline Halves halves(Ints a, Ints b) {
  Halves made;
  for (int i = 0; i < kLanes; ++i) {
    made.at[i] = clipped_half(a.at[i]);
    made.at[kLanes + i] = clipped_half(b.at[i]);
  }
  return made;
}

// Returns two vectors as one of uint8, clipped. The bytes of `halves` stand in the order of `transpose`.
inline Bytes bytes(Halves a, Halves b) {
  Bytes made;
  for (int i = 0; i < kBytes; ++i) {
    const Halves& from = i < kBytes / 2 ? a : b;
    made.at[i] = static_cast<uint8_t>(std::clamp<int>(from.at[i % (kBytes / 2)], 0, 255));
  }
  return made;
}

inline Halves fill_halves(int16_t value) {
  Halves made;
  std::fill_n(made.at, kBytes / 2, value);
  return made;
}

// Returns a + b, clipped.
inline Halves plus_halves(Halves a, Halves b) {
  for (int i = 0; i < kBytes / 2; ++i) a.at[i] = clipped_half(a.at[i] + b.at[i]);
  return a;
}

// Returns the value with its highest bit changed: an unsigned number minus 2^15.
inline Halves flipped(Halves value) {
  for (int16_t& each : value.at) each = static_cast<int16_t>(each ^ INT16_MIN);
  return value;
}

// Returns a * b / 2^15, halves up; one of the two is not -2^15.
inline Halves times_halves(Halves a, Halves b) {
  for (int i = 0; i < kBytes / 2; ++i) a.at[i] = clipped_half((a.at[i] * b.at[i] + 0x4000) >> 15);
  return a;
}

template <int Bits>
Halves shifted_left(Halves value) {
  for (int16_t& each : value.at) each = static_cast<int16_t>(static_cast<uint16_t>(each) << Bits);
  return value;
}

template <int Bits>
Halves shifted_right(Halves value) {
  for (int16_t& each : value.at) each = static_cast<int16_t>(each >> Bits);
  return value;
}

// Returns the highest bits as a number that is not negative.
template <int Bits>
Halves high_bits(Halves value) {
  for (int16_t& each : value.at) each = static_cast<int16_t>(static_cast<uint16_t>(each) >> (16 - Bits));
  return value;
}

// Entries of two tables of 64 numbers, which stand one after the other.
struct Lines {
  int16_t tables[2][64];

  explicit Lines(const int16_t* from) { std::memcpy(tables, from, sizeof tables); }

  // Returns the entries of both tables for two vectors of indices.
  void pick(const Halves (&index)[2], Halves (&at_middle)[2], Halves (&at_slope)[2]) const {
    for (int i = 0; i < 2; ++i)
      for (int lane = 0; lane < kBytes / 2; ++lane) {
        at_middle[i].at[lane] = tables[0][index[i].at[lane]];
        at_slope[i].at[lane] = tables[1][index[i].at[lane]];
      }
  }
};

// Returns what `bytes` returned as groups of four, one from each vector, and minus 128 as int8.
inline Bytes signed_groups(Bytes value) {
  Bytes made;
  for (int i = 0; i < kBytes; ++i) made.at[i] = value.at[i % 4 * kLanes + i / 4] ^ 0x80;
  return made;
}

// Returns what `bytes` returned in order: the bytes of the first vector, those of the second one, and so on.
inline Bytes ordered(Bytes value) { return value; }

// Writes the bytes of one vector in order.
inline void store_narrow(uint8_t* to, Ints value, int zero) {
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<uint8_t>(value.at[i] + zero);
}

inline void look_up(const uint8_t* from, uint8_t* to, size_t count, const uint8_t* table) {
  for (size_t i = 0; i < count; ++i) to[i] = table[from[i]];
}

}  // namespace requant::REQUANT_TARGET
