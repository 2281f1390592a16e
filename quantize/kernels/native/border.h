// A part of an image with the border that a kernel reaches over.
#pragma once

#include <algorithm>
#include <cstring>

#include "aligned.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

// Rows and columns of an image; they may lie outside of it.
struct Region {
  int64_t top, left, rows, columns;
};

// Returns what a kernel sees from some rows and columns of the result.
inline Region seen(const Window& window, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  const auto length = [&](int axis, int64_t count) {
    return (count - 1) * window.stride[axis] + (window.kernel[axis] - 1) * window.dilation[axis] + 1;
  };
  return {row * window.stride[0] - window.before[0], column * window.stride[1] - window.before[1], length(0, rows),
          length(1, columns)};
}

// Copies bytes. The `memcpy` of some C libraries uses `rep movsb`, which is slow for a few kilobytes that are not aligned.
inline void copy_bytes(uint8_t* to, const uint8_t* from, int64_t count) {
  for (; count >= kBytes; count -= kBytes, to += kBytes, from += kBytes) store_bytes(to, load_bytes(from));
  std::memcpy(to, from, count);
}

// Copies a region of an image with `pixel` bytes per pixel, and `slack` bytes more that have no meaning; what lies outside of
// the image is `zero`. The copy is valid until the thread makes another one.
inline const uint8_t* bordered(const uint8_t* image, const Extent& extent, int64_t pixel, const Region& region, int zero,
                               int64_t slack) {
  thread_local Scratch scratch;
  uint8_t* const copy = scratch.bytes(region.rows * region.columns * pixel + slack);
  const int64_t end = region.left + region.columns;
  uint8_t* to = copy;
  for (int64_t row = region.top; row < region.top + region.rows; ++row, to += region.columns * pixel) {
    if (row < 0 || row >= extent.height || region.left >= extent.width || end <= 0) {
      std::memset(to, zero, region.columns * pixel);
      continue;
    }
    const int64_t first = std::max<int64_t>(region.left, 0), last = std::min(end, extent.width);
    std::memset(to, zero, (first - region.left) * pixel);
    copy_bytes(to + (first - region.left) * pixel, image + (row * extent.width + first) * pixel, (last - first) * pixel);
    std::memset(to + (last - region.left) * pixel, zero, (end - last) * pixel);
  }
  return copy;
}

}  // namespace requant::REQUANT_TARGET
