// The kernels of one instruction set. The file that includes this defines REQUANT_TARGET and includes its vectors and
// its `Dense` first.
#pragma once

#include "depthwise.h"
#include "pair.h"
#include "pool.h"

namespace requant::REQUANT_TARGET {

inline std::unique_ptr<ConvolutionKernel> convolution(Convolution made) {
  if (made.depthwise()) return std::make_unique<Depthwise>(std::move(made));
  return std::make_unique<Dense>(std::move(made));
}

}  // namespace requant::REQUANT_TARGET
