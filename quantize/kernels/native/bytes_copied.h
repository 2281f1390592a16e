// Fewer bytes than a vector has, for instruction sets without masks.
#pragma once

#include <cstdint>

namespace requant::REQUANT_TARGET {

inline Bytes load_some(const uint8_t* from, int64_t count) {
  uint8_t whole[kBytes] = {};
  __builtin_memcpy(whole, from, static_cast<size_t>(count));
  return load_bytes(whole);
}
inline void store_some(uint8_t* to, Bytes value, int64_t count) {
  uint8_t whole[kBytes];
  store_bytes(whole, value);
  __builtin_memcpy(to, whole, static_cast<size_t>(count));
}

}  // namespace requant::REQUANT_TARGET
