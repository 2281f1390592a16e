// Products of patches and panels of weights, in the matrix tiles of AMX.
//
// A tile has up to 16 rows of 64 bytes. One instruction multiplies the rows of a tile by 64 x 16 weights, and adds to as many
// rows of 16 sums; it takes as many cycles as the first tile has rows. Four tiles of sums (32 patches by 32 channels) share two
// tiles of patches and two of weights, so that loads do not limit it. A sum is ready for the next instruction after 52 cycles:
// four tiles with fewer than 14 rows take as long as with 14.
//
// The rows of a tile are patches of neighbouring results, which are read where they are. Where the rows of the image are short,
// a tile goes on in the next one: the patches between two rows of results are multiplied too, and their sums are not used.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "product_vector.h"
#include "threads.h"

namespace requant::REQUANT_TARGET {

constexpr int kTile = 16;       // rows of a tile
constexpr int64_t kDepth = 64;  // bytes of a row of a tile

// The shapes of the eight tiles, as the instruction reads them.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};
};

// A run has steps of equal length, of a row of a tile at most.
inline int64_t steps_of(int64_t run) { return divided(run, kDepth); }
inline int64_t quads_of_step(int64_t run) { return divided(run, 4 * steps_of(run)); }

class TileProduct {
 public:
  TileProduct(const Finish& finish, const Block& block) : finish_(finish), block_(block), vector_(finish, block) {
    in_vectors_ = block.rows * block.columns < kFew;
    if (in_vectors_) return;
    step_ = quads_of_step(4 * block.quads);
    steps_ = block.quads / step_;
    divide();
    find_segments();
    configure();
  }
  ~TileProduct() {
    if (!in_vectors_) _tile_release();
  }
  TileProduct(const TileProduct&) = delete;
  TileProduct& operator=(const TileProduct&) = delete;

  // Multiplies all patches by some panels, and writes the results.
  void multiply(const Panel* panels, int64_t count) {
    if (in_vectors_) return vector_.multiply(panels, count);
    for (int64_t index = 0; index < count; ++index) multiply_panel<kPanelVectors>(panels[index]);
  }

 private:
  static constexpr int kFew = 2;              // results: for fewer, vectors are faster
  static constexpr int64_t kAhead = 4096;     // bytes from the weights of the next step to those that are fetched
  static constexpr int64_t kFewestRows = 14;  // of a tile, which take as long as fewer

  // Neighbouring results in a pair of tiles: where the first one is, the row of its sums, and how many there are.
  struct Segment {
    int64_t row, column;
    int sums, count;
  };

  // Returns a measure of how long tiles take to multiply patches, `length` of which are divided evenly into tiles.
  static int64_t cycles(int64_t tiles, int64_t length) {
    return divided(tiles, 2) * std::max<int64_t>(divided(length, divided(length, kTile)), kFewestRows);
  }

  // Divides the results into tiles: along each row, or along all rows at once if that takes fewer cycles.
  void divide() {
    const int64_t across = block_.patches.across, between = block_.patches.down / across;
    const int64_t whole = (block_.rows - 1) * between + block_.columns;
    const int64_t apart = cycles(divided(block_.columns, kTile) * block_.rows, block_.columns);
    const bool even = between * across == block_.patches.down && between >= block_.columns;
    const bool joined = even && cycles(divided(whole, kTile), whole) < apart;
    strips_ = joined ? 1 : block_.rows;
    length_ = joined ? whole : block_.columns;
    pitch_ = joined ? between : block_.columns;
    tiles_ = divided(length_, kTile);
    rows_ = static_cast<int>(divided(length_, tiles_));
  }

