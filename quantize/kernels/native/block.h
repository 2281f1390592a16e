// Where the patches of some results are, and where the results go.
#pragma once

#include "finish.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

// Distances in bytes, or numbers, by axis of the image.
struct Step {
  int64_t down, across;
};

// Rows and columns of results. A patch is some runs of neighbouring bytes; those of neighbouring results begin the same
// number of bytes apart.
struct Block {
  int64_t rows, columns;
  const uint8_t* patch;  // of the first result
  Step patches;          // from a patch to the next
  Step runs, count;      // from a run of a patch to the next, and how many there are
  int64_t quads;         // of a run; the bytes behind it are read too, and their weights are 0
  Place place;           // of the first result
  Step results;          // from a result to the next
  int64_t channel = 1;   // from a channel of a result to the next
  bool fetched = false;  // whether the residual comes from memory
  bool cold = false;     // whether the weights do

  const uint8_t* patch_at(int64_t row, int64_t column) const {
    return patch + row * patches.down + column * patches.across;
  }

  Place place_at(int64_t row, int64_t column, const Panel& panel) const {
    const int64_t at = row * results.down + column * results.across + panel.channel * channel;
    return {place.to + at, place.residual ? place.residual + at : nullptr};
  }
};

}  // namespace requant::REQUANT_TARGET
