#define REQUANT_TARGET dotprod
#include "vector_neon.h"
#include "bytes_copied.h"
#include "floats_copied.h"
#include "lanes_swapped.h"
#include "rows_lanes.h"

#include "compile_target.h"
#include "cpu.h"

namespace requant {

extern const VectorKernels vectors_dotprod;
constinit const VectorKernels vectors_dotprod = {
    dotprod::normalize, dotprod::reset_state, dotprod::next_state, dotprod::next_cell, dotprod::multiply_floats,
    dotprod::look_up, dotprod::combine, dotprod::mean_windows, dotprod::max_windows, dotprod::quantize_pixels, dotprod::interpolate,
    dotprod::softmax, dotprod::softmax_of_bytes, dotprod::bend_lines, dotprod::add_moments, dotprod::attend_few,
    dotprod::round_row_evenly, dotprod::greatest_seen};

extern const Target target_dotprod;
constinit const Target target_dotprod = {
    "dotprod", cpu::has_dotprod, dotprod::convolution, dotprod::matrix, dotprod::block_matrix,
    dotprod::attend<dotprod::InVectors>, vectors_dotprod};

}  // namespace requant
