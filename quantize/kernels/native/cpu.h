// What this CPU and its operating system can do.
#pragma once

namespace requant::cpu {

inline bool has_portable() { return true; }
bool has_avx2();
bool has_avxvnni();
bool has_avx512();
bool has_amx();  // asks the system for the tiles
bool has_dotprod();
bool has_i8mm();

}  // namespace requant::cpu
