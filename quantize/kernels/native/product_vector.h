// Products of patches and panels of weights, in vectors. All sums of some neighbouring pixels stay in registers.
//
// The file that includes this has included `add_products` of its instruction set.
#pragma once

#include <algorithm>

#include "block.h"
#include "border.h"
#include "finish.h"
#include "threads.h"

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
    // where one row of results follows the other, pixels of both are computed together
    const bool flat = block_.results.down == block_.columns * block_.results.across;
    const int64_t lines = flat ? 1 : block_.rows, pixels = flat ? block_.rows * block_.columns : block_.columns;
    const int64_t steps = divided(pixels, kRows), few = pixels / steps, more = pixels % steps;
    const int64_t fetching = block_.cold && lines * steps >= Vectors ? Vectors : 0;
    for (int64_t line = 0; line < lines; ++line) {
      Pixel pixel{block_.patch_at(line, 0) + panel.input, block_.place_at(line, 0, panel), block_.columns};
      for (int64_t step = 0; step < steps; ++step) {  // steps of equal length, or one more
        const int64_t pass = line * steps + step;
        multiply_rows<kRows, Vectors>(few + (step < more), pixel, panel, pass < fetching ? beyond<Vectors>(pass) : 0);
      }
    }
  }

  // Weights that come from memory are fetched while those of the panel before them are multiplied: each of its first passes
  // fetches one vector of each quad. Returns the bytes from the weights of a pass to those that it fetches.
  template <int Vectors>
  int64_t beyond(int64_t pass) const {
    return (Vectors * block_.quads * block_.count.down * block_.count.across + pass) * kBytes;
  }

  // The next result: its patch, its place, and how many results its row has from it on.
  struct Pixel {
    const uint8_t* patch;
    Place place;
    int64_t left;
  };

  // The number of rows becomes a constant.
  template <int Rows, int Vectors>
  void multiply_rows(int64_t rows, Pixel& pixel, const Panel& panel, int64_t beyond) const {
    if constexpr (Rows > 1)
      if (rows < Rows) return multiply_rows<Rows - 1, Vectors>(rows, pixel, panel, beyond);
    const Place place = pixel.place;
    const uint8_t* x[Rows];
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
      x[i] = pixel.patch;
      pixel.patch += block_.patches.across;
      if (--pixel.left > 0) continue;
      pixel.patch += block_.patches.down - block_.columns * block_.patches.across;
      pixel.left = block_.columns;
    }
    pixel.place.to += Rows * block_.results.across;
    if (place.residual != nullptr) pixel.place.residual += Rows * block_.results.across;
    if constexpr (kHasNarrow)
      if (panel.narrow) return product<true, Vectors>(x, panel, place, beyond);
    product<false, Vectors>(x, panel, place, beyond);
  }

  // Multiplies the patches of some neighbouring pixels by a panel.
  template <bool Narrow, int Vectors, int Rows>
  void product(const uint8_t* const (&x)[Rows], const Panel& panel, const Place& place, int64_t beyond) const {
    Ints sum[Rows][Vectors];
#pragma unroll
    for (int row = 0; row < Rows; ++row)
#pragma unroll
      for (int vector = 0; vector < Vectors; ++vector) sum[row][vector] = load_ints(panel.start + vector * kLanes);
    if (Vectors == kPanelVectors && beyond > 0) {  // narrow panels are few
      add_runs<Narrow, Vectors == kPanelVectors>(sum, x, panel, beyond);
    } else {
      add_runs<Narrow, false>(sum, x, panel, 0);
    }
    finish_.write(sum, panel, place);
  }

  template <bool Narrow, bool Cold, int Rows, int Vectors>
  REQUANT_INLINE void add_runs(Ints (&sum)[Rows][Vectors], const uint8_t* const (&x)[Rows], const Panel& panel,
                               int64_t beyond) const {
    const uint8_t* w = panel.weights;
    for (int64_t down = 0; down < block_.count.down; ++down)
      for (int64_t across = 0; across < block_.count.across; ++across) {
        const int64_t at = down * block_.runs.down + across * block_.runs.across;
        add_products<Narrow, Cold>(sum, x, at, w, block_.quads, beyond);
      }
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

  // Returns the products of one task, about, in a convolution with `all`. Three tasks on two threads would take as long as four.
  static int64_t work(int64_t all) {
    constexpr int64_t kTasks = 16;
    return has_several_threads() ? std::clamp<int64_t>(all / kTasks, kWork / 4, kWork) : kWork;
  }

  // Returns the pixels of a task with some products of a flat convolution: their bytes stay in the nearest cache.
  static int64_t pixels(int64_t inputs, int64_t outputs, int64_t work) {
    constexpr int64_t kBlock = 1 << 16;
    return std::clamp<int64_t>(std::min(kBlock / inputs, work / (outputs * inputs)), 24, 96);
  }
};

}  // namespace requant::REQUANT_TARGET
