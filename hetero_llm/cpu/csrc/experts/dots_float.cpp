// Dot products in float for every vector instruction set.

#include <cstring>

#include "../step/lanes.h"
#include "dot_kernels.h"

namespace hetero::experts {
namespace {

template <int N>
using Integers = typename Lanes<N>::Integer;
template <int N>
struct Codes {
    typedef uint8_t Unsigned __attribute__((vector_size(N)));
    typedef int8_t Signed __attribute__((vector_size(N)));
};

// N weights of a row from place k of 0, 1 or 2 bytes each on.
template <Kind kKind, int N>
INLINE Floats<N> weights_at(const char* row, int64_t k) {
    if constexpr (kKind == Kind::kFloat) return read<N>((const float*)row + k);
    else if constexpr (kKind == Kind::kBf16) return read<N>((const Bf16*)row + k);
    else if constexpr (kKind == Kind::kHalf) {
        // Exponents are moved, those of infinity twice; numbers below the first exponent as in fp8.
        const auto halves = read_one<typename Lanes<N>::Half>(row + 2 * k);
        const Words<N> code = __builtin_convertvector(halves, Words<N>), absolute = code & 0x7fffu;
        const Words<N> small = (Words<N>)((Integers<N>)absolute < 0x400);
        const Words<N> large = (Words<N>)((Integers<N>)absolute >= 0x7c00);
        const Words<N> base = (absolute << 13) + (112u << 23) + (small & (1u << 23));
        const Words<N> first = small & 0x38800000u;  // 2^-14
        const Words<N> bits = (Words<N>)((Floats<N>)base - (Floats<N>)first);
        return (Floats<N>)((bits + (large & (112u << 23))) | (code & 0x8000u) << 16);
    } else if constexpr (kKind == Kind::kInt8) {
        const auto bytes = read_one<typename Codes<N>::Signed>(row + k);
        return __builtin_convertvector(__builtin_convertvector(bytes, Integers<N>), Floats<N>);
    } else {
        // e4m3: exponents are moved; numbers below the first exponent get one, whose value comes
        // off again.
        const auto bytes = read_one<typename Codes<N>::Unsigned>(row + k);
        const Words<N> code = __builtin_convertvector(bytes, Words<N>), absolute = code & 127u;
        const Words<N> small = (Words<N>)((Integers<N>)absolute < 8);
        const Words<N> base = (absolute << 20) + (120u << 23) + (small & (1u << 23));
        const Words<N> first = small & 0x3c800000u;  // 2^-6
        const Words<N> bits = (Words<N>)((Floats<N>)base - (Floats<N>)first);
        const Words<N> nan = (Words<N>)((Integers<N>)absolute == 127) & 0x7fc00000u;
        return (Floats<N>)(bits | nan | (code & 128u) << 24);
    }
}

// The 4-bit codes at bit `shift` of N words.
template <Kind kKind, int N>
INLINE Floats<N> codes_at(Words<N> words, int shift, bool has_zeros) {
    const Integers<N> code = (Integers<N>)(words >> (uint32_t)shift & 15u);
    if constexpr (kKind == Kind::kInt4)
        return __builtin_convertvector(has_zeros ? code : code - kInt4Centre, Floats<N>);
    // e2m1: 0, 0.5, then an exponent and half a bit: twice its value is an integer up to 12.
    const Integers<N> absolute = code & 7;
    const Integers<N> exponent = absolute >> 1, fraction = absolute & 1;
    Integers<N> twice = absolute;  // exponents 0 and 1
    twice = exponent == 2 ? (fraction << 1) + 4 : twice;
    twice = exponent == 3 ? (fraction << 2) + 8 : twice;
    twice = code > 7 ? -twice : twice;
    return __builtin_convertvector(twice, Floats<N>) * 0.5f;
}

// A product that is rounded before anything is added to it. Compilers contract a product and a sum in
// some tiles and not in others, and a token's result would depend on how many tokens are computed.
template <int N>
INLINE Floats<N> rounded(Floats<N> product) {
    __asm__("" : "+v"(product));
    return product;
}

template <int N, int W, int R>
INLINE void finish(const DotCall& c, const Floats<N> (&sums)[W][R]) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        const Floats<4> all = totals<N>(sums[0][r], sums[W > 1 ? 1 : 0][r], sums[0][r], sums[0][r]);
        std::memcpy(c.out + r * c.out_stride, &all, W * sizeof(float));
    }
}

template <int W>
INLINE void fetch(const DotCall& c, int64_t at) {
#pragma GCC unroll 2
    for (int i = 0; i < W; ++i) __builtin_prefetch(c.ahead[i] + at, 0, 2);
}

template <int W, int R, int N>
INLINE void clear(Floats<N> (&sums)[W][R]) {
#pragma GCC unroll 2
    for (int i = 0; i < W; ++i)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[i][r] = Floats<N>{};
}

template <Kind kKind, int N, int W, int R>
INLINE void step(const DotCall& c, const char* const (&rows)[W], int64_t k, int64_t x_at,
                 Floats<N> (&sums)[W][R]) {
    Floats<N> w[W];
#pragma GCC unroll 2
    for (int i = 0; i < W; ++i) w[i] = weights_at<kKind, N>(rows[i], k);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        const Floats<N> x = read<N>((const float*)c.x[r] + x_at);
#pragma GCC unroll 2
        for (int i = 0; i < W; ++i) sums[i][r] += x * w[i];
    }
}

