#define REQUANT_TARGET portable
#include "vector_portable.h"
#include "bytes_copied.h"
#include "floats_copied.h"
#include "rows_repeat.h"

#include "compile_target.h"
#include "cpu.h"

namespace requant {

extern const VectorKernels vectors_portable;
constinit const VectorKernels vectors_portable = {
    portable::normalize, portable::reset_state, portable::next_state, portable::next_cell, portable::multiply_floats,
    portable::look_up, portable::combine, portable::mean_windows, portable::max_windows, portable::quantize_pixels, portable::interpolate,
    portable::softmax, portable::softmax_of_bytes, portable::bend_lines, portable::add_moments, portable::attend_few,
    portable::round_row_evenly, portable::greatest_seen};

extern const Target target_portable;
constinit const Target target_portable = {
    "portable", cpu::has_portable, portable::convolution, portable::matrix, portable::block_matrix,
    portable::attend<portable::InVectors>, vectors_portable};

}  // namespace requant
