// Weights that are packed together, and where the results of their channels go.
#pragma once

#include <algorithm>
#include <cstdint>

#include "target.h"

namespace requant::REQUANT_TARGET {

// Some output channels: a few vectors of them, whose weights are packed together.
struct Panel {
  int64_t channel = 0;  // the first one
  int64_t input = 0;    // the first input channel of their group
  int64_t last = 0;     // where the last vector begins behind it: an earlier one may have some of its channels
  int64_t bytes = 0;    // of a vector: fewer than kLanes in a convolution with fewer channels
  int vectors = 0;
  bool even = false;    // whether the vectors follow each other
  bool narrow = true;   // whether `dot_narrow` is exact
  const int32_t* start = nullptr;     // by lane: what the sums begin with
  const float* multiplier = nullptr;  // by lane
  const uint8_t* weights = nullptr;

  int64_t offset(int vector, int vectors) const { return vector + 1 < vectors ? vector * kLanes : last; }
};

// Returns a panel of some vectors of `width` channels, from vector `first` on. The last vector of all begins earlier, so that it
// is full, if there are enough channels. It must not be alone: the results that it writes again may have replaced the residual,
// and a panel reads all that it adds to a pixel first.
inline Panel panel_of_vectors(int64_t width, int64_t first, int vectors) {
  Panel panel;
  panel.channel = first * kLanes;
  panel.bytes = std::min<int64_t>(kLanes, width);
  panel.last = (vectors - 1) * kLanes;
  if (first + vectors == divided(width, kLanes)) panel.last = std::max<int64_t>(0, width - kLanes) - first * kLanes;
  panel.even = panel.last == (vectors - 1) * kLanes && panel.bytes == kLanes;
  panel.vectors = vectors;
  return panel;
}

// The results of neighbouring pixels: `to` and `residual` are those of the first channel of a panel in the first one.
struct Place {
  uint8_t* to;
  const uint8_t* residual;  // or null
};

}  // namespace requant::REQUANT_TARGET
