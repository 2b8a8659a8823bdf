// Register tiles of packed products in float and bf16 for every vector instruction set.

#include <immintrin.h>

#include <cstring>

#include "matmul_kernels.h"

namespace hetero {
namespace base {
constexpr int kWidth = 4;
typedef float Vector __attribute__((vector_size(16)));
typedef uint32_t Bits __attribute__((vector_size(16)));
inline Vector fma(Vector a, Vector b, Vector c) { return a * b + c; }
#define TILE
#include "matmul_tile.h"
#undef TILE
}  // namespace base

namespace avx2 {
constexpr int kWidth = 8;
typedef float Vector __attribute__((vector_size(32)));
typedef uint32_t Bits __attribute__((vector_size(32)));
#define TILE ON_AVX2
TILE inline Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
#include "matmul_tile.h"
#undef TILE
}  // namespace avx2

namespace avx512 {
constexpr int kWidth = 16;
typedef float Vector __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
#define TILE __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
TILE inline Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
#include "matmul_tile.h"
#undef TILE
}  // namespace avx512

namespace {

template <int R, int S>
DOT void dot_tile(const TileCall& c) {
    __m512 sums[R][S];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s)
            sums[r][s] = c.add ? _mm512_loadu_ps(c.out + r * c.out_stride + s * kStrip)
                               : _mm512_setzero_ps();
    const char *w = c.weights, *x = c.x, *ahead = c.ahead;
    for (int64_t step = 0; step < c.steps; step += kUnroll) {
        for (int64_t i = 0; i < c.lines; ++i, ahead += 64) __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 4
        for (int64_t j = 0; j < kUnroll; ++j, w += kStepBytes, x += 4) {
            __m512bh b[S];
#pragma GCC unroll 4
            for (int s = 0; s < S; ++s) b[s] = (__m512bh)_mm512_loadu_si512(w + s * 64);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                int32_t pair;
                std::memcpy(&pair, x + r * c.x_stride, sizeof pair);
                const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
                for (int s = 0; s < S; ++s) sums[r][s] = _mm512_dpbf16_ps(sums[r][s], a, b[s]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s)
            _mm512_storeu_ps(c.out + r * c.out_stride + s * kStrip, sums[r][s]);
}

template <int R, int S>
DOT void dot_strips(const TileCall& c) {
    __m512 sums[R][S];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s)
            sums[r][s] = c.add ? _mm512_loadu_ps(c.out + c.rows[r] + s * kStrip)
                               : _mm512_setzero_ps();
    const char *w = c.weights, *x = c.x;
    for (int64_t step = 0; step < c.steps; ++step, w += kStepBytes, x += 4) {
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s) {
            const __m512bh b = (__m512bh)_mm512_loadu_si512(w + s * 64);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                int32_t pair;
                std::memcpy(&pair, x + r * c.x_stride + c.offsets[s], sizeof pair);
                sums[r][s] = _mm512_dpbf16_ps(sums[r][s], b, (__m512bh)_mm512_set1_epi32(pair));
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s)
            _mm512_storeu_ps(c.out + c.rows[r] + s * kStrip, sums[r][s]);
}

#define ROW_OF_4(tile, R) {tile<R, 1>, tile<R, 2>, tile<R, 3>, tile<R, 4>}
#define ROW_OF_2(tile, R) {tile<R, 1>, tile<R, 2>, nullptr, nullptr}
#define ROW_OF_1(tile, R) {tile<R, 1>, nullptr, nullptr, nullptr}

// 32 registers: 6 x 64 outputs.
#define WIDE_TILES(tile)                                                              \
    {{ROW_OF_4(tile, 1), ROW_OF_4(tile, 2), ROW_OF_4(tile, 3), ROW_OF_4(tile, 4),     \
      ROW_OF_4(tile, 5), ROW_OF_4(tile, 6)}, 6, {4, 4, 4, 4, 4, 4}}
// 16 registers of 8: 1 x 64, 3 x 32, 6 x 16.
#define MIDDLE_TILES(tile)                                                            \
    {{ROW_OF_4(tile, 1), ROW_OF_2(tile, 2), ROW_OF_2(tile, 3), ROW_OF_1(tile, 4),     \
      ROW_OF_1(tile, 5), ROW_OF_1(tile, 6)}, 6, {4, 2, 2, 1, 1, 1}}
// 16 registers of 4: 1 x 32, 3 x 16.
#define NARROW_TILES(tile)                                                            \
    {{ROW_OF_2(tile, 1), ROW_OF_1(tile, 2), ROW_OF_1(tile, 3)}, 3, {2, 1, 1}}

const Tiles kFloatTiles[] = {NARROW_TILES(base::float_tile), MIDDLE_TILES(avx2::float_tile),
                             WIDE_TILES(avx512::float_tile)};
const Tiles kBf16Tiles[] = {NARROW_TILES(base::bf16_tile), MIDDLE_TILES(avx2::bf16_tile),
                            WIDE_TILES(avx512::bf16_tile), WIDE_TILES(dot_tile)};

const Tiles kFloatStrips[] = {NARROW_TILES(base::float_strips), MIDDLE_TILES(avx2::float_strips),
                              WIDE_TILES(avx512::float_strips)};
const Tiles kBf16Strips[] = {NARROW_TILES(base::bf16_strips), MIDDLE_TILES(avx2::bf16_strips),
                             WIDE_TILES(avx512::bf16_strips), WIDE_TILES(dot_strips)};

}  // namespace

const Tiles& strip_tiles(Format format, Isa isa) {
    if (format == Format::kFloat) return kFloatStrips[isa < kAvx512 ? isa : kAvx512];
    return kBf16Strips[isa < kAvx512Bf16 ? isa : kAvx512Bf16];
}
const Tiles& float_tiles(Isa isa) { return kFloatTiles[isa < kAvx512 ? isa : kAvx512]; }
const Tiles& bf16_tiles(Isa isa) { return kBf16Tiles[isa < kAvx512Bf16 ? isa : kAvx512Bf16]; }

}  // namespace hetero
