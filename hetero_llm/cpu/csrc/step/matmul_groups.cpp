// Products of packed int4, and of int8 with groups: exact sums of integers in a group, which are
// scaled and added to float sums in the order of k, by a fused multiply-add at every level: results
// are equal to the last bit.
//
// int4 is unpacked in registers, for up to kMostRows rows at once.

#include "matmul_groups.h"

#include <cmath>

namespace hetero {
namespace {

// Strips of one panel and whole groups of k. x_corrections: see `Rows`.
struct GroupCall {
    const char* panel;      // first group
    GroupLayout layout;
    Groups groups;
    int32_t centre;         // of the integers
    int64_t strip;          // first one in the panel
    int64_t depth;          // k of all groups of the call
    const int8_t* x;        // first row and k
    int64_t x_stride;       // bytes, of x, x_scales and x_corrections
    const float* x_scales;  // first row and group
    const int32_t* x_corrections;
    float* out;
    int64_t out_stride;     // elements
    bool add;               // to what `out` holds
    const char* ahead;      // weights to prefetch
    int64_t lines;          // cache lines of them for each `unit` of k
    int64_t unit;           // four steps
};
using GroupTile = void (*)(const GroupCall& call);

// tile[r - 1][i] multiplies r rows with 1 << i strips; strips[r - 1] is the number of strips of the
// widest tile for r rows.
constexpr int kMostRows = 8;
struct GroupTiles {
    GroupTile tile[kMostRows][3];
    int rows;
    int strips[kMostRows];
};

template <typename T>
inline T of_group(const GroupCall& c, const T* values, int64_t r, int64_t group) {
    return *(const T*)((const char*)(values + group) + r * c.x_stride);
}
inline float x_scale_of(const GroupCall& c, int64_t r, int64_t group) {
    return of_group(c, c.x_scales, r, group);
}
inline int32_t x_correction_of(const GroupCall& c, int64_t r, int64_t group) {
    return of_group(c, c.x_corrections, r, group);
}

// -- any processor --------------------------------------------------------------------------------

float read_scale(const GroupCall& c, const char* at, int64_t output) {
    return c.groups.half_scales ? half_to_float(read_one<uint16_t>(at + 2 * output))
                                : read_one<float>(at + 4 * output);
}

// One row. Plain loops over the outputs, which GCC makes vectors of.
template <bool kInt4, int S>
void base_tile(const GroupCall& c) {
    constexpr int N = S * kStrip;
    const char* header = c.panel;
    const int8_t* x = c.x;
    float out[N] = {};
    if (c.add) std::memcpy(out, c.out, sizeof out);
    for (int64_t g = 0, left = c.depth; left > 0; ++g, left -= c.groups.size) {
        const int64_t here = least(left, c.groups.size);
        int32_t sums[N] = {};
        const char* w = header + c.layout.data_at + c.strip * 64;
        for (int64_t k = 0; k < here; k += kInt4 ? 8 : 4, w += kStepBytes, x += kInt4 ? 8 : 4)
            for (int n = 0; n < N; ++n) {
                if constexpr (kInt4)
                    for (int j = 0; j < 4; ++j)
                        sums[n] += x[j] * (w[4 * n + j] & 15) +
                                   x[4 + j] * ((uint8_t)w[4 * n + j] >> 4);
                else
                    for (int j = 0; j < 4; ++j) sums[n] += x[j] * (int8_t)w[4 * n + j];
            }
        for (int n = 0; n < N; ++n) {
            const int64_t output = c.strip * kStrip + n;
            int32_t point = c.centre;
            if (c.groups.zeros == Zeros::kPoints)
                point += (uint8_t)header[c.layout.zeros_at + output];
            const float scale = read_scale(c, header, output) * c.x_scales[g];
            out[n] = std::fma((float)(sums[n] + point * c.x_corrections[g]), scale, out[n]);
            if (c.groups.zeros == Zeros::kOffsets)
                out[n] = std::fma(read_scale(c, header + c.layout.zeros_at, output),
                                  bit_cast<float>(c.x_corrections[g]), out[n]);
        }
        header += c.layout.bytes;
    }
    std::memcpy(c.out, out, sizeof out);
}

// -- AVX2 -----------------------------------------------------------------------------------------

#define HALVES __attribute__((target("avx2,fma,f16c")))

HALVES inline __m256 read_scales(const GroupCall& c, const char* at, int64_t output) {
    if (!c.groups.half_scales) return _mm256_loadu_ps((const float*)(at + 4 * output));
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(at + 2 * output)));
}

HALVES inline __m256i spread_half(const int8_t* four) {
    return _mm256_set1_epi32(read_one<int32_t>(four));
}

