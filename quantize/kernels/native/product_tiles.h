// Products of rows of bytes and a panel of weights, in the matrix tiles of AMX.
//
// A tile has 16 rows of 64 bytes. One instruction multiplies 16 rows by 64 x 16 weights and adds to 16 x 16 sums. Four
// tiles of sums (32 rows by 32 channels) share two tiles of rows and two of weights, so that loads do not limit it.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "target.h"

namespace requant::REQUANT_TARGET {

constexpr int kPanel = 2 * kLanes;     // output channels of a panel
constexpr int64_t kDepth = 64;         // rows are padded to a multiple of this many bytes
constexpr int64_t kPatches = 1 << 17;  // bytes of the rows of one task, about: they stay in the second cache
constexpr int kTile = 16;              // rows of a tile
constexpr int kRows = 2 * kTile;       // rows of one product
constexpr int64_t kPanelRow = 4 * kPanel;  // bytes of a panel for four bytes of a row

// The shapes of the eight tiles, as the instruction reads them.
struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {kTile, kTile, kTile, kTile, kTile, kTile, kTile, kTile};
};

// A thread has tiles while this exists. Other code that uses tiles sets its own shapes.
class Multiplier {
 public:
  Multiplier() {
    const Shapes shapes;
    _tile_loadconfig(&shapes);
  }
  ~Multiplier() { _tile_release(); }
  Multiplier(const Multiplier&) = delete;
  Multiplier& operator=(const Multiplier&) = delete;
};

// Multiplies up to 32 rows by a panel: sums is (32, kPanel).
//
//   rows, count, stride: the first row, their number, and the bytes from one to the next
//   w, quads: the panel: for each four bytes of a row the four weights of each channel; `quads` is a multiple of 16
//
// All 16 or 32 rows are read; sums of rows behind `count` have no meaning.
inline void multiply_tiles(const uint8_t* rows, int64_t count, int64_t stride, const uint8_t* w, int64_t quads, int32_t* sums) {
  const bool both = count > kTile;
  const uint8_t* below = rows + (both ? kTile * stride : 0);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t quad = 0; quad < quads; quad += kTile, rows += kDepth, below += kDepth, w += kTile * kPanelRow) {
    _tile_loadd(4, rows, stride);
    _tile_loadd(6, w, kPanelRow);
    _tile_loadd(7, w + kDepth, kPanelRow);
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    if (!both) continue;
    _tile_loadd(5, below, stride);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
  constexpr int kSumsRow = sizeof(int32_t) * kPanel;
  _tile_stored(0, sums, kSumsRow);
  _tile_stored(1, sums + kLanes, kSumsRow);
  if (both) {
    _tile_stored(2, sums + kTile * kPanel, kSumsRow);
    _tile_stored(3, sums + kTile * kPanel + kLanes, kSumsRow);
  }
}

}  // namespace requant::REQUANT_TARGET
