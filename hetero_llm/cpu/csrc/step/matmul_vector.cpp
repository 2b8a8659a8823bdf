// Register tiles of packed products in float and bf16 for every vector instruction set.

#include <cstring>

#include "matmul_kernels.h"

namespace hetero {
namespace base {
constexpr int kWidth = 4;
constexpr bool kHasDot = false;
typedef float Vector __attribute__((vector_size(16)));
typedef uint32_t Bits __attribute__((vector_size(16)));
#define TILE
TILE inline Vector multiply_add(Vector a, Vector b, Vector sum) { return a * b + sum; }
#include "matmul_tile.h"
#undef TILE
}  // namespace base

namespace avx2 {
constexpr int kWidth = 8;
constexpr bool kHasDot = false;
typedef float Vector __attribute__((vector_size(32)));
typedef uint32_t Bits __attribute__((vector_size(32)));
#define TILE ON_AVX2
TILE inline Vector multiply_add(Vector a, Vector b, Vector sum) {
    return _mm256_fmadd_ps(a, b, sum);
}
#include "matmul_tile.h"
#undef TILE
}  // namespace avx2

typedef float WideVector __attribute__((vector_size(64)));
typedef uint32_t WideBits __attribute__((vector_size(64)));

namespace avx512 {
constexpr int kWidth = 16;
constexpr bool kHasDot = false;
using Vector = WideVector;
using Bits = WideBits;
#define TILE __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
TILE inline Vector multiply_add(Vector a, Vector b, Vector sum) {
    return _mm512_fmadd_ps(a, b, sum);
}
#include "matmul_tile.h"
#undef TILE
}  // namespace avx512

namespace dot {
constexpr int kWidth = 16;
constexpr bool kHasDot = true;
using Vector = WideVector;
using Bits = WideBits;
#define TILE DOT
TILE inline Vector multiply_add(Vector a, Vector b, Vector sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}
#include "matmul_tile.h"
#undef TILE
}  // namespace dot

namespace {

#define ROW_OF_4(tile, R, ...) \
    {tile<__VA_ARGS__, R, 1>, tile<__VA_ARGS__, R, 2>, tile<__VA_ARGS__, R, 3>, \
     tile<__VA_ARGS__, R, 4>}
#define ROW_OF_2(tile, R, ...) {tile<__VA_ARGS__, R, 1>, tile<__VA_ARGS__, R, 2>, nullptr, nullptr}
#define ROW_OF_1(tile, R, ...) {tile<__VA_ARGS__, R, 1>, nullptr, nullptr, nullptr}

// 32 registers: 6 x 64 outputs.
#define WIDE_TILES(tile, ...)                                                              \
    {{ROW_OF_4(tile, 1, __VA_ARGS__), ROW_OF_4(tile, 2, __VA_ARGS__),                      \
      ROW_OF_4(tile, 3, __VA_ARGS__), ROW_OF_4(tile, 4, __VA_ARGS__),                      \
      ROW_OF_4(tile, 5, __VA_ARGS__), ROW_OF_4(tile, 6, __VA_ARGS__)},                     \
     6, {4, 4, 4, 4, 4, 4}}
// 16 registers of 8: 1 x 64, 3 x 32, 6 x 16.
#define MIDDLE_TILES(tile, ...)                                                            \
    {{ROW_OF_4(tile, 1, __VA_ARGS__), ROW_OF_2(tile, 2, __VA_ARGS__),                      \
      ROW_OF_2(tile, 3, __VA_ARGS__), ROW_OF_1(tile, 4, __VA_ARGS__),                      \
      ROW_OF_1(tile, 5, __VA_ARGS__), ROW_OF_1(tile, 6, __VA_ARGS__)},                     \
     6, {4, 2, 2, 1, 1, 1}}
// 16 registers of 4: 1 x 32, 3 x 16.
#define NARROW_TILES(tile, ...)                                                            \
    {{ROW_OF_2(tile, 1, __VA_ARGS__), ROW_OF_1(tile, 2, __VA_ARGS__),                      \
      ROW_OF_1(tile, 3, __VA_ARGS__)},                                                     \
     3, {2, 1, 1}}
// By instruction set.
#define ALL_TILES(...)                                                                     \
    {NARROW_TILES(base::tile, __VA_ARGS__), MIDDLE_TILES(avx2::tile, __VA_ARGS__),         \
     WIDE_TILES(avx512::tile, __VA_ARGS__)}

const Tiles kFloatTiles[][3] = {ALL_TILES(Format::kFloat, false), ALL_TILES(Format::kFloat, true)};
const Tiles kBf16Tiles[][3] = {ALL_TILES(Format::kBf16, false), ALL_TILES(Format::kBf16, true)};
const Tiles kDotTiles[] = {WIDE_TILES(dot::tile, Format::kBf16, false),
                           WIDE_TILES(dot::tile, Format::kBf16, true)};

}  // namespace

const Tiles& vector_tiles(Format format, Isa isa, bool strips) {
    if (format == Format::kBf16 && isa >= kAvx512Bf16) return kDotTiles[strips];
    const auto& tiles = format == Format::kFloat ? kFloatTiles : kBf16Tiles;
    return tiles[strips][isa < kAvx512 ? isa : kAvx512];
}

}  // namespace hetero
