// Products of many rows and a constant matrix in blocks, in the matrix tiles of AMX.
//
// The scales of blocks would have to be applied between the products of integers. So the weights become bf16, a part of a panel
// at a time, and all rows are multiplied by them: their sums are float. Rows are bf16 too, which rounds less than 8 bits do.
//
// A tile has 16 rows of 32 values. It is kept as it is loaded, 1024 bytes one after the other. Four tiles of sums (32 rows by 32
// channels) share two tiles of rows and two of weights.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "block_rows.h"
#include "product_tiles.h"

namespace requant::REQUANT_TARGET {

class BlockTiles final : public BlockRows<2> {
 public:
  using BlockRows::BlockRows;

 protected:
  void multiply(const Part& part, const Parallel& parallel) const override {
    if (part.rows < kMany) return BlockRows::multiply(part, parallel);
    thread_local Scratch rows;
    const int64_t steps = divided(weights_.blocks() * weights_.size(), kStep), tiles = divided(part.rows, kTileRows);
    const auto& panels = weights_.panels();
    const Work work{part, rows.bytes(tiles * steps * kTileBytes), steps, tiles};
    parallel(static_cast<size_t>(tiles), [&](size_t tile) { round(work, static_cast<int64_t>(tile)); });
    const int64_t tasks = std::clamp<int64_t>(part.rows * inputs_ * outputs_ / kWorkOfTiles, 1, std::ssize(panels));
    const int64_t some = divided(std::ssize(panels), tasks);
    parallel(static_cast<size_t>(divided(std::ssize(panels), some)), [&](size_t index) {
      const int64_t begin = static_cast<int64_t>(index) * some, end = std::min(begin + some, std::ssize(panels));
      const Configured configured;
      thread_local Scratch scratch;
      const int64_t bytes = 2 * tiles * kTileBytes;  // of the sums of a panel
      uint8_t* const sums = steps > kSteps ? scratch.bytes((end - begin) * bytes) : nullptr;
      for (int64_t first = 0; first < steps; first += kSteps)
        for (int64_t panel = begin; panel < end; ++panel) {
          uint8_t* const own = sums ? sums + (panel - begin) * bytes : nullptr;
          multiply_panel(work, {panels[panel], own, first, std::min(kSteps, steps - first)});
        }
    });
  }

 private:
  static constexpr int64_t kMany = 32;              // rows: for fewer, vectors are faster
  static constexpr int64_t kStep = 32;              // inputs of a tile
  static constexpr int64_t kPart = 16;              // inputs of half a tile, which are in one block
  static constexpr int64_t kSteps = 64;             // so many steps of all rows, and of a panel, stay in the second cache
  static constexpr int kTiles = 8;
  static constexpr int64_t kTileRows = kTile;
  static constexpr int64_t kLine = kDepth;          // bytes of a row of a tile
  static constexpr int64_t kTileBytes = kTileRows * kLine;
  static constexpr int64_t kAhead = 2048;           // bytes from a tile to the one that is fetched for later
  static constexpr int64_t kCodesAhead = 1024;      // bytes from codes to those that are fetched for later
  static constexpr int64_t kWorkOfTiles = 1 << 25;  // products of one task, about

  // A thread has tiles as long as this: 0 to 3 are sums, 4 and 5 rows, 6 and 7 weights.
  struct Configured {
    Configured() {
      TileShapes shapes;
      std::fill_n(shapes.bytes, kTiles, kLine);
      std::fill_n(shapes.rows, kTiles, kTileRows);
      _tile_loadconfig(&shapes);
    }
    ~Configured() { _tile_release(); }
    Configured(const Configured&) = delete;
    Configured& operator=(const Configured&) = delete;
  };

  // Rows in tiles (tiles of rows, steps).
  struct Work {
    const Part& part;
    uint8_t* rows;
    int64_t steps, tiles;
  };

  // Some steps of a panel, and its sums so far (tiles of rows, 2); null if the steps are all of them.
  struct Piece {
    const Panel& panel;
    uint8_t* sums;
    int64_t first, steps;
  };

