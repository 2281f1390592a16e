// Copies of few bytes, one after the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace requant {

// Copies at least a piece of some bytes; the last one may overlap the one before it.
template <size_t Piece>
inline void copy_pieces(uint8_t* to, const uint8_t* from, size_t size) {
  for (size_t i = 0; i + Piece < size; i += Piece) std::memcpy(to + i, from + i, Piece);
  std::memcpy(to + size - Piece, from + size - Piece, Piece);
}

// Calls `work` with what copies `size` bytes, copy(to, from): without a call if they are 8 to 64.
template <class Work>
void with_copy(size_t size, const Work& work) {
  if (size >= 16 && size <= 64) return work([size](uint8_t* to, const uint8_t* from) { copy_pieces<16>(to, from, size); });
  if (size >= 8 && size < 16) return work([size](uint8_t* to, const uint8_t* from) { copy_pieces<8>(to, from, size); });
  work([size](uint8_t* to, const uint8_t* from) { std::memcpy(to, from, size); });
}

}  // namespace requant
