#define REQUANT_TARGET i8mm
#include "vector_neon.h"
#include "bytes_copied.h"
#include "floats_copied.h"
#include "lanes_swapped.h"
#include "rows_lanes.h"

#include "compile_target.h"
#include "cpu.h"

namespace requant {

extern const Target target_dotprod, target_i8mm;

// i8mm multiplies bytes, and nothing else: the rest is that of dotprod.
const Target target_i8mm = {
    "i8mm", cpu::has_i8mm, i8mm::convolution, i8mm::matrix, i8mm::block_matrix, i8mm::attend_head,
    target_dotprod.normalize, target_dotprod.reset_state, target_dotprod.next_state, target_dotprod.next_cell,
    target_dotprod.lookup, target_dotprod.combine, target_dotprod.mean_windows, target_dotprod.max_windows,
    target_dotprod.quantize_pixels, target_dotprod.interpolate, target_dotprod.softmax, target_dotprod.softmax_of_bytes,
    target_dotprod.bend_lines};

}  // namespace requant
