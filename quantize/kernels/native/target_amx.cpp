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

extern const Target target_avx512, target_amx;

namespace amx {

// What tiles do not suit, the same processor computes in vectors.
std::unique_ptr<ConvolutionKernel> convolution(Convolution made) {
  if (made.depthwise() || !InTiles::suits(made)) return target_avx512.convolution(std::move(made));
  return std::make_unique<Dense<InTiles>>(std::move(made));
}

std::unique_ptr<MatrixKernel> matrix(Matrix made) { return std::make_unique<Rows<InTiles>>(std::move(made)); }

std::unique_ptr<MatrixKernel> block_matrix(const BlockMatrix& made) { return std::make_unique<BlockTiles>(made); }

void attend_head(const AttentionSize& size, const Head& head) {
  size.queries <= kFewQueries ? target_avx512.attend(size, head) : attend<InTiles>(size, head);
}

}  // namespace amx

const Target target_amx = {
    "amx", cpu::has_amx, amx::convolution, amx::matrix, amx::block_matrix, amx::attend_head,
    target_avx512.normalize, target_avx512.reset_state, target_avx512.next_state, target_avx512.next_cell,
    target_avx512.lookup, target_avx512.combine, target_avx512.mean_windows, target_avx512.max_windows,
    target_avx512.quantize_pixels, target_avx512.interpolate, target_avx512.softmax, target_avx512.softmax_of_bytes,
    target_avx512.bend_lines};

}  // namespace requant