  // A thread has tiles from here on: 0 to 3 are sums, 4 and 5 patches, 6 and 7 weights.
  void configure() const {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) {
      shapes.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows_ : step_);
      shapes.bytes[tile] = static_cast<uint16_t>(tile == 4 || tile == 5 ? 4 * step_ : kDepth);
    }
    _tile_loadconfig(&shapes);
  }

  // Returns a list that keeps its memory. It is asked for once: the way to what belongs to a thread is long.
  template <class T>
  static std::vector<T>& of_thread() {
    static thread_local std::vector<T> list;
    return list;
  }

  // Finds the results of each pair of tiles, without the patches between two rows of results.
  void find_segments() {
    segments_.clear();
    begins_.clear();
    for (int64_t index = 0; index < strips_ * tiles_; ++index) {
      const int place = static_cast<int>(index % 2) * kTile;
      if (place == 0) begins_.push_back(segments_.size());
      const int64_t first = first_of(index), end = first + rows_;
      for (int64_t at = index % tiles_ * rows_; at < end;) {
        const int64_t column = at % pitch_, count = std::min(block_.columns - column, end - at);
        if (count > 0)
          add_segment({index / tiles_ + at / pitch_, column, place + static_cast<int>(at - first), static_cast<int>(count)});
        at += count > 0 ? count : pitch_ - column;
      }
    }
    begins_.push_back(segments_.size());
  }

  // The tiles of a pair may be neighbours.
  void add_segment(const Segment& segment) {
    if (segments_.size() > begins_.back()) {
      Segment& last = segments_.back();
      if (last.row == segment.row && last.column + last.count == segment.column && last.sums + last.count == segment.sums) {
        last.count += segment.count;
        return;
      }
    }
    segments_.push_back(segment);
  }

  // Returns the first patch of a tile in its strip. The last tile begins earlier, and does not write what it computes again.
  int64_t first_of(int64_t index) const { return std::min(index % tiles_ * rows_, length_ - rows_); }

  const uint8_t* patch(int64_t index, const Panel& panel) const {
    return block_.patch_at(index / tiles_, first_of(index)) + panel.input;
  }

  // Multiplies all patches by a panel: a pair of tiles at a time. The results of a pair are written while the next one is
  // computed.
  template <int Vectors>  // 1, 2 or 4
  void multiply_panel(const Panel& panel) {
    if constexpr (Vectors > 1)
      if (panel.vectors < Vectors) return multiply_panel<Vectors / 2>(panel);
    finish_.with_writer<Vectors>(panel, block_.place.residual == nullptr, [&](const auto& write) {
      const auto write_pair = [&](int64_t pair) __attribute__((always_inline)) {
        for (size_t i = begins_[pair]; i < begins_[pair + 1]; ++i) {
          const Segment& each = segments_[i];
          write(sums_ + each.sums * Vectors * kLanes, each.count, block_.place_at(each.row, each.column, panel));
        }
      };
      const int64_t all = strips_ * tiles_, pairs = divided(all, 2);
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const bool both = 2 * pair + 1 < all;
        const uint8_t *one = patch(2 * pair, panel), *other = both ? patch(2 * pair + 1, panel) : nullptr;
        if (block_.fetched && pair + 1 < pairs) fetch_residual(pair + 1, panel);
        multiply_any<Vectors, 0>(one, other, panel, pair == 0);
        if (pair > 0) write_pair(pair - 1);
        store_pair<Vectors, 0>(both);
        if constexpr (Vectors > 2) {
          multiply_any<Vectors, 2>(one, other, panel, pair == 0);
          store_pair<Vectors, 2>(both);
        }
      }
      write_pair(pairs - 1);
    });
  }

  // Fetches the residual of a pair. Patches come fast enough: fetching them gains nothing.
  void fetch_residual(int64_t pair, const Panel& panel) const {
    for (size_t i = begins_[pair]; i < begins_[pair + 1]; ++i) {
      const Segment& each = segments_[i];
      const uint8_t* from = block_.place_at(each.row, each.column, panel).residual;
      for (int row = 0; row < each.count; ++row, from += block_.results.across) __builtin_prefetch(from, 0, 3);
    }
  }

  // The first pair of a panel fetches its weights into the nearest cache, ahead of the tiles: they come from afar. Later pairs
  // find them near, and fetching would cost them time.
  template <int Vectors, int First>
  REQUANT_INLINE void multiply_any(const uint8_t* one, const uint8_t* other, const Panel& panel, bool first) const {
    first ? multiply_pair<Vectors, First, true>(one, other, panel) : multiply_pair<Vectors, First, false>(one, other, panel);
  }

  // Multiplies one or two tiles of patches by one or two vectors of a panel. Sums begin with the bias.
  template <int Vectors, int First, bool Fetches>
  REQUANT_INLINE void multiply_pair(const uint8_t* one, const uint8_t* other, const Panel& panel) const {
    constexpr bool kWide = Vectors - First > 1;
    const int32_t* start = panel.start + First * kLanes;
    _tile_loadd(0, start, 0);
    if (kWide) _tile_loadd(1, start + kLanes, 0);
    if (other) _tile_loadd(2, start, 0);
    if (kWide && other) _tile_loadd(3, start + kLanes, 0);
    const uint8_t* w = panel.weights + First * kBytes;
    for (int64_t down = 0; down < block_.count.down; ++down)
      for (int64_t across = 0; across < block_.count.across; ++across) {
        const int64_t at = down * block_.runs.down + across * block_.runs.across;
        w = other ? add_run_of_two<Vectors, kWide, Fetches>(one + at, other + at, w) : add_run<Vectors, kWide>(one + at, w);
      }
  }

  // Adds the products of a run of two tiles of patches, and returns the weights behind it. The tiles of the next step are loaded
  // between the products of this one: each is free as soon as its last product has begun.
  template <int Vectors, bool Wide, bool Fetches>
  REQUANT_INLINE const uint8_t* add_run_of_two(const uint8_t* one, const uint8_t* other, const uint8_t* w) const {
    constexpr int64_t kRow = Vectors * kBytes;  // of weights, for four bytes of a patch
    const int64_t across = block_.patches.across, patch = 4 * step_, weights = step_ * kRow;
    _tile_loadd(4, one, across);
    _tile_loadd(6, w, kRow);
    _tile_loadd(5, other, across);
    if (Wide) _tile_loadd(7, w + kBytes, kRow);
    for (int64_t left = steps_ - 1; left > 0; --left) {
      one += patch;
      other += patch;
      w += weights;
      if (Fetches) fetch<Vectors, Wide>(w + kAhead);
      _tile_dpbusd(0, 4, 6);
      if (Wide) _tile_dpbusd(1, 4, 7);
      _tile_loadd(4, one, across);
      _tile_dpbusd(2, 5, 6);
      _tile_loadd(6, w, kRow);
      if (Wide) _tile_dpbusd(3, 5, 7);
      _tile_loadd(5, other, across);
      if (Wide) _tile_loadd(7, w + kBytes, kRow);
    }
    _tile_dpbusd(0, 4, 6);
    if (Wide) _tile_dpbusd(1, 4, 7);
    _tile_dpbusd(2, 5, 6);
    if (Wide) _tile_dpbusd(3, 5, 7);
    return w + weights;
  }

  // Adds the products of a run of one tile of patches, and returns the weights behind it.
  template <int Vectors, bool Wide>
  REQUANT_INLINE const uint8_t* add_run(const uint8_t* one, const uint8_t* w) const {
    constexpr int64_t kRow = Vectors * kBytes;
    const int64_t patch = 4 * step_, weights = step_ * kRow;
    for (int64_t left = steps_; left > 0; --left, one += patch, w += weights) {
      _tile_loadd(4, one, block_.patches.across);
      _tile_loadd(6, w, kRow);
      _tile_dpbusd(0, 4, 6);
      if (Wide) _tile_loadd(7, w + kBytes, kRow);
      if (Wide) _tile_dpbusd(1, 4, 7);
    }
    return w;
  }

  // Fetches the weights of a step.
  template <int Vectors, bool Wide>
  REQUANT_INLINE static void fetch(const uint8_t* w) {
#pragma unroll 2
    for (int row = 0; row < kTile; ++row, w += Vectors * kBytes) {
      __builtin_prefetch(w, 0, 3);
      if (Wide) __builtin_prefetch(w + kBytes, 0, 3);
    }
  }

  template <int Vectors, int First>
  REQUANT_INLINE void store_pair(bool both) {
    constexpr bool kWide = Vectors - First > 1;
    constexpr int64_t kRow = Vectors * kBytes;  // of sums
    int32_t *above = sums_ + First * kLanes, *below = above + kTile * Vectors * kLanes;
    _tile_stored(0, above, kRow);
    if (kWide) _tile_stored(1, above + kLanes, kRow);
    if (both) _tile_stored(2, below, kRow);
    if (kWide && both) _tile_stored(3, below + kLanes, kRow);
  }

  const Finish& finish_;
  const Block& block_;
  VectorProduct<kFew - 1> vector_;
  bool in_vectors_;
  int64_t step_ = 0, steps_ = 0;     // quads of a row of a tile; steps of a run
  int64_t strips_ = 0, length_ = 0;  // tiles go on along a strip of so many patches
  int64_t pitch_ = 0;                // patches of a strip from one row of results to the next
  int64_t tiles_ = 0;                // of a strip
  int rows_ = 0;                     // of a tile
  alignas(64) int32_t sums_[2 * kTile * kPanelVectors * kLanes];
  std::vector<Segment>& segments_ = of_thread<Segment>();
  std::vector<size_t>& begins_ = of_thread<size_t>();  // where the segments of a pair begin
};

