// What instructions this machine runs, and what of them we use.

#pragma once

#include <cstdint>

namespace hetero {

// Each level includes those below. kBase runs anywhere (GCC's vectors, whatever they compile to).
enum Isa : int { kBase = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kAmx = 4 };

// The best level of this machine. kAmx needs AMX-TILE, AMX-BF16 and AMX-INT8, and the system's
// permission to use tiles (arch_prctl), which is asked for here, once for the process.
Isa best_isa();

// Whether 8-bit dot products (AVX512-VNNI) are there; part of every kAmx machine.
bool has_vnni();

}  // namespace hetero
