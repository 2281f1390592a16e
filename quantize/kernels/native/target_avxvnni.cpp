#define REQUANT_TARGET avxvnni
#include "vector_avx2.h"
#include "bytes_copied.h"
#include "rows_repeat.h"

#include "compile_target.h"
#include "cpu.h"

namespace requant {

extern const Target target_avxvnni;
const Target target_avxvnni = {
    "avxvnni", cpu::has_avxvnni, avxvnni::convolution, avxvnni::matrix, avxvnni::block_matrix, avxvnni::attend_head,
    avxvnni::normalize, avxvnni::reset_state, avxvnni::next_state, avxvnni::next_cell, avxvnni::look_up,
    avxvnni::combine, avxvnni::mean_pixels, avxvnni::max_pixels, avxvnni::quantize_pixels};

}  // namespace requant
