// Vectors of 4, 8 or 16 floats: one template per kernel, one instance per instruction set.
//
// GCC splits vectors that are wider than the machine's clumsily, so a kernel takes its width as a
// parameter: 16 with AVX-512, 8 with AVX2, 4 on any x86-64. Templates are always inlined into
// functions that carry the target.

#pragma once

#include <cfloat>

#include "isa.h"
#include "numbers.h"

namespace hetero {

constexpr int kLanes = 16;  // floats of the widest vector

struct Bf16 { uint16_t bits; };

template <int N>
struct Lanes {
    typedef float Float __attribute__((vector_size(N * 4)));
    typedef uint32_t Word __attribute__((vector_size(N * 4)));
    typedef int32_t Integer __attribute__((vector_size(N * 4)));
    typedef uint16_t Half __attribute__((vector_size(N * 2)));
    typedef uint64_t Long __attribute__((vector_size(N * 4)));  // half as many
};
template <int N>
using Floats = typename Lanes<N>::Float;
template <int N>
using Words = typename Lanes<N>::Word;

template <int N>
INLINE Floats<N> fill(float x) { return Floats<N>{} + x; }

template <int N>
INLINE Floats<N> read(const float* p) { return read_one<Floats<N>>(p); }
template <int N>
INLINE Floats<N> read(const Bf16* p) {
    const auto halves = read_one<typename Lanes<N>::Half>(p);
    return (Floats<N>)(__builtin_convertvector(halves, Words<N>) << 16);
}
// Two vectors of neighbours: of 2 N bf16 those at even and those at odd places, which takes one
// operation each, where widening in order takes several. Floats stay in order.
template <int N>
INLINE void read_two(const Bf16* p, Floats<N>& one, Floats<N>& two) {
    const auto both = read_one<Words<N>>(p);
    one = (Floats<N>)(both << 16);
    two = (Floats<N>)(both & 0xffff0000u);
}
template <int N>
INLINE void read_two(const float* p, Floats<N>& one, Floats<N>& two) {
    one = read<N>(p);
    two = read<N>(p + N);
}

template <int N>
INLINE void write(float* p, Floats<N> v) { std::memcpy(p, &v, sizeof v); }
// The nearest bf16, ties to even; NaN stays NaN.
template <int N>
INLINE Floats<N> rounded(Floats<N> v) {
    const Words<N> bits = (Words<N>)v;
    const Words<N> nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    return (Floats<N>)(v != v ? bits | 0x400000u : nearest);  // rounding could turn a NaN into 0
}
// `count` values that are bf16 already: the other half of each is lost.
template <int N>
INLINE void write_rounded(Bf16* p, Floats<N> v, int64_t count = N) {
    const auto halves = __builtin_convertvector((Words<N>)v >> 16, typename Lanes<N>::Half);
    std::memcpy(p, &halves, count * sizeof(Bf16));
}
template <int N>
INLINE void write(Bf16* p, Floats<N> v, int64_t count = N) {
    write_rounded<N>(p, rounded<N>(v), count);
}

// The first `count` < N values, zeros behind them.
template <int N>
INLINE Floats<N> read_some(const float* p, int64_t count) {
    float values[N] = {};
    std::memcpy(values, p, count * sizeof(float));
    return read<N>(values);
}
template <int N>
INLINE void write_some(float* p, Floats<N> v, int64_t count) {
    float values[N];
    write<N>(values, v);
    std::memcpy(p, values, count * sizeof(float));
}

template <int N>
INLINE Floats<N> larger(Floats<N> a, Floats<N> b) { return a > b ? a : b; }

template <int N>
INLINE void halve(Floats<N> v, Floats<N / 2>& low, Floats<N / 2>& high) {
    std::memcpy(&low, &v, sizeof low);
    std::memcpy(&high, (const char*)&v + sizeof low, sizeof high);
}

template <int N>
INLINE float total(Floats<N> v) {
    if constexpr (N == 4) {
        return (v[0] + v[2]) + (v[1] + v[3]);
    } else {
        Floats<N / 2> low, high;
        halve<N>(v, low, high);
        return total<N / 2>(low + high);
    }
}

template <int N>
INLINE float maximum(Floats<N> v) {
    if constexpr (N == 4) {
        const float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
        return a > b ? a : b;
    } else {
        Floats<N / 2> low, high;
        halve<N>(v, low, high);
        return maximum<N / 2>(larger<N / 2>(low, high));
    }
}

// Index vectors of the shuffles below: quarter q of a vector holds `pattern` + 4 q.
template <int N>
INLINE typename Lanes<N>::Integer quarters(int a, int b, int c, int d) {
    typename Lanes<N>::Integer v;
    for (int i = 0; i < N; i += 4) {
        v[i] = a + i;
        v[i + 1] = b + i;
        v[i + 2] = c + i;
        v[i + 3] = d + i;
    }
    return v;
}

// The sums of four vectors: 13 operations for 16 floats each, where four single sums need 32.
template <int N>
INLINE Floats<4> totals(Floats<N> a, Floats<N> b, Floats<N> c, Floats<N> d) {
    const auto low = quarters<N>(0, N, 1, N + 1), high = quarters<N>(2, N + 2, 3, N + 3);
    const Floats<N> ab = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
    const Floats<N> cd = __builtin_shuffle(c, d, low) + __builtin_shuffle(c, d, high);
    const Floats<N> all = __builtin_shuffle(ab, cd, quarters<N>(0, 1, N, N + 1)) +
                          __builtin_shuffle(ab, cd, quarters<N>(2, 3, N + 2, N + 3));
    if constexpr (N == 4) {
        return all;
    } else {
        Floats<N / 2> one, two;
        halve<N>(all, one, two);
        one += two;
        if constexpr (N == 8) {
            return one;
        } else {
            Floats<4> three, four;
            halve<8>(one, three, four);
            return three + four;
        }
    }
}

// 2^x for x <= 0: a polynomial of degree 6 on [-0.5, 0.5], error below 2 ulp; under 2^-125 it is 0.
template <int N>
INLINE Floats<N> power_of_two(Floats<N> x) {
    const Floats<N> shifted = x + 12582912.0f;  // 1.5 * 2^23: an integer in the low bits
    const Floats<N> f = x - (shifted - 12582912.0f);
    Floats<N> p = fill<N>(1.5403530393e-4f);
    p = p * f + 1.3333558146e-3f;
    p = p * f + 9.6181291076e-3f;
    p = p * f + 5.5504108665e-2f;
    p = p * f + 2.4022650696e-1f;
    p = p * f + 6.9314718056e-1f;
    p = p * f + 1.0f;
    const Floats<N> scale = (Floats<N>)(((Words<N>)shifted - 0x4B400000u + 127u) << 23);
    return x < -125.0f ? fill<N>(0.0f) : p * scale;
}

constexpr float kLog2e = 1.44269504088896341f;

// 1 / (1 + exp(-x)), by exp of a negative number only, so that nothing overflows.
template <int N>
INLINE Floats<N> sigmoid(Floats<N> x) {
    const Floats<N> e = power_of_two<N>((x < 0.0f ? x : -x) * kLog2e);
    return (x < 0.0f ? e : fill<N>(1.0f)) / (1.0f + e);
}

}  // namespace hetero

#define LIST(...) __VA_ARGS__

// Defines NAME(PARAMETERS, isa): calls the template NAME_lanes<N> with the widest vectors that
// `isa` allows. PARAMETERS and ARGUMENTS come in parentheses.
#define DEFINE_FOR_WIDTHS(NAME, PARAMETERS, ARGUMENTS)                                             \
    ON_AVX512 static void NAME##_16 PARAMETERS { NAME##_lanes<16> ARGUMENTS; }                     \
    ON_AVX2 static void NAME##_8 PARAMETERS { NAME##_lanes<8> ARGUMENTS; }                         \
    static void NAME##_4 PARAMETERS { NAME##_lanes<4> ARGUMENTS; }                                 \
    void NAME(LIST PARAMETERS, Isa isa) {                                                          \
        if (isa >= kAvx512) NAME##_16 ARGUMENTS;                                                   \
        else if (isa >= kAvx2) NAME##_8 ARGUMENTS;                                                 \
        else NAME##_4 ARGUMENTS;                                                                   \
    }