  // Returns the upper halves of two vectors of floats, rounded to nearest: for each lane that of `even`, then that of `odd`.
  static __m512i halves_of(__m512 even, __m512 odd) {
    const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
    const __m512i high = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(odd), half), upper);
    return _mm512_or_si512(high, low);
  }

  // Writes a tile of rows for all steps; the rows of the last one that are not there, and inputs behind the last one, are 0.
  void round(const Work& work, int64_t tile) const {
    const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
    for (int64_t row = 0; row < kTileRows; ++row) {
      uint8_t* to = work.rows + tile * work.steps * kTileBytes + row * kLine;
      const bool there = tile * kTileRows + row < work.part.rows;
      const float* const x = work.part.x + (tile * kTileRows + row) * inputs_;
      for (int64_t first = 0; first < work.steps * kStep; first += kStep, to += kTileBytes) {
        const int64_t left = there ? std::clamp<int64_t>(inputs_ - first, 0, kStep) : 0;
        const uint32_t mask = static_cast<uint32_t>((uint64_t{1} << left) - 1);
        const __m512 one = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), x + first);
        const __m512 two = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), x + first + kLanes);
        _mm512_storeu_si512(to, halves_of(_mm512_permutex2var_ps(one, evens, two), _mm512_permutex2var_ps(one, odds, two)));
      }
    }
  }

  // Multiplies all rows by some steps of a panel. The results are written behind the last step.
  void multiply_panel(const Work& work, const Piece& piece) const {
    thread_local Scratch scratch;
    uint8_t* const weights = scratch.bytes(piece.steps * piece.panel.vectors * kTileBytes);
    weights_.halves() ? unpack<true>(piece, weights) : unpack<false>(piece, weights);
    for (int64_t tile = 0; tile < work.tiles; tile += 2)
      if (piece.panel.vectors == 1) multiply_pair<1>(work, piece, weights, tile);
      else multiply_pair<2>(work, piece, weights, tile);
  }

  // Multiplies one or two tiles of rows.
  template <int Wide>
  void multiply_pair(const Work& work, const Piece& piece, const uint8_t* weights, int64_t tile) const {
    constexpr bool kWide = Wide > 1;
    const bool both = tile + 1 < work.tiles, last = piece.first + piece.steps == work.steps;
    alignas(64) uint8_t made[4 * kTileBytes];
    uint8_t* const sums = piece.sums ? piece.sums + 2 * tile * kTileBytes : nullptr;
    if (piece.first == 0) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(0, sums, kLine);
      if (kWide) _tile_loadd(1, sums + kTileBytes, kLine);
      if (both) _tile_loadd(2, sums + 2 * kTileBytes, kLine);
      if (kWide && both) _tile_loadd(3, sums + 3 * kTileBytes, kLine);
    }
    const uint8_t* const one = work.rows + (tile * work.steps + piece.first) * kTileBytes;
    both ? add_two<Wide>(one, one + work.steps * kTileBytes, weights, piece.steps) : add_one<Wide>(one, weights, piece.steps);
    uint8_t* const to = last ? made : sums;
    _tile_stored(0, to, kLine);
    if (kWide) _tile_stored(1, to + kTileBytes, kLine);
    if (both) _tile_stored(2, to + 2 * kTileBytes, kLine);
    if (kWide && both) _tile_stored(3, to + 3 * kTileBytes, kLine);
    if (last) write_tiles<Wide>(work, piece.panel, tile, made);
  }

  // Adds the products of two tiles of rows and the weights `w`, step by step. Tiles of later steps are fetched meanwhile.
  template <int Wide>
  REQUANT_INLINE static void add_two(const uint8_t* one, const uint8_t* other, const uint8_t* w, int64_t steps) {
    for (int64_t step = 0; step < steps; ++step, one += kTileBytes, other += kTileBytes, w += Wide * kTileBytes) {
      _tile_loadd(4, one, kLine);
      _tile_loadd(6, w, kLine);
      fetch(one + kAhead);
      _tile_dpbf16ps(0, 4, 6);
      if (Wide > 1) _tile_loadd(7, w + kTileBytes, kLine);
      fetch(w + Wide * kAhead);
      if (Wide > 1) _tile_dpbf16ps(1, 4, 7);
      if (Wide > 1) fetch(w + Wide * kAhead + kTileBytes);
      _tile_loadd(5, other, kLine);
      fetch(other + kAhead);
      _tile_dpbf16ps(2, 5, 6);
      if (Wide > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }

  // Fetches a tile into the nearest cache.
  REQUANT_INLINE static void fetch(const uint8_t* tile) {
#pragma unroll
    for (int64_t row = 0; row < kTileRows; ++row) __builtin_prefetch(tile + row * kLine, 0, 3);
  }

  // Adds those of one tile of rows.
  template <int Wide>
  REQUANT_INLINE static void add_one(const uint8_t* one, const uint8_t* w, int64_t steps) {
    for (int64_t step = 0; step < steps; ++step, one += kTileBytes, w += Wide * kTileBytes) {
      _tile_loadd(4, one, kLine);
      _tile_loadd(6, w, kLine);
      _tile_dpbf16ps(0, 4, 6);
      if (Wide > 1) _tile_loadd(7, w + kTileBytes, kLine);
      if (Wide > 1) _tile_dpbf16ps(1, 4, 7);
    }
  }

  // Writes the results of one or two tiles of rows.
  template <int Wide>
  void write_tiles(const Work& work, const Panel& panel, int64_t tile, const uint8_t* made) const {
    const int64_t first = tile * kTileRows, rows = std::min(2 * kTileRows, work.part.rows - first);
    for (int64_t row = 0; row < rows; ++row) {
      const uint8_t* const from = made + row / kTileRows * 2 * kTileBytes + row % kTileRows * kLine;
      Floats total[Wide];
      for (int vector = 0; vector < Wide; ++vector)
        total[vector] = load_floats(reinterpret_cast<const float*>(from + vector * kTileBytes));
      write<Wide>(total, work.part, first + row, panel);
    }
  }

  // Returns what the codes of a lane stand for, without the scale: `at` is their first bit. Of 4 bits the others have no effect.
  template <bool Halves>
  static __m512 weights_at(__m512i codes, int at) {
    const __m512i first = _mm512_srli_epi32(codes, static_cast<unsigned>(at));
    if (Halves) return _mm512_permutexvar_ps(first, _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7));
    const __m512i byte = _mm512_and_si512(first, _mm512_set1_epi32(255));
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(byte, _mm512_set1_epi32(128)));
  }

  // Returns two neighbouring weights of each channel, whose codes are 8 bits apart.
  template <bool Halves>
  static __m512i pair_at(__m512i codes, int at, __m512 scale) {
    const __m512 even = weights_at<Halves>(codes, at), odd = weights_at<Halves>(codes, at + 8);
    return halves_of(_mm512_mul_ps(even, scale), _mm512_mul_ps(odd, scale));
  }

  // Writes weights in tiles, (steps, vectors); inputs behind the last block are 0.
  template <bool Halves>
  void unpack(const Piece& piece, uint8_t* to) const {
    const int64_t wide = piece.panel.vectors, parts = weights_.size() / kPart, all = weights_.blocks() * parts;
    for (int64_t vector = 0; vector < wide; ++vector)
      for (int64_t part = 0; part < piece.steps * 2; ++part) {
        const int64_t whole = piece.first * 2 + part, block = whole / parts;
        uint8_t* const there = to + (part / 2 * wide + vector) * kTileBytes + part % 2 * kTileBytes / 2;
        if (whole >= all) {
          std::memset(there, 0, kTileBytes / 2);
          continue;
        }
        const uint8_t* const from = piece.panel.weights + block * weights_.bytes(piece.panel.vectors);
        const uint8_t* const codes = from + weights_.scales(piece.panel.vectors) + whole % parts * wide * codes_of_part();
        unpack_part<Halves>(codes + vector * kBytes, wide * kBytes, from + weights_.scales(static_cast<int>(vector)), there);
      }
  }

  // Returns the bytes of the codes of a part of a block, for one vector.
  int64_t codes_of_part() const { return kPart * kLanes / (weights_.halves() ? 2 : 1); }

  // Writes 16 inputs of a vector: half a tile.
  template <bool Halves>
  static void unpack_part(const uint8_t* codes, int64_t step, const uint8_t* scales, uint8_t* to) {
    const __m512 scale = _mm512_loadu_ps(scales);
#pragma unroll
    for (int load = 0; load < (Halves ? 2 : 4); ++load) {
      const __m512i some = _mm512_loadu_si512(codes + load * step);
      __builtin_prefetch(codes + load * step + kCodesAhead, 0, 2);
#pragma unroll
      for (int i = 0; i < (Halves ? 4 : 2); ++i, to += kLine)
        _mm512_storeu_si512(to, pair_at<Halves>(some, 16 * (i % 2) + 4 * (i / 2), scale));
    }
  }
};

}  // namespace requant::REQUANT_TARGET
