#define REQUANT_TARGET avxvnni
#include "vector_avx2.h"
#include "bytes_copied.h"
#include "floats_copied.h"
#include "lanes_swapped.h"
#include "rows_repeat.h"

#include "compile_target.h"
#include "cpu.h"

namespace requant {

extern const VectorKernels vectors_avx2;
extern const Target target_avxvnni;

// VNNI multiplies bytes, and nothing else: the rest is that of avx2.
constinit const Target target_avxvnni = {
    "avxvnni", cpu::has_avxvnni, avxvnni::convolution, avxvnni::matrix, avxvnni::block_matrix,
    avxvnni::attend<avxvnni::InVectors>, vectors_avx2};

}  // namespace requant
