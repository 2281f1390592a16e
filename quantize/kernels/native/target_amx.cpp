#define REQUANT_TARGET amx
#include "vector_avx512.h"
#include "rows_repeat.h"
#include "product_tiles.h"

#include "attention.h"
#include "block_tiles.h"
#include "cpu.h"
#include "dense.h"
#include "rows.h"

namespace requant {

extern const VectorKernels vectors_avx512;
extern const Target target_avx512, target_amx;

namespace amx {

// What tiles do not suit, the same processor computes in vectors.
std::unique_ptr<ConvolutionKernel> convolution(Convolution made) {
  if (made.depthwise() || !InTiles::suits(made)) return target_avx512.convolution(std::move(made));
  return std::make_unique<Dense<InTiles>>(std::move(made));
}

std::unique_ptr<MatrixKernel> matrix(Matrix made) { return std::make_unique<Rows<InTiles>>(std::move(made)); }

std::unique_ptr<MatrixKernel> block_matrix(const BlockMatrix& made) { return std::make_unique<BlockTiles>(made); }

}  // namespace amx

constinit const Target target_amx = {
    "amx", cpu::has_amx, amx::convolution, amx::matrix, amx::block_matrix,
    amx::attend<amx::InTiles>, vectors_avx512};

}  // namespace requant
