// Values between the pixels of an image.
#pragma once

#include <algorithm>
#include <cstring>

#include "aligned.h"
#include "finish.h"
#include "scaled.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

// Returns what is between two values.
REQUANT_INLINE Floats between(Floats first, Floats second, float share) {
  return times_plus(second, fill_floats(share), times(first, fill_floats(1 - share)));
}

// Writes the values between two rows, minus the zero point, for all columns and channels. Behind them stand any values.
inline void write_between(const RowPair& rows, float* to) {
  const int64_t count = rows.columns * rows.channels;
  const auto write = [&](const uint8_t* first, const uint8_t* second, float* at) {
    store_floats(at, between(floats(widen(first, rows.zero)), floats(widen(second, rows.zero)), rows.share));
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) write(rows.first + i, rows.second + i, to + i);
  if (i == count) return;
  uint8_t first[kLanes] = {}, second[kLanes] = {};
  std::memcpy(first, rows.first + i, count - i);
  std::memcpy(second, rows.second + i, count - i);
  write(first, second, to + i);
}

constexpr int kFewChannels = 4;

// Writes what is between columns of a row with at most four channels: four values for each pixel, of which the next one takes
// those behind its channels.
inline void write_columns(const float* row, const Between* columns, int64_t count, int64_t channels, float ratio, float* to) {
  for (int64_t pixel = 0; pixel < count; ++pixel, to += channels) {
    const float *const one = row + columns[pixel].first * channels, *const other = row + columns[pixel].second * channels;
    const float share = columns[pixel].share;
    float made[kFewChannels];
#pragma unroll
    for (int i = 0; i < kFewChannels; ++i) made[i] = (one[i] * (1 - share) + other[i] * share) * ratio;
    std::memcpy(to, made, sizeof made);
  }
}

// Writes pixels of few channels between columns of a row that is between two others: vectors hold several pixels.
inline void interpolate_few(const RowPair& rows, const float* row, const Between* columns, int64_t count, uint8_t* to) {
  thread_local Scratch scratch;
  const int64_t all = count * rows.channels;
  float* const made = scratch.floats(all + kBytes);
  write_columns(row, columns, count, rows.channels, rows.ratio, made);
  std::fill_n(made + all, kBytes, 0.0f);
  for (int64_t i = 0; i < all; i += kBytes) {
    Floats value[4];
    for (int k = 0; k < 4; ++k) value[k] = load_floats(made + i + k * kLanes);
    store_some(to + i, ordered(rounded_bytes(value, rows.y_zero)), std::min<int64_t>(kBytes, all - i));
  }
}

// Writes pixels between columns of two rows: first what is between the rows, then what is between its columns. Four vectors are
// rounded together: those of four pixels, or up to four parts of a pixel that does not fit into one.
inline void interpolate(const RowPair& rows, const Between* columns, int64_t count, uint8_t* to) {
  thread_local Scratch scratch;
  const int64_t channels = rows.channels;
  float* const row = scratch.floats(rows.columns * channels + kLanes);
  std::fill_n(row + rows.columns * channels, kLanes, 0.0f);  // vectors reach behind the last pixel
  write_between(rows, row);
  alignas(64) uint8_t made[kBytes];
  Floats value[4];
  const auto compute = [&](const Between& column, int64_t channel) __attribute__((always_inline)) {
    const Floats first = load_floats(row + column.first * channels + channel);
    const Floats second = load_floats(row + column.second * channels + channel);
    return times(between(first, second, column.share), fill_floats(rows.ratio));
  };
  if (channels <= kFewChannels) return interpolate_few(rows, row, columns, count, to);
  if (channels <= kLanes) {
    for (int64_t pixel = 0; pixel < count; pixel += 4) {
#pragma unroll
      for (int k = 0; k < 4; ++k) value[k] = compute(columns[std::min(pixel + k, count - 1)], 0);
      store_bytes(made, ordered(rounded_bytes(value, rows.y_zero)));
      for (int64_t k = 0; k < std::min<int64_t>(4, count - pixel); ++k, to += channels) copy_few(to, made + k * kLanes, channels);
    }
    return;
  }
  for (int64_t pixel = 0; pixel < count; ++pixel)
    for (int64_t channel = 0; channel < channels; channel += kBytes) {
      const int64_t some = std::min<int64_t>(kBytes, channels - channel);
      for (int k = 0; k < 4; ++k) value[k] = k * kLanes < some ? compute(columns[pixel], channel + k * kLanes) : value[0];
      store_bytes(made, ordered(rounded_bytes(value, rows.y_zero)));
      std::memcpy(to, made, some);
      to += some;
    }
}

}  // namespace requant::REQUANT_TARGET