struct InTiles {
  using Product = TileProduct;

  static constexpr int64_t kWork = 1 << 25;  // products of one task, about
  static constexpr bool kThin = true;        // whether patches of one pixel are copied, so that they are neighbours

  // Whether tiles are faster than vectors: a step takes as long as about three quads in vectors.
  static bool suits(const Convolution& conv) {
    return conv.runs() * (quads(conv.run_bytes()) - 3 * steps_of(conv.run_bytes())) > 3;
  }

  // Returns the quads of a run of so many bytes.
  static int64_t quads(int64_t run) { return steps_of(run) * quads_of_step(run); }

  // Returns the vectors of the next panel, for patches of so many bytes. The results of four are a cache line, but the weights
  // of a panel should stay in the nearest cache. Narrow panels come first, see `panel_of_vectors`.
  static int64_t vectors(int64_t left, int64_t patch) {
    const int64_t most = patch > 256 ? 2 : 4;
    return left % 2 ? 1 : left % most ? 2 : most;
  }

  // Returns the products of one task, about. A thread that waits for another one loses more than small tasks cost.
  static int64_t work(int64_t) { return has_several_threads() ? kWork / 8 : kWork; }

  // Returns the pixels of a task with some products of a flat convolution: they and their results stay in the second cache.
  static int64_t pixels(int64_t inputs, int64_t outputs, int64_t work) {
    constexpr int64_t kBlock = 1 << 17;
    return std::clamp<int64_t>(std::min(kBlock / (inputs + outputs), work / (outputs * inputs)), 2 * kTile, 2048);
  }
};

}  // namespace requant::REQUANT_TARGET
