// The exponential, exact to the last bits of float.
#pragma once

#include "scaled.h"

namespace requant::REQUANT_TARGET {

constexpr float kMostExponent = 87;

// Returns e^x for x <= kMostExponent, to 2e-7 of it, and 0 for x < -87.7. e^x = 2^n e^rest, where |rest| is at most half of
// ln 2; the polynomial is the one of expf in Cephes. NaN stays NaN.
REQUANT_INLINE Floats exponential(Floats x) {
  constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kTerms[] = {1.0f,           1.0f,           5.0000001201e-1f, 1.6666665459e-1f, 4.1665795894e-2f,
                              8.3334519073e-3f, 1.3981999507e-3f, 1.9875691500e-4f};
  const Floats inside = larger(fill_floats(-127 * kLn2High), x);  // the second one, if it is NaN
  const Ints whole = nearest(times(inside, fill_floats(kLog2E)));
  Floats rest = times_plus(floats(whole), fill_floats(-kLn2High), inside);
  rest = times_plus(floats(whole), fill_floats(-kLn2Low), rest);
  Floats sum = fill_floats(kTerms[7]);
#pragma unroll
  for (int i = 6; i >= 0; --i) sum = times_plus(sum, rest, fill_floats(kTerms[i]));
  return times(sum, power_of_two(whole));
}

}  // namespace requant::REQUANT_TARGET
