// Register tiles of packed products of 8-bit integers. Sums are exact, and all instruction sets
// scale them in the same way: their results are equal to the last bit.

#include <cstring>

#include "matmul_kernels.h"

namespace hetero {
namespace base {

// One row. Plain loops over the outputs, which GCC makes vectors of.
template <int S>
void tile(const TileCall& c) {
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

}  // namespace base

namespace avx2 {
constexpr int kWidth = 8;
constexpr bool kHasDot = false;
typedef int32_t Vector __attribute__((vector_size(32)));
typedef uint32_t Bits __attribute__((vector_size(32)));
#define TILE ON_AVX2
// Products of the absolute weights with the row in the weights' signs: a sum of two fits in 16 bits
// because nothing in a row is below -127. Weights of checkpoints may be -128.
TILE inline Vector multiply_add(Vector x, Vector w, Vector sum) {
    const __m256i signed_x = _mm256_sign_epi8((__m256i)x, (__m256i)w);
    const __m256i twos = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), signed_x);
    return sum + (Vector)_mm256_madd_epi16(twos, _mm256_set1_epi16(1));
}
TILE inline void store_scaled(const TileCall& c, int r, int64_t n, Vector sum) {
    const __m256 x_scale = _mm256_set1_ps(c.x_scales[r]);
    const __m256 scale = _mm256_mul_ps(x_scale, _mm256_loadu_ps(c.scales + n));
    _mm256_storeu_ps(c.out + r * c.out_stride + n,
                     _mm256_mul_ps(_mm256_cvtepi32_ps((__m256i)sum), scale));
}
#include "matmul_tile.h"
#undef TILE
}  // namespace avx2

namespace vnni {
constexpr int kWidth = 16;
constexpr bool kHasDot = false;
typedef int32_t Vector __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
#define TILE __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
// The instruction wants unsigned times signed: rows are moved up by 128, and 128 times the sum of
// the weights is taken off in the end.
TILE inline Vector multiply_add(Vector x, Vector w, Vector sum) {
    // Of 64 bits: else GCC does it before x is spread, outside of the vector registers.
    const __m512i moved = _mm512_xor_epi64((__m512i)x, _mm512_set1_epi8(-128));
    return (Vector)_mm512_dpbusd_epi32((__m512i)sum, moved, (__m512i)w);
}
TILE inline void store_scaled(const TileCall& c, int r, int64_t n, Vector sum) {
    const Vector total = sum - read_one<Vector>(c.sums + n) * 128;
    const __m512 x_scale = _mm512_set1_ps(c.x_scales[r]);
    const __m512 scale = _mm512_mul_ps(x_scale, _mm512_loadu_ps(c.scales + n));
    _mm512_storeu_ps(c.out + r * c.out_stride + n,
                     _mm512_mul_ps(__builtin_convertvector(total, __m512), scale));
}
#include "matmul_tile.h"
#undef TILE
}  // namespace vnni

namespace {

#define TILE_OF(isa, R, S) isa::tile<Format::kInt8, false, R, S>
#define ROW(isa, R) {TILE_OF(isa, R, 1), TILE_OF(isa, R, 2), TILE_OF(isa, R, 3), TILE_OF(isa, R, 4)}

const Tiles kBaseTiles = {{{base::tile<1>, base::tile<2>, base::tile<3>, base::tile<4>}}, 1, {4}};
const Tiles kAvx2Tiles = {{ROW(avx2, 1),
                           {TILE_OF(avx2, 2, 1), TILE_OF(avx2, 2, 2)},
                           {TILE_OF(avx2, 3, 1)},
                           {TILE_OF(avx2, 4, 1)}}, 4, {4, 2, 1, 1}};
const Tiles kVnniTiles = {
    {ROW(vnni, 1), ROW(vnni, 2), ROW(vnni, 3), ROW(vnni, 4), ROW(vnni, 5), ROW(vnni, 6)},
    6, {4, 4, 4, 4, 4, 4}};

}  // namespace

const Tiles& int8_tiles(Isa isa) {
    if (isa >= kAvx512 && has_vnni()) return kVnniTiles;
    return isa >= kAvx2 ? kAvx2Tiles : kBaseTiles;
}

}  // namespace hetero
