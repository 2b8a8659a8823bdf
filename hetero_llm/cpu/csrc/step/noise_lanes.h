// The noise of hetero_llm/sampling/noise.py for a few tokens at a time.

#pragma once

#include <cmath>

#include "lanes.h"
#include "rows.h"

namespace hetero {

constexpr int64_t kNoisy = 64;  // tokens that get their noise at a time

// log(x) for normal x > 0 as exponent and a polynomial around 1: accurate next to 1 as well.
template <int N>
INLINE Floats<N> logarithm(Floats<N> x) {
    const Words<N> shifted = (Words<N>)x - 0x3f3504f3u;  // mantissas from sqrt(1/2) to sqrt(2)
    const auto exponent = (typename Lanes<N>::Integer)shifted >> 23;
    const Floats<N> e = __builtin_convertvector(exponent, Floats<N>);
    const Floats<N> f = (Floats<N>)((shifted & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
    Floats<N> p = fill<N>(-8.1015583184e-2f);
    p = p * f + 1.2712307671e-1f;
    p = p * f - 1.2972238991e-1f;
    p = p * f + 1.4202173823e-1f;
    p = p * f - 1.6642247596e-1f;
    p = p * f + 2.0001468577e-1f;
    p = p * f - 2.5000296546e-1f;
    p = p * f + 3.3333328597e-1f;
    const Floats<N> square = f * f;
    // ln 2 in two parts; the first has few bits, so e times it is exact.
    const Floats<N> rest = square * f * p + e * -2.12194440e-4f - 0.5f * square;
    return e * 0.693359375f + (f + rest);
}

// Gumbel noise of words of Philox as noise.py defines it.
template <int N>
INLINE Floats<N> gumbel(Words<N> words) {
    Floats<N> v = (__builtin_convertvector(words, Floats<N>) + 0.5f) * 0x1p-32f;
    v = v > 0x1.fffffep-1f ? fill<N>(0x1.fffffep-1f) : v;
    // log1p(-v) = log(u) - (v - (1 - u)) / u with u = 1 - v rounded
    const Floats<N> u = 1.0f - v;
    const Floats<N> minus_log = (v - (1.0f - u)) / u - logarithm<N>(u);
    return -logarithm<N>(minus_log);
}

// Philox4x32-10 for N / 2 counters (c0, position, index, 0), each word in 64 bits: 2 N words of
// output in the order of their tokens.
template <int N>
INLINE void philox(typename Lanes<N>::Long c0, const Noise& noise, Words<N>* out) {
    using Long = typename Lanes<N>::Long;
    const Long low = Long{} + 0xffffffffu;
    uint32_t k0 = (uint32_t)noise.seed, k1 = (uint32_t)(noise.seed >> 32);
    Long c1 = Long{} + noise.position, c2 = Long{} + noise.sample_index, c3 = {};
    for (int round = 0; round < 10; ++round) {
        const Long first = c0 * 0xd2511f53u, second = c2 * 0xcd9e8d57u;
        c0 = (second >> 32) ^ c1 ^ k0;
        c1 = second & low;
        c2 = (first >> 32) ^ c3 ^ k1;
        c3 = first & low;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    const Long a = c0 | c1 << 32, b = c2 | c3 << 32;
    Long front, back;
    for (int i = 0; i < N / 4; ++i) {
        front[2 * i] = i;
        front[2 * i + 1] = i + N / 2;
    }
    back = front + N / 4;
    out[0] = (Words<N>)__builtin_shuffle(a, b, front);
    out[1] = (Words<N>)__builtin_shuffle(a, b, back);
}

// sums[i] = scores[i] / temperature + noise of token first + i, i < count <= kNoisy; first is a
// multiple of 4. Values of sums from `count` on are undefined.
template <int N>
INLINE void add_noise(const float* scores, int64_t count, int64_t first, const Noise& noise,
                      float* sums) {
    typename Lanes<N>::Long order;
    for (int i = 0; i < N / 2; ++i) order[i] = i;
    std::memcpy(sums, scores, count * sizeof(float));
    for (int64_t i = count; i < kNoisy; ++i) sums[i] = 0;
    for (int64_t i = 0; i < count; i += 2 * N) {
        Words<N> words[2];
        philox<N>(order + (uint64_t)(first + i) / 4, noise, words);
        for (int k = 0; k < 2; ++k) {
            float* at = sums + i + k * N;
            write<N>(at, read<N>(at) / noise.temperature + gumbel<N>(words[k]));
        }
    }
}

}  // namespace hetero
