#define REQUANT_TARGET avx2
#include "vector_avx2.h"
#include "bytes_copied.h"
#include "floats_copied.h"
#include "lanes_swapped.h"
#include "rows_repeat.h"

#include "compile_target.h"
#include "cpu.h"

namespace requant {

extern const VectorKernels vectors_avx2;
constinit const VectorKernels vectors_avx2 = {
    avx2::normalize, avx2::reset_state, avx2::next_state, avx2::next_cell, avx2::multiply_floats,
    avx2::look_up, avx2::combine, avx2::mean_windows, avx2::max_windows, avx2::quantize_pixels, avx2::interpolate,
    avx2::softmax, avx2::softmax_of_bytes, avx2::bend_lines, avx2::add_moments, avx2::attend_few,
    avx2::round_row_evenly, avx2::greatest_seen};

extern const Target target_avx2;
constinit const Target target_avx2 = {
    "avx2", cpu::has_avx2, avx2::convolution, avx2::matrix, avx2::block_matrix,
    avx2::attend<avx2::InVectors>, vectors_avx2};

}  // namespace requant
