// Sums and maxima over pixels, channel by channel.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "scaled.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

constexpr size_t kChannels = 64;   // at a time: their sums stay in registers
constexpr size_t kShort = 1 << 8;  // so many bytes add up in 16 bits

// Adds `Count` channels from `first` on of some pixels, and writes their means. The compiler turns the loops into vectors.
template <size_t Count>
void mean_some(const uint8_t* const* from, size_t pixels, size_t first, const Mean& mean, uint8_t* to) {
  int32_t sum[kChannels] = {};
  for (size_t start = 0; start < pixels; start += kShort) {
    uint16_t part[Count] = {};
    for (size_t pixel = start; pixel < std::min(pixels, start + kShort); ++pixel)
      for (size_t c = 0; c < Count; ++c) part[c] = static_cast<uint16_t>(part[c] + from[pixel][first + c]);
    for (size_t c = 0; c < Count; ++c) sum[c] += part[c];
  }
  for (int32_t& each : sum) each -= mean.shift;
  const float least = static_cast<float>(-mean.y_zero), most = static_cast<float>(255 - mean.y_zero);
  uint8_t made[kChannels];
  for (size_t c = 0; c < Count; c += kLanes) {
    const Floats value = times(floats(load_ints(sum + c)), fill_floats(mean.multiplier));
    store_narrow(made + c, rounded(value, least, most), mean.y_zero);
  }
  std::copy_n(made, Count, to + first);
}

// Writes the means of all channels: of 64 at a time, and of fewer behind them.
template <size_t Count = kChannels>
void mean_from(size_t first, const uint8_t* const* from, size_t pixels, size_t channels, const Mean& mean, uint8_t* to) {
  for (; first + Count <= channels; first += Count) mean_some<Count>(from, pixels, first, mean, to);
  if constexpr (Count > 1) mean_from<Count / 2>(first, from, pixels, channels, mean, to);
}

inline void mean_pixels(const uint8_t* const* from, size_t pixels, size_t channels, const Mean& mean, uint8_t* to) {
  mean_from(0, from, pixels, channels, mean, to);
}

// Writes the largest values of `Count` channels from `first` on.
template <size_t Count>
void max_some(const uint8_t* const* from, size_t pixels, size_t first, uint8_t* to) {
  uint8_t most[Count];
  std::copy_n(from[0] + first, Count, most);
  for (size_t pixel = 1; pixel < pixels; ++pixel)
    for (size_t c = 0; c < Count; ++c) most[c] = std::max(most[c], from[pixel][first + c]);
  std::copy_n(most, Count, to + first);
}

template <size_t Count = kChannels>
void max_from(size_t first, const uint8_t* const* from, size_t pixels, size_t channels, uint8_t* to) {
  for (; first + Count <= channels; first += Count) max_some<Count>(from, pixels, first, to);
  if constexpr (Count > 1) max_from<Count / 2>(first, from, pixels, channels, to);
}

// to[c] = the largest of from[p, c] over some pixels, given by their places.
inline void max_pixels(const uint8_t* const* from, size_t pixels, size_t channels, uint8_t* to) {
  max_from(0, from, pixels, channels, to);
}

}  // namespace requant::REQUANT_TARGET