// 32 k of one row and 8 outputs. Codes up to 15 leave sums of 16 products in 16 bits; of int8 the
// absolute weights meet the row in the weights' signs, in which a sum of two fits: nothing in a row
// is below -127.
template <bool kInt4>
HALVES inline __m256i dot(const char* w, const int8_t* x, __m256i sum) {
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
    if constexpr (kInt4) {
        __m256i twos = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const __m256i both = _mm256_loadu_si256((const __m256i*)(w + j * kStepBytes));
            const __m256i first = _mm256_and_si256(both, low);
            const __m256i second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
            twos = _mm256_add_epi16(twos, _mm256_maddubs_epi16(first, spread_half(x + 8 * j)));
            twos = _mm256_add_epi16(twos, _mm256_maddubs_epi16(second, spread_half(x + 8 * j + 4)));
        }
        return _mm256_add_epi32(sum, _mm256_madd_epi16(twos, ones));
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const __m256i b = _mm256_loadu_si256((const __m256i*)(w + j * kStepBytes));
        const __m256i signs = _mm256_sign_epi8(spread_half(x + 4 * j), b);
        const __m256i twos = _mm256_maddubs_epi16(_mm256_abs_epi8(b), signs);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(twos, ones));
    }
    return sum;
}

template <bool kInt4, int R, int S>
HALVES void avx2_tile(const GroupCall& c) {
    constexpr int N = S * 2;
    constexpr int64_t kTogether = kInt4 ? 32 : 16;
    const char* header = c.panel;
    const int8_t* x = c.x;
    for (int64_t g = 0, left = c.depth; left > 0; ++g, left -= c.groups.size) {
        const int64_t here = least(left, c.groups.size);
        __m256i sums[R][N];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) sums[r][n] = _mm256_setzero_si256();
        const char* w = header + c.layout.data_at + c.strip * 64;
        for (int64_t k = 0; k < here; k += kTogether, w += 4 * kStepBytes, x += kTogether)
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r)
                    sums[r][n] = dot<kInt4>(w + n * 32, x + r * c.x_stride, sums[r][n]);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            const int64_t output = c.strip * kStrip + n * 8;
            const __m256 scale = read_scales(c, header, output);
            __m256i points = _mm256_set1_epi32(c.centre);
            if (c.groups.zeros == Zeros::kPoints) {
                const char* at = header + c.layout.zeros_at + output;
                const __m256i own = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at));
                points = _mm256_add_epi32(points, own);
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                float* to = c.out + r * c.out_stride + n * 8;
                const float x_scale = x_scale_of(c, r, g);
                const int32_t correction = x_correction_of(c, r, g);
                const __m256i total = _mm256_add_epi32(  // as times_points
                    sums[r][n], _mm256_madd_epi16(points, _mm256_set1_epi32(correction)));
                __m256 out = c.add || g ? _mm256_loadu_ps(to) : _mm256_setzero_ps();
                out = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total),
                                      _mm256_mul_ps(scale, _mm256_set1_ps(x_scale)), out);
                if (c.groups.zeros == Zeros::kOffsets)
                    out = _mm256_fmadd_ps(read_scales(c, header + c.layout.zeros_at, output),
                                          _mm256_set1_ps(bit_cast<float>(correction)), out);
                _mm256_storeu_ps(to, out);
            }
        }
        header += c.layout.bytes;
    }
}

// -- AVX-512 with 8-bit dot products --------------------------------------------------------------

#define VNNI __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#define VNNI_INLINE VNNI inline __attribute__((always_inline))

// sum + the dot products of each four unsigned weights with x. Around its intrinsic GCC 12 copies
// the sums of a large tile, and spills them.
VNNI_INLINE __m512i dot(__m512i sum, __m512i weights, __m512i x) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(x));
    return sum;
}

VNNI_INLINE __m512i spread(const int8_t* four) {
    return _mm512_set1_epi32(read_one<int32_t>(four));
}

// Four steps of R rows and S strips. The instruction wants unsigned times signed: int4 is unsigned,
// int8 is moved up by 128.
template <bool kInt4, int R, int S>
VNNI_INLINE void four_steps(const char* w, const int8_t* x, int64_t x_stride,
                            __m512i (&sums)[R][S]) {
    const __m512i up = _mm512_set1_epi8(-128), low = _mm512_set1_epi8(15);
    constexpr int64_t kOne = kInt4 ? 8 : 4;
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j, w += kStepBytes, x += kOne) {
        __m512i both[S], b[S];
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s) {
            both[s] = _mm512_loadu_si512(w + s * 64);
            b[s] = kInt4 ? _mm512_and_si512(both[s], low) : _mm512_xor_si512(both[s], up);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m512i a = spread(x + r * x_stride);
#pragma GCC unroll 4
            for (int s = 0; s < S; ++s) sums[r][s] = dot(sums[r][s], b[s], a);
        }
        if constexpr (kInt4) {
#pragma GCC unroll 4
            for (int s = 0; s < S; ++s)
                b[s] = _mm512_and_si512(_mm512_srli_epi16(both[s], 4), low);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const __m512i a = spread(x + r * x_stride + 4);
#pragma GCC unroll 4
                for (int s = 0; s < S; ++s) sums[r][s] = dot(sums[r][s], b[s], a);
            }
        }
    }
}

