#include "cpu.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "target.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace requant {

#if defined(__x86_64__)
namespace {

struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers ask(unsigned leaf, unsigned part = 0) {
  Registers found;
  if (!__get_cpuid_count(leaf, part, &found.a, &found.b, &found.c, &found.d)) return {};
  return found;
}

bool bit(unsigned word, int place) { return word >> place & 1; }

// Whether the operating system keeps these registers when it switches threads.
bool keeps(unsigned registers) {
  if (!bit(ask(1).c, 27)) return false;  // OSXSAVE
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & registers) == registers;
}

constexpr unsigned kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;
constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl: a process asks once to use tiles

}  // namespace

bool cpu::has_avx2() { return keeps(kYmm) && bit(ask(7).b, 5) && bit(ask(1).c, 12); }  // and FMA
bool cpu::has_avxvnni() { return has_avx2() && bit(ask(7, 1).a, 4); }
bool cpu::has_avx512() {
  const Registers leaf = ask(7);
  const bool common = bit(leaf.b, 16) && bit(leaf.b, 17) && bit(leaf.b, 30) && bit(leaf.b, 31);  // F, DQ, BW, VL
  return keeps(kZmm) && common && bit(leaf.c, 1) && bit(leaf.c, 11);                             // VBMI, VNNI
}

bool cpu::has_amx() {
  const unsigned found = ask(7).d;
  const bool common = bit(found, 22) && bit(found, 24) && bit(found, 25);  // BF16, TILE, INT8
  if (!has_avx512() || !keeps(kZmm | kTiles) || !common) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

extern const Target target_portable, target_avx2, target_avxvnni, target_avx512, target_amx;

const std::vector<const Target*>& targets() {
  static const std::vector<const Target*> all = {&target_amx, &target_avx512, &target_avxvnni, &target_avx2, &target_portable};
  return all;
}
#elif defined(__aarch64__)
bool cpu::has_dotprod() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }
bool cpu::has_i8mm() { return has_dotprod() && getauxval(AT_HWCAP2) & HWCAP2_I8MM; }

extern const Target target_portable, target_dotprod, target_i8mm;

const std::vector<const Target*>& targets() {
  static const std::vector<const Target*> all = {&target_i8mm, &target_dotprod, &target_portable};
  return all;
}
#else
extern const Target target_portable;

const std::vector<const Target*>& targets() {
  static const std::vector<const Target*> all = {&target_portable};
  return all;
}
#endif

const Target& chosen() {
  const char* asked = std::getenv("REQUANT_KERNELS_ISA");
  for (const Target* target : targets())
    if (target->available() && (asked == nullptr || *asked == 0 || !std::strcmp(asked, target->name))) return *target;
  throw std::runtime_error(std::string("REQUANT_KERNELS_ISA: no ") + asked + " on this CPU");
}

}  // namespace requant
