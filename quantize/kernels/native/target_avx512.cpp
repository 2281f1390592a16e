#define REQUANT_TARGET avx512
#include "vector_avx512.h"
#include "lanes_swapped.h"
#include "rows_repeat.h"

#include "compile_target.h"
#include "cpu.h"

namespace requant {

extern const VectorKernels vectors_avx512;
constinit const VectorKernels vectors_avx512 = {
    avx512::normalize, avx512::reset_state, avx512::next_state, avx512::next_cell, avx512::multiply_floats,
    avx512::look_up, avx512::combine, avx512::mean_windows, avx512::max_windows, avx512::quantize_pixels, avx512::interpolate,
    avx512::softmax, avx512::softmax_of_bytes, avx512::bend_lines, avx512::add_moments, avx512::attend_few,
    avx512::round_row_evenly, avx512::greatest_seen};

extern const Target target_avx512;
constinit const Target target_avx512 = {
    "avx512", cpu::has_avx512, avx512::convolution, avx512::matrix, avx512::block_matrix,
    avx512::attend<avx512::InVectors>, vectors_avx512};

}  // namespace requant
