// Weights in blocks, in the order in which products read them, and rows that are rounded in blocks.
//
// A panel holds the weights of a few vectors of output channels: for each block the scales of all channels, then the codes.
// These stand in the order of `Packed`: quads, vectors, channels, the four of a quad. With 4 bits two quads share their bytes:
// the codes of the first one are the low ones.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "aligned.h"
#include "panel.h"
#include "rounded_rows.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

class BlockWeights {
 public:
  // `most`: the vectors of a panel; a panel has as many, or one.
  BlockWeights(const BlockMatrix& made, int most)
      : blocks_(made.blocks()), size_(made.size), halves_(made.bits == 4), zero_(made.zero()) {
    const int64_t vectors = divided(made.outputs, kLanes);
    bytes_.assign(vectors * blocks_ * bytes(1), 0);
    uint8_t* to = bytes_.data();
    for (int64_t first = 0; first < vectors;) {
      const int wide = vectors - first < most ? 1 : most;
      Panel panel = panel_of_vectors(made.outputs, first, wide);
      panel.weights = to;
      for (int64_t block = 0; block < blocks_; ++block, to += bytes(wide)) pack(made, panel, block, to);
      panels_.push_back(panel);
      first += wide;
    }
  }

  int64_t blocks() const { return blocks_; }
  int64_t size() const { return size_; }
  bool halves() const { return halves_; }  // whether a code has 4 bits
  int zero() const { return zero_; }
  const std::vector<Panel>& panels() const { return panels_; }

  // Returns the bytes of a block of so many vectors: its scales and its codes.
  int64_t bytes(int vectors) const { return vectors * (scales(1) + kLanes * size_ / (halves_ ? 2 : 1)); }

  // Returns the bytes of the scales of a block.
  static int64_t scales(int vectors) { return vectors * kLanes * static_cast<int64_t>(sizeof(float)); }

 private:
  void pack(const BlockMatrix& made, const Panel& panel, int64_t block, uint8_t* to) const {
    uint8_t* const codes = to + scales(panel.vectors);
    for (int vector = 0; vector < panel.vectors; ++vector)
      for (int64_t lane = 0; lane < panel.bytes; ++lane) {
        const int64_t o = panel.channel + panel.offset(vector, panel.vectors) + lane;
        std::memcpy(to + scales(vector) + lane * sizeof(float), made.scale + o * blocks_ + block, sizeof(float));
        const uint8_t* const from = made.codes + (o * blocks_ + block) * made.bytes();
        for (int64_t place = 0; place < made.bytes(); place += 4)
          pack_four(from + place, codes + (place / 4 * panel.vectors + vector) * kBytes + 4 * lane);
      }
  }

  // Writes four bytes: a quad of 8 bits, or two quads of 4 bits, where codes that were neighbours are not any more.
  void pack_four(const uint8_t* from, uint8_t* to) const {
    if (!halves_) {
      std::memcpy(to, from, 4);
      return;
    }
    for (int i = 0; i < 2; ++i) {
      to[2 * i] = static_cast<uint8_t>((from[i] & 15) | (from[i + 2] << 4));
      to[2 * i + 1] = static_cast<uint8_t>((from[i] >> 4) | (from[i + 2] & 0xf0));
    }
  }

  int64_t blocks_, size_;
  bool halves_;
  int zero_;
  Aligned<uint8_t> bytes_;
  std::vector<Panel> panels_;
};

// A row in blocks: its integers from -127 to 127, and for each block the size of a step and what a sum of products with codes
// begins with, so that the zero of the codes has no effect.
struct BlockRow {
  int8_t* integers;
  float* steps;
  int32_t* starts;
};

// Rounds a row of `count` floats in blocks, and fills up the last one with zeros.
inline void round_in_blocks(const float* x, int64_t count, const BlockWeights& weights, const BlockRow& row) {
  const int64_t size = weights.size();
  for (int64_t block = 0; block < weights.blocks(); ++block) {
    int8_t* const integers = row.integers + block * size;
    uint8_t* const bytes = reinterpret_cast<uint8_t*>(integers);
    const int64_t there = std::min(size, count - block * size);
    row.steps[block] = round_row_evenly(x + block * size, there, bytes);
    std::memset(bytes + there, 128, size - there);
    int32_t sum = 0;
    for (int64_t i = 0; i < size; ++i) sum += integers[i] = static_cast<int8_t>(bytes[i] - 128);
    row.starts[block] = (kOffset - weights.zero()) * sum;
  }
}

}  // namespace requant::REQUANT_TARGET
