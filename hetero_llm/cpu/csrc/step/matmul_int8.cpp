// Register tiles of packed products of 8-bit integers. Sums are exact, and all instruction sets
// scale them in the same way: their results are equal to the last bit.

#include <cstring>

#include "matmul_kernels.h"

namespace hetero {
namespace {

// One row. Plain loops over the outputs, which GCC makes vectors of.
template <int S>
void base_tile(const TileCall& c) {
    constexpr int N = S * kStrip;
    int32_t sums[N] = {};
    if (c.add) std::memcpy(sums, c.out, sizeof sums);
    const int8_t* w = (const int8_t*)c.weights;
    const int8_t* x = (const int8_t*)c.x;
    for (int64_t step = 0; step < c.steps; ++step, w += kStepBytes, x += 4)
        for (int n = 0; n < N; ++n)
            sums[n] += x[0] * w[4 * n] + x[1] * w[4 * n + 1] + x[2] * w[4 * n + 2] +
                       x[3] * w[4 * n + 3];
    if (!c.last) {
        std::memcpy(c.out, sums, sizeof sums);
        return;
    }
    for (int n = 0; n < N; ++n) c.out[n] = (float)sums[n] * (c.x_scales[0] * c.scales[n]);
}

// Products of the absolute weights with the row in the weights' signs: a sum of two fits in 16 bits
// because nothing in a row is below -127. Weights of checkpoints may be -128.
template <int R, int S>
ON_AVX2 void avx2_tile(const TileCall& c) {
    constexpr int N = S * 2;
    __m256i sums[R][N];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n)
            sums[r][n] = c.add ? _mm256_loadu_si256(
                                     (const __m256i*)(c.out + r * c.out_stride + n * 8))
                               : _mm256_setzero_si256();
    const __m256i ones = _mm256_set1_epi16(1);
    const char *w = c.weights, *x = c.x, *ahead = c.ahead;
    for (int64_t step = 0; step < c.steps; step += kUnroll) {
        for (int64_t i = 0; i < c.lines; ++i, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        for (int64_t j = 0; j < kUnroll; ++j, w += kStepBytes, x += 4) {
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                const __m256i a = _mm256_set1_epi32(read_one<int32_t>(x + r * c.x_stride));
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n) {
                    const __m256i b = _mm256_loadu_si256((const __m256i*)(w + n * 32));
                    const __m256i twos =
                        _mm256_maddubs_epi16(_mm256_abs_epi8(b), _mm256_sign_epi8(a, b));
                    sums[r][n] = _mm256_add_epi32(sums[r][n], _mm256_madd_epi16(twos, ones));
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        const __m256 x_scale = c.last ? _mm256_set1_ps(c.x_scales[r]) : _mm256_setzero_ps();
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            float* out = c.out + r * c.out_stride + n * 8;
            if (c.last)
                _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_cvtepi32_ps(sums[r][n]),
                                                    _mm256_mul_ps(x_scale, _mm256_loadu_ps(
                                                                               c.scales + n * 8))));
            else
                _mm256_storeu_si256((__m256i*)out, sums[r][n]);
        }
    }
}

typedef int32_t Ints __attribute__((vector_size(64)));

#define VNNI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))

// The instruction wants unsigned times signed: rows are moved up by 128, and 128 times the sum of
// the weights is taken off in the end.
template <int R, int S>
VNNI void vnni_tile(const TileCall& c) {
    __m512i sums[R][S];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s)
            sums[r][s] = c.add ? _mm512_loadu_si512(c.out + r * c.out_stride + s * kStrip)
                               : _mm512_setzero_si512();
    const __m512i up = _mm512_set1_epi8(-128);
    const char *w = c.weights, *x = c.x, *ahead = c.ahead;
    for (int64_t step = 0; step < c.steps; step += kUnroll) {
        for (int64_t i = 0; i < c.lines; ++i, ahead += 64) __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 4
        for (int64_t j = 0; j < kUnroll; ++j, w += kStepBytes, x += 4) {
            __m512i b[S];
#pragma GCC unroll 4
            for (int s = 0; s < S; ++s) b[s] = _mm512_loadu_si512(w + s * 64);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const __m512i four = _mm512_set1_epi32(read_one<int32_t>(x + r * c.x_stride));
                const __m512i a = _mm512_xor_si512(four, up);
#pragma GCC unroll 4
                for (int s = 0; s < S; ++s) sums[r][s] = _mm512_dpbusd_epi32(sums[r][s], a, b[s]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const __m512 x_scale = c.last ? _mm512_set1_ps(c.x_scales[r]) : _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s) {
            float* out = c.out + r * c.out_stride + s * kStrip;
            if (!c.last) {
                _mm512_storeu_si512(out, sums[r][s]);
                continue;
            }
            const Ints of_weights = (Ints)_mm512_loadu_si512(c.sums + s * kStrip);
            const Ints total = (Ints)sums[r][s] - of_weights * 128;
            const __m512 scale = _mm512_mul_ps(x_scale, _mm512_loadu_ps(c.scales + s * kStrip));
            _mm512_storeu_ps(out, _mm512_mul_ps(__builtin_convertvector(total, __m512), scale));
        }
    }
}

#define ROW(tile, R) {tile<R, 1>, tile<R, 2>, tile<R, 3>, tile<R, 4>}

const Tiles kBaseTiles = {{{base_tile<1>, base_tile<2>, base_tile<3>, base_tile<4>}}, 1, {4}};
const Tiles kAvx2Tiles = {{ROW(avx2_tile, 1),
                           {avx2_tile<2, 1>, avx2_tile<2, 2>},
                           {avx2_tile<3, 1>},
                           {avx2_tile<4, 1>}}, 4, {4, 2, 1, 1}};
const Tiles kVnniTiles = {{ROW(vnni_tile, 1), ROW(vnni_tile, 2), ROW(vnni_tile, 3),
                           ROW(vnni_tile, 4), ROW(vnni_tile, 5), ROW(vnni_tile, 6)},
                          6, {4, 4, 4, 4, 4, 4}};

}  // namespace

const Tiles& int8_tiles(Isa isa) {
    if (isa >= kAvx512 && has_vnni()) return kVnniTiles;
    return isa >= kAvx2 ? kAvx2Tiles : kBaseTiles;
}

}  // namespace hetero
