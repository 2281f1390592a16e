#define REQUANT_TARGET i8mm
#include "vector_neon.h"
#include "bytes_copied.h"
#include "floats_copied.h"
#include "lanes_swapped.h"
#include "rows_lanes.h"

#include "compile_target.h"
#include "cpu.h"

namespace requant {

extern const VectorKernels vectors_dotprod;
extern const Target target_i8mm;

// i8mm multiplies bytes, and nothing else: the rest is that of dotprod.
constinit const Target target_i8mm = {
    "i8mm", cpu::has_i8mm, i8mm::convolution, i8mm::matrix, i8mm::block_matrix,
    i8mm::attend<i8mm::InVectors>, vectors_dotprod};

}  // namespace requant
