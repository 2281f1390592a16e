#define REQUANT_TARGET avxvnni
#define REQUANT_MOST_ROWS 4
#include "vector_avx2.h"

#include "compile_target.h"
#include "cpu.h"

namespace requant {

extern const Target target_avxvnni;
const Target target_avxvnni = {"avxvnni", cpu::has_avxvnni, avxvnni::convolution, avxvnni::look_up};

}  // namespace requant