// Sums begin with what the zero points take off. kZeros is a parameter because GCC leaves its
// branches in the loops.
template <bool kInt4, Zeros kZeros, int R, int S>
VNNI void vnni_tile(const GroupCall& call) {
    constexpr int64_t kTogether = kInt4 ? 32 : 16;
    constexpr bool kHasSums = !kInt4 || kZeros != Zeros::kOffsets;
    const GroupCall c = call;  // a copy that stores to `out` cannot change
    const int32_t centre = kInt4 ? c.centre : 128;
    const bool halves = c.groups.half_scales;
    const int64_t output = c.strip * kStrip;
    const char *header = c.panel, *ahead = c.ahead;
    const int8_t* x = c.x;
    constexpr bool kKeep = R * S <= 8;  // results in registers
    __m512 kept[R][S];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s) {
            float* out = c.out + r * c.out_stride + s * kStrip;
            kept[r][s] = kKeep && c.add ? _mm512_loadu_ps(out) : _mm512_setzero_ps();
            if (!kKeep && !c.add) _mm512_storeu_ps(out, kept[r][s]);
        }
    for (int64_t g = 0, left = c.depth; left > 0; ++g, left -= c.groups.size) {
        const int64_t here = least(left, c.groups.size);
        __m512i sums[R][S];
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s) {
            const __m512i points = wide_points(kZeros == Zeros::kPoints, header + c.layout.zeros_at,
                                               output + s * kStrip, centre);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                sums[r][s] = kHasSums ? times_points(points, x_correction_of(c, r, g))
                                      : _mm512_setzero_si512();
        }
        const char* w = header + c.layout.data_at + c.strip * 64;
        for (int64_t k = 0; k < here; k += kTogether, w += 4 * kStepBytes, x += kTogether) {
            for (int64_t i = 0; i < c.lines; ++i, ahead += 64) __builtin_prefetch(ahead, 0, 2);
            four_steps<kInt4, R, S>(w, x, c.x_stride, sums);
        }
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s) {
            const __m512 scale = wide_scales(halves, header, output + s * kStrip);
            __m512 offset = _mm512_setzero_ps();
            if constexpr (kZeros == Zeros::kOffsets)
                offset = wide_scales(halves, header + c.layout.zeros_at, output + s * kStrip);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                float* to = c.out + r * c.out_stride + s * kStrip;
                __m512 out = kKeep ? kept[r][s] : _mm512_loadu_ps(to);
                out = _mm512_fmadd_ps(
                    to_floats(sums[r][s]),
                    _mm512_mul_ps(scale, _mm512_set1_ps(x_scale_of(c, r, g))), out);
                if constexpr (kZeros == Zeros::kOffsets)
                    out = _mm512_fmadd_ps(
                        offset, _mm512_set1_ps(bit_cast<float>(x_correction_of(c, r, g))), out);
                if constexpr (kKeep) kept[r][s] = out;
                else _mm512_storeu_ps(to, out);
            }
        }
        header += c.layout.bytes;
    }
    if constexpr (kKeep)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int s = 0; s < S; ++s)
                _mm512_storeu_ps(c.out + r * c.out_stride + s * kStrip, kept[r][s]);
}

#define NARROW(tile, R, ...) {tile<__VA_ARGS__, R, 1>, tile<__VA_ARGS__, R, 2>}
#define ROW(tile, R, ...) \
    {tile<__VA_ARGS__, R, 1>, tile<__VA_ARGS__, R, 2>, tile<__VA_ARGS__, R, 4>}
#define BASE(kInt4) {{{base_tile<kInt4, 1>, base_tile<kInt4, 2>, base_tile<kInt4, 4>}}, 1, {4}}
#define AVX2(kInt4)                                                                      \
    {{ROW(avx2_tile, 1, kInt4), NARROW(avx2_tile, 2, kInt4), {avx2_tile<kInt4, 3, 1>},   \
      {avx2_tile<kInt4, 4, 1>}}, 4, {4, 2, 1, 1}}
#define VNNI_TILES(...)                                                                  \
    {{ROW(vnni_tile, 1, __VA_ARGS__), ROW(vnni_tile, 2, __VA_ARGS__),                    \
      ROW(vnni_tile, 3, __VA_ARGS__), ROW(vnni_tile, 4, __VA_ARGS__),                    \
      NARROW(vnni_tile, 5, __VA_ARGS__), NARROW(vnni_tile, 6, __VA_ARGS__),              \
      NARROW(vnni_tile, 7, __VA_ARGS__), NARROW(vnni_tile, 8, __VA_ARGS__)},             \
     kMostRows, {4, 4, 4, 4, 2, 2, 2, 2}}
