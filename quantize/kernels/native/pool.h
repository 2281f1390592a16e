// Means and maxima of the pixels in windows, channel by channel.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "scaled.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

constexpr size_t kChannels = 64;   // at a time: their sums stay in registers
constexpr size_t kShort = 1 << 8;  // so many bytes add up in 16 bits

// Adds `Count` channels of some pixels, at most `kShort`, to sums. The compiler turns the loops into vectors. As a part of its
// caller it would keep the sums in memory, and take twice as long.
template <size_t Count>
__attribute__((noinline)) void add_pixels(const uint8_t* pixel, size_t pixels, ptrdiff_t step, int32_t* sum) {
  uint16_t part[Count] = {};
  for (; pixels > 0; --pixels, pixel += step)
    for (size_t c = 0; c < Count; ++c) part[c] = static_cast<uint16_t>(part[c] + pixel[c]);
  for (size_t c = 0; c < Count; ++c) sum[c] += part[c];
}

// Writes the means of `Count` channels of a window.
template <size_t Count>
void mean_some(const Windows& window, const uint8_t* from, const Mean& mean, uint8_t* to) {
  int32_t sum[kChannels] = {};
  for (size_t y = 0; y < window.down; ++y, from += window.down_step)
    for (size_t x = 0; x < window.across; x += kShort)
      add_pixels<Count>(from + static_cast<ptrdiff_t>(x) * window.across_step, std::min(kShort, window.across - x),
                        window.across_step, sum);
  for (int32_t& each : sum) each -= mean.shift;
  const float least = static_cast<float>(-mean.y_zero), most = static_cast<float>(255 - mean.y_zero);
  uint8_t made[kChannels];
  for (size_t c = 0; c < Count; c += kLanes) {
    const Floats value = times(floats(load_ints(sum + c)), fill_floats(mean.multiplier));
    store_narrow(made + c, rounded(value, least, most), mean.y_zero);
  }
  std::copy_n(made, Count, to);
}

// Writes the largest values of `Count` channels of the pixels of a window.
template <size_t Count>
REQUANT_INLINE void max_some(const Windows& window, const uint8_t* from, uint8_t* to) {
  uint8_t most[Count] = {};
  for (size_t y = 0; y < window.down; ++y, from += window.down_step) {
    const uint8_t* pixel = from;
    for (size_t x = 0; x < window.across; ++x, pixel += window.across_step)
      for (size_t c = 0; c < Count; ++c) most[c] = std::max(most[c], pixel[c]);
  }
  std::copy_n(most, Count, to);
}

// Calls reduce<Count>(from, to) for all channels of a window: 64 at a time, and fewer behind them.
template <size_t Count = kChannels, class Reduce>
REQUANT_INLINE void reduce_channels(size_t channels, const uint8_t* from, uint8_t* to, const Reduce& reduce) {
  for (; channels >= Count; channels -= Count, from += Count, to += Count) reduce.template operator()<Count>(from, to);
  if constexpr (Count > 1) reduce_channels<Count / 2>(channels, from, to, reduce);
}

template <class Reduce>
REQUANT_INLINE void reduce_windows(const Windows& windows, size_t channels, uint8_t* to, const Reduce& reduce) {
  const uint8_t* from = windows.first;
  for (size_t window = 0; window < windows.count; ++window, from += windows.step, to += channels)
    reduce_channels(channels, from, to, reduce);
}

// to[w, c] = the mean of channel c in window w.
inline void mean_windows(const Windows& windows, size_t channels, const Mean& mean, uint8_t* to) {
  reduce_windows(windows, channels, to, [&]<size_t Count>(const uint8_t* first, uint8_t* result) {
    mean_some<Count>(windows, first, mean, result);
  });
}

// to[w, c] = the largest value of channel c in window w.
inline void max_windows(const Windows& windows, size_t channels, uint8_t* to) {
  reduce_windows(windows, channels, to, [&]<size_t Count>(const uint8_t* first, uint8_t* result) {
    max_some<Count>(windows, first, result);
  });
}

}  // namespace requant::REQUANT_TARGET
