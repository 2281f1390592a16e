#define REQUANT_TARGET amx
#include "vector_avx512.h"
#include "dense_tiles.h"

#include "compile_target.h"
#include "cpu.h"

namespace requant {

extern const Target target_amx;
const Target target_amx = {
    "amx", cpu::has_amx, amx::convolution, amx::look_up, amx::combine,
    amx::mean_pixels, amx::max_pixels};

}  // namespace requant