#define BY_ZEROS(kInt4)                                                                  \
    {VNNI_TILES(kInt4, Zeros::kNone), VNNI_TILES(kInt4, Zeros::kPoints),                 \
     VNNI_TILES(kInt4, Zeros::kOffsets)}

// By whether they take int4, and by Zeros.
const GroupTiles kBaseTiles[] = {BASE(false), BASE(true)};
const GroupTiles kAvx2Tiles[] = {AVX2(false), AVX2(true)};
const GroupTiles kVnniTiles[][3] = {BY_ZEROS(false), BY_ZEROS(true)};

// All rows with strips [strip, strip + strips) of one panel, of which `call` is the first.
// c.lines: of the next block, for all tiles together; each prefetches its share.
void multiply_strips(const GroupTiles& tiles, GroupCall c, int64_t rows, int64_t strips) {
    const int64_t parts = (rows + tiles.rows - 1) / tiles.rows;
    const int64_t width = tiles.strips[(rows + parts - 1) / parts - 1];
    const int64_t passes = parts * ((strips + width - 1) / width), units = c.depth / c.unit;
    const int64_t share = (c.lines + passes - 1) / passes;
    int64_t left = c.lines;
    const GroupCall first = c;
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t r = rows * part / parts, count = rows * (part + 1) / parts - r;
        c.x = first.x + r * c.x_stride;
        c.x_scales = (const float*)((const char*)first.x_scales + r * c.x_stride);
        c.x_corrections = (const int32_t*)((const char*)first.x_corrections + r * c.x_stride);
        for (int64_t s = 0, wide; s < strips; s += wide) {
            const int64_t most = least(tiles.strips[count - 1], strips - s);
            const int kind = most >= 4 ? 2 : most >= 2 ? 1 : 0;
            wide = 1 << kind;
            c.strip = first.strip + s;
            c.out = first.out + r * c.out_stride + s * kStrip;
            c.lines = least(share, left);
            tiles.tile[count - 1][kind](c);
            c.ahead += c.lines * 64 * units;
            left -= c.lines;
        }
    }
}

}  // namespace

void multiply_groups(const Matrix& matrix, const Rows& x, int64_t rows, int64_t first,
                     int64_t strips, float* out, int64_t out_stride, Isa isa) {
    const bool vnni = isa >= kAvx512 && has_vnni(), is_int4 = matrix.format == Format::kInt4;
    const GroupTiles& tiles = vnni            ? kVnniTiles[is_int4][(int)matrix.groups.zeros]
                              : isa >= kAvx2 ? kAvx2Tiles[is_int4]
                                             : kBaseTiles[is_int4];
    const int64_t size = matrix.groups.size, last = first + strips;
    const bool is_one_pass = rows <= tiles.rows && tiles.strips[rows - 1] == kTileStrips;
    GroupCall c{};
    c.layout = group_layout(matrix);
    const int64_t block = is_one_pass ? c.layout.count * size : block_depth(matrix.groups);
    c.groups = matrix.groups;
    c.centre = is_int4 && matrix.groups.zeros == Zeros::kNone ? kInt4Zero : 0;
    c.x_stride = x.stride;
    c.out_stride = out_stride;
    c.unit = is_int4 ? 32 : 16;
    // Not in a single pass: it is one stream, which processors prefetch better by themselves.
    const int64_t units = size / c.unit;
    c.lines = is_one_pass ? 0 : (c.layout.bytes / 64 + units - 1) / units;
    const int8_t* row = (const int8_t*)x.data;
    // Panels inside: their block of many rows' inputs stays in L2.
    for (int64_t begin = 0; begin < matrix.padded_depth; begin += block) {
        const int64_t group = begin / size;
        c.depth = least(block, matrix.padded_depth - begin);
        c.add = begin > 0;
        c.x = row + begin;
        c.x_scales = scales_of_row(row, matrix.padded_depth) + group;
        c.x_corrections = corrections_of_row(row, matrix.padded_depth, c.layout.count) + group;
        for (int64_t strip = first, next; strip < last; strip = next) {
            next = least(last, (strip / kTileStrips + 1) * kTileStrips);
            c.panel = (const char*)matrix.data + strip / kTileStrips * c.layout.panel_bytes +
                      group * c.layout.bytes;
            c.strip = strip % kTileStrips;
            c.out = out + strip * kStrip;
            c.ahead = c.panel + (strips > kTileStrips ? c.layout.panel_bytes
                                                      : c.depth / size * c.layout.bytes);
            multiply_strips(tiles, c, rows, next - strip);
        }
    }
}

}  // namespace hetero
