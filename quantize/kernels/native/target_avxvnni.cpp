#define REQUANT_TARGET avxvnni
#include "vector_avx2.h"
#include "bytes_copied.h"
#include "floats_copied.h"
#include "lanes_swapped.h"
#include "rows_repeat.h"

#include "compile_target.h"
#include "cpu.h"

namespace requant {

extern const Target target_avx2, target_avxvnni;

// VNNI multiplies bytes, and nothing else: the rest is that of avx2.
const Target target_avxvnni = {
    "avxvnni", cpu::has_avxvnni, avxvnni::convolution, avxvnni::matrix, avxvnni::block_matrix, avxvnni::attend_head,
    target_avx2.normalize, target_avx2.reset_state, target_avx2.next_state, target_avx2.next_cell,
    target_avx2.lookup, target_avx2.combine, target_avx2.mean_windows, target_avx2.max_windows,
    target_avx2.quantize_pixels, target_avx2.interpolate, target_avx2.softmax, target_avx2.softmax_of_bytes,
    target_avx2.bend_lines};

}  // namespace requant
