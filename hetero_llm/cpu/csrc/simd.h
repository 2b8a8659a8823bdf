// Vectors of 16 floats with GCC's vector extensions: one source for every instruction set.

#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && __GNUC__ >= 11
#include <immintrin.h>
#define HAS_DOT 1
#define DOT __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#endif

#define ISA __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define INLINE inline __attribute__((always_inline))

typedef float F16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef float F8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));
typedef uint16_t H16 __attribute__((vector_size(32)));

constexpr int kLanes = 16;

struct Bf16 { uint16_t bits; };

INLINE F16 load(const float* p) { F16 v; std::memcpy(&v, p, sizeof v); return v; }
INLINE F16 load(const Bf16* p) {
    H16 h;
    std::memcpy(&h, p, sizeof h);
    return (F16)(__builtin_convertvector(h, U16) << 16);
}
INLINE void store(float* p, F16 v) { std::memcpy(p, &v, sizeof v); }
INLINE void store(Bf16* p, F16 v) {
    U16 bits = (U16)v;
    bits += 0x7fff + ((bits >> 16) & 1);  // round to nearest even; no NaN reaches this place
    H16 h = __builtin_convertvector(bits >> 16, H16);
    std::memcpy(p, &h, sizeof h);
}
INLINE F16 splat(float x) { return F16{} + x; }
// Horizontal reductions as trees: in-order scalar code would be one long chain of latencies.
INLINE F8 halves_sum(F16 v) {
    F8 low, high;
    std::memcpy(&low, &v, sizeof low);
    std::memcpy(&high, (const char*)&v + sizeof low, sizeof high);
    return low + high;
}
INLINE float sum(F16 v) {
    F8 a = halves_sum(v);
    a += __builtin_shuffle(a, I8{4, 5, 6, 7, 4, 5, 6, 7});
    a += __builtin_shuffle(a, I8{2, 3, 2, 3, 2, 3, 2, 3});
    return a[0] + a[1];
}
INLINE float highest(F16 v) {
    float m = v[0];
    for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
    return m;
}

// Whether this machine runs DOT functions: Intel from Cooper Lake, AMD from Zen 4.
inline bool has_bf16_dot() {
#ifdef HAS_DOT
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw");
#else
    return false;
#endif
}

// exp for x <= 0: 2^n * 2^f with a degree-6 polynomial on [-0.5, 0.5], error below 2 ulp; results
// under 2^-126 become 0.
INLINE F16 exp16(F16 x) {
    F16 y = x * 1.44269504088896341f;
    F16 shifted = y + 12582912.0f;  // 1.5 * 2^23: rounds to an integer in the low bits
    I16 n = (I16)shifted - 0x4B400000;
    F16 f = y - (shifted - 12582912.0f);
    F16 p = splat(1.5403530393e-4f);
    p = p * f + 1.3333558146e-3f;
    p = p * f + 9.6181291076e-3f;
    p = p * f + 5.5504108665e-2f;
    p = p * f + 2.4022650696e-1f;
    p = p * f + 6.9314718056e-1f;
    p = p * f + 1.0f;
    F16 scale = (F16)((n + 127) << 23);
    F16 zero = {};
    return y < -125.0f ? zero : p * scale;
}

