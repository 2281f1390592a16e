// Pixels of an image in uint8, from planes of floats.
#pragma once

#include <algorithm>
#include <cstring>

#include "scaled.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

// How values are rounded: rint(x / scale). A division takes longer than all the rest, so that quotients are products that are
// corrected: with the rounded inverse of the scale, the second correction gives the rounded quotient (Markstein, Computation
// of elementary functions on the IBM RISC System/6000 processor, 1990).
class PlaneRounding {
 public:
  explicit PlaneRounding(const Planes& planes)
      : scale_(planes.scale),
        inverse_(1 / planes.scale),
        least_(static_cast<float>(-planes.zero)),
        most_(static_cast<float>(255 - planes.zero)) {}

  // Returns integers, clipped so that the zero point makes them bytes.
  Floats operator()(Floats x) const {
    const Floats inverse = fill_floats(inverse_), negative = fill_floats(-scale_);
    x = bounded(x, (least_ - 1) * scale_, (most_ + 1) * scale_);  // a little further than the results: infinities have none
    Floats quotient = times(x, inverse);
#pragma unroll
    for (int i = 0; i < 2; ++i) quotient = times_plus(times_plus(quotient, negative, x), inverse, quotient);
    return floats(rounded(quotient, least_, most_));
  }

 private:
  float scale_, inverse_, least_, most_;
};

// Writes `count` pixels. The bytes of a pixel are those of an integer below 2^24.
template <int Channels>
void write_pixels(const float* from, int64_t count, const Planes& planes, uint8_t* to) {
  const PlaneRounding rounding(planes);
  const Floats zero = fill_floats(static_cast<float>(planes.zero));
  for (int64_t first = 0; first < count; first += kLanes) {
    const int64_t some = std::min<int64_t>(kLanes, count - first);
    Floats pixels = fill_floats(0);
#pragma unroll
    for (int c = 0; c < Channels; ++c) {
      const float* plane = from + c * planes.step + first;
      const Floats value = rounding(some == kLanes ? load_floats(plane) : load_few(plane, some));
      pixels = times_plus(plus(value, zero), fill_floats(static_cast<float>(1 << (8 * c))), pixels);
    }
    alignas(64) int32_t whole[kLanes];
    store_ints(whole, nearest(pixels));
    if ((count - first - kLanes) * Channels >= 4 - Channels) {  // four bytes each: the next pixel's too
#pragma unroll
      for (int p = 0; p < kLanes; ++p) std::memcpy(to + (first + p) * Channels, &whole[p], 4);
    } else {
      for (int64_t p = 0; p < some; ++p) std::memcpy(to + (first + p) * Channels, &whole[p], Channels);
    }
  }
}

// to[p, c] = clip(rint(from[c, p] / scale) + zero, 0, 255) for `count` pixels p, with as many channels as there are planes: one,
// two or three.
inline void quantize_pixels(const float* from, int64_t count, const Planes& planes, uint8_t* to) {
  switch (planes.channels) {
    case 1: return write_pixels<1>(from, count, planes, to);
    case 2: return write_pixels<2>(from, count, planes, to);
    default: write_pixels<3>(from, count, planes, to);
  }
}

}  // namespace requant::REQUANT_TARGET
