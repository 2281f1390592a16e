// The kernels of one instruction set. The file that includes this defines REQUANT_TARGET and includes its vectors first.
#pragma once

#include "attention.h"
#include "block_rows.h"
#include "dense.h"
#include "depthwise.h"
#include "few_queries.h"
#include "float_panel.h"
#include "gates.h"
#include "interpolation.h"
#include "lines.h"
#include "moments.h"
#include "normalization.h"
#include "pair.h"
#include "pixels.h"
#include "pool.h"
#include "product_vector.h"
#include "rows.h"
#include "softmax_classes.h"

namespace requant::REQUANT_TARGET {

inline std::unique_ptr<ConvolutionKernel> dense(Convolution made) {
  return std::make_unique<Dense<InVectors>>(std::move(made));
}

inline std::unique_ptr<ConvolutionKernel> depthwise(Convolution made) { return std::make_unique<Depthwise>(std::move(made)); }

inline std::unique_ptr<ConvolutionKernel> convolution(Convolution made) {
  if (made.depthwise()) return with_one_row(std::move(made), depthwise);
  return with_few_outputs(std::move(made), kLanes, dense);
}

inline std::unique_ptr<MatrixKernel> matrix(Matrix made) { return std::make_unique<Rows<InVectors>>(std::move(made)); }

inline std::unique_ptr<MatrixKernel> block_matrix(const BlockMatrix& made) {
  return std::make_unique<BlockRows<kPanelVectors>>(made);
}

}  // namespace requant::REQUANT_TARGET