// 8, 16 or 32 bits a weight.
template <Kind kKind, int N, int W, int R>
INLINE void plain_tile(const DotCall& c) {
    const Form& form = *c.form;
    const int64_t depth = form.depth, group = has_scales(kKind) ? form.group : depth;
    constexpr int64_t kBytes = row_bytes(kKind, 1);
    Floats<N> totals[W][R];
    clear<W, R, N>(totals);
    const char* rows[W];
    for (int i = 0; i < W; ++i) rows[i] = c.w[i];
    for (int64_t g = 0, k = 0; k < depth; ++g) {
        const int64_t end = k + group < depth ? k + group : depth;
        Floats<N> sums[W][R];
        clear<W, R, N>(sums);
        for (; k + N <= end; k += N) {
            if (k * kBytes % 64 == 0) fetch<W>(c, k * kBytes);
            step<kKind, N, W, R>(c, rows, k, k, sums);
        }
        if (k < end) {
            char rest[W][N * kBytes];
            const char* at[W];
            for (int i = 0; i < W; ++i) {
                std::memset(rest[i], 0, sizeof rest[i]);
                std::memcpy(rest[i], rows[i] + k * kBytes, (end - k) * kBytes);
                at[i] = rest[i];
            }
            step<kKind, N, W, R>(c, at, 0, k, sums);
            k = end;
        }
#pragma GCC unroll 2
        for (int i = 0; i < W; ++i) {
            const float scale = has_scales(kKind) ? number_at(form.scale, c.scales[i], g) : 1.0f;
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
                totals[i][r] = has_scales(kKind)
                                   ? totals[i][r] + rounded<N>(sums[i][r] * scale)
                                   : sums[i][r];
        }
    }
    finish<N, W, R>(c, totals);
}

// N words of 8 codes are 8 N columns. x is ordered so that code j of word i lies at j N + i: a
// lane's columns are neighbours, 8 of one group.
template <Kind kKind, int N, int W, int R>
INLINE void word_tile(const DotCall& c) {
    const Form& form = *c.form;
    const bool has_points = form.zeros == Zeros::kPoints, has_zeros = form.zeros != Zeros::kNone;
    const int64_t bytes = form.taken_bytes(), group_words = form.group / 8;
    const bool is_one = form.is_one_group();
    Floats<N> totals[W][R];
    clear<W, R, N>(totals);
    for (int64_t at = 0; at < bytes; at += 4 * N) {
        if (at % 64 == 0) fetch<W>(c, at);
        const int64_t here = bytes - at < 4 * N ? bytes - at : 4 * N;
        Floats<N> of_x[R] = {};
        if (has_zeros)
            for (int r = 0; r < R; ++r)
                for (int j = 0; j < 8; ++j)
                    of_x[r] += read<N>((const float*)c.x[r] + at * 2 + j * N);
#pragma GCC unroll 2
        for (int i = 0; i < W; ++i) {
            Words<N> words{};
            if (here == 4 * N) std::memcpy(&words, c.w[i] + at, sizeof words);
            else std::memcpy(&words, c.w[i] + at, here);
            Floats<N> sums[R] = {};
            for (int j = 0; j < 8; ++j) {
                const Floats<N> w = codes_at<kKind, N>(words, 4 * j, has_zeros);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r)
                    sums[r] += w * read<N>((const float*)c.x[r] + at * 2 + j * N);
            }
            Floats<N> scale{}, shift{};
            for (int lane = 0; lane * 4 < here; lane += 4) {
                // Groups have multiples of 4 words, so 4 lanes share one.
                const int64_t g = is_one ? 0 : (at / 4 + lane) / group_words;
                const float value = number_at(form.scale, c.scales[i], g);
                const float own = has_points  ? -value * (float)(uint8_t)c.zeros[i][g]
                                  : has_zeros ? number_at(form.scale, c.zeros[i], g)
                                              : 0.0f;
                for (int l = lane; l < lane + 4; ++l) {
                    scale[l] = value;
                    shift[l] = own;
                }
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                totals[i][r] += rounded<N>(sums[r] * scale);
                totals[i][r] += rounded<N>(shift * of_x[r]);
            }
        }
    }
    finish<N, W, R>(c, totals);
}

template <Kind kKind, int N, int W, int R>
INLINE void tile_lanes(const DotCall& c) {
    if constexpr (is_4_bit(kKind)) word_tile<kKind, N, W, R>(c);
    else plain_tile<kKind, N, W, R>(c);
}

template <Kind kKind, int W, int R>
ON_AVX512 void tile_16(const DotCall& c) { tile_lanes<kKind, 16, W, R>(c); }
template <Kind kKind, int W, int R>
ON_AVX2 void tile_8(const DotCall& c) { tile_lanes<kKind, 8, W, R>(c); }
template <Kind kKind, int W, int R>
void tile_4(const DotCall& c) { tile_lanes<kKind, 4, W, R>(c); }

#define TILES(tile, kind)                                                                        \
    {{tile<kind, 2, 1>, tile<kind, 2, 2>, tile<kind, 2, 4>},                                     \
     {tile<kind, 1, 1>, tile<kind, 1, 2>, tile<kind, 1, 4>}, {2, 2, 2}}
#define WIDTHS(kind) {TILES(tile_4, kind), TILES(tile_8, kind), TILES(tile_16, kind)}

const DotTiles kTiles[][3] = {WIDTHS(Kind::kFloat), WIDTHS(Kind::kBf16), WIDTHS(Kind::kHalf),
                              WIDTHS(Kind::kInt8),  WIDTHS(Kind::kFp8),  WIDTHS(Kind::kInt4),
                              WIDTHS(Kind::kFp4)};

}  // namespace

const DotTiles& float_dots(Kind kind, Isa isa) {
    return kTiles[(int)kind][isa >= kAvx512 ? 2 : isa >= kAvx2 ? 1 : 0];
}

}  // namespace hetero::experts
