#define REQUANT_TARGET i8mm
#include "vector_neon.h"
#include "bytes_copied.h"
#include "rows_lanes.h"

#include "compile_target.h"
#include "cpu.h"

namespace requant {

extern const Target target_i8mm;
const Target target_i8mm = {
    "i8mm", cpu::has_i8mm, i8mm::convolution, i8mm::matrix, i8mm::block_matrix, i8mm::attend_head, i8mm::normalize,
    i8mm::reset_state, i8mm::next_state, i8mm::next_cell, i8mm::look_up, i8mm::combine, i8mm::mean_pixels,
    i8mm::max_pixels, i8mm::quantize_pixels};

}  // namespace requant
