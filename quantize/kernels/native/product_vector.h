// Products of patches and panels of weights, in vectors. All sums of some neighbouring pixels stay in registers.
//
// The file that includes this has included `add_products` of its instruction set.
#pragma once

#include <algorithm>

#include "block.h"
#include "border.h"
#include "finish.h"

namespace requant::REQUANT_TARGET {

// `MostRows`: results that are computed together, at most; there may be fewer for wide panels.
template <int MostRows = 64>
class VectorProduct {
 public:
  VectorProduct(const Finish& finish, const Block& block) : finish_(finish), block_(block) {}

  // Multiplies all patches by some panels, and writes the results.
  void multiply(const Panel* panels, int64_t count) const {
    for (int64_t index = 0; index < count; ++index) multiply_panel<kPanelVectors>(panels[index]);
  }

 private:
  // The number of vectors becomes a constant, so that the sums stay in registers.
  template <int Vectors>
  void multiply_panel(const Panel& panel) const {
    if constexpr (Vectors > 1)
      if (panel.vectors < Vectors) return multiply_panel<Vectors / 2>(panel);
    constexpr int kRows = std::min(panel_rows(Vectors), MostRows);
    const int64_t steps = divided(block_.columns, kRows), few = block_.columns / steps, more = block_.columns % steps;
    for (int64_t row = 0; row < block_.rows; ++row)
      for (int64_t step = 0, column = 0; step < steps; ++step) {  // steps of equal length, or one more
        const int64_t rows = few + (step < more);
        const uint8_t* x = block_.patch_at(row, column) + panel.input;
        multiply_rows<kRows, Vectors>(rows, x, panel, block_.place_at(row, column, panel));
        column += rows;
      }
  }

  // The number of rows becomes a constant.
  template <int Rows, int Vectors>
  void multiply_rows(int64_t rows, const uint8_t* x, const Panel& panel, const Place& place) const {
    if constexpr (Rows > 1)
      if (rows < Rows) return multiply_rows<Rows - 1, Vectors>(rows, x, panel, place);
    if constexpr (kHasNarrow)
      if (panel.narrow) return product<true, Rows, Vectors>(x, panel, place);
    product<false, Rows, Vectors>(x, panel, place);
  }

  // Multiplies the patches of some neighbouring pixels by a panel.
  template <bool Narrow, int Rows, int Vectors>
  void product(const uint8_t* x, const Panel& panel, const Place& place) const {
    Ints sum[Rows][Vectors];
#pragma unroll
    for (int row = 0; row < Rows; ++row)
#pragma unroll
      for (int vector = 0; vector < Vectors; ++vector) sum[row][vector] = load_ints(panel.start + vector * kLanes);
    const uint8_t* w = panel.weights;
    for (int64_t down = 0; down < block_.count.down; ++down, x += block_.runs.down)
      for (int64_t across = 0; across < block_.count.across; ++across)
        add_products<Narrow>(sum, x + across * block_.runs.across, block_.patches.across, w, block_.quads);
    finish_.write(sum, panel, place);
  }

  const Finish& finish_;
  const Block& block_;
};

struct InVectors {
  using Product = VectorProduct<>;

  static constexpr int64_t kWork = 1 << 21;  // products of one task, about
  static constexpr bool kThin = false;       // whether patches of one pixel are copied, so that they are neighbours

  // Returns the quads of a run of so many bytes.
  static int64_t quads(int64_t run) { return divided(run, 4); }

  // Returns the vectors of the next panel: 1, 2 or 4. Narrow panels come first, see `panel_of_vectors`.
  static int64_t vectors(int64_t left, int64_t) { return left % 2 ? 1 : left % kPanelVectors ? 2 : kPanelVectors; }

  static int64_t work() { return kWork; }

  // Returns the pixels of one task of a flat convolution: their bytes stay in the nearest cache.
  static int64_t pixels(int64_t inputs, int64_t outputs) {
    constexpr int64_t kBlock = 1 << 16;
    return std::clamp<int64_t>(std::min(kBlock / inputs, kWork / (outputs * inputs)), 24, 96);
  }
};

}  // namespace requant::REQUANT_TARGET
