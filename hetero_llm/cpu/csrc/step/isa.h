// Instruction sets: levels that kernels are compiled for, and the level of this machine.

#pragma once

#include <immintrin.h>

#include <cstdint>

// Functions compiled for a level, whatever the compiler's own target is: x86-64 and GCC from 11 on.
#define DOT __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define ON_AVX2 __attribute__((target("avx2,fma")))
#define ON_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))

namespace hetero {

// Each level includes those below. kBase runs anywhere (GCC's vectors, whatever they compile to).
enum Isa : int { kBase = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kAmx = 4 };

// The best level of this machine. kAmx needs AMX-TILE, AMX-BF16 and AMX-INT8, and the system's
// permission to use tiles (arch_prctl), which the first call requests for the process.
Isa best_isa();

// Whether 8-bit dot products (AVX512-VNNI) are there; part of every kAmx machine.
bool has_vnni();

// Whether permutations of bytes (AVX512-VBMI) are there; part of every kAmx machine.
bool has_vbmi();

}  // namespace hetero
