// Dot products in bf16: rows of bf16 weights as they are, integers, fp8 and 4-bit codes as the bf16
// that stand for them exactly, looked up byte by byte.

#include "../step/lanes.h"
#include "codes.h"
#include "dot_kernels.h"

namespace hetero::experts {
namespace {

#define FAST                                                                                       \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi")))
#define FAST_INLINE FAST inline __attribute__((always_inline))

constexpr int64_t kLine = 64;

// Integers are looked up as w + 0.5, whose absolute values are the same for w and -1 - w: seven
// bits are the index. Kernels take 0.5 times the sum of the row off.
const Tables kInt8Tables = make_tables(128, [](int i) { return i + 0.5f; });

const Tables kInt4Tables = make_tables(16, [](int i) { return (float)(i - kInt4Centre); });
const Tables kCodeTables = make_tables(16, [](int i) { return (float)i; });

FAST_INLINE __m512i load(const char* p) { return _mm512_loadu_si512(p); }
FAST_INLINE __m512i load_some(const char* p, int64_t bytes) {
    return _mm512_maskz_loadu_epi8(((uint64_t)1 << bytes) - 1, p);
}
FAST_INLINE __m512bh as_bf16(__m512i v) { return (__m512bh)v; }
FAST_INLINE __m512 dot(__m512 sum, __m512bh a, const char* x) {
    return _mm512_dpbf16_ps(sum, a, as_bf16(_mm512_loadu_si512(x)));
}

// 64 bytes of a row as `kVectors` vectors of bf16.
template <Kind kKind, Zeros kZeros>
struct Decoder;

template <>
struct Decoder<Kind::kBf16, Zeros::kNone> {
    static constexpr int kVectors = 1;
    FAST_INLINE void begin() {}
    FAST_INLINE void decode(__m512i raw, __m512bh (&to)[1]) const { to[0] = as_bf16(raw); }
};

template <Kind kKind>
struct ByteDecoder {
    static constexpr int kVectors = 2;
    __m512i high0, high1, low0, low1;
    FAST_INLINE void begin() {
        const Tables& tables = kKind == Kind::kInt8 ? kInt8Tables : kFp8Tables;
        high0 = _mm512_load_si512(tables.high);
        high1 = _mm512_load_si512(tables.high + 64);
        low0 = _mm512_load_si512(tables.low);
        low1 = _mm512_load_si512(tables.low + 64);
    }
    FAST_INLINE void decode(__m512i raw, __m512bh (&to)[2]) const {
        __m512i index = raw;  // its lowest seven bits
        if constexpr (kKind == Kind::kInt8)
            index = _mm512_mask_sub_epi8(raw, _mm512_movepi8_mask(raw), _mm512_set1_epi8(-1), raw);
        const __m512i low = _mm512_permutex2var_epi8(low0, index, low1);
        const __m512i absolute = _mm512_permutex2var_epi8(high0, index, high1);
        // absolute | (raw & sign)
        const __m512i high =
            _mm512_ternarylogic_epi32(absolute, raw, _mm512_set1_epi8(-128), 0xf8);
        to[0] = as_bf16(_mm512_unpacklo_epi8(low, high));
        to[1] = as_bf16(_mm512_unpackhi_epi8(low, high));
    }
};
template <>
struct Decoder<Kind::kInt8, Zeros::kNone> : ByteDecoder<Kind::kInt8> {};
template <>
struct Decoder<Kind::kFp8, Zeros::kNone> : ByteDecoder<Kind::kFp8> {};

template <Kind kKind, Zeros kZeros>
struct Decoder {
    static constexpr int kVectors = 4;
    __m512i high_table, low_table;
    FAST_INLINE void begin() {
        const Tables& tables = kKind == Kind::kFp4 ? kFp4Tables
                               : kZeros == Zeros::kNone ? kInt4Tables
                                                        : kCodeTables;
        high_table = _mm512_load_si512(tables.high);
        low_table = _mm512_load_si512(tables.low);
    }
    FAST_INLINE void decode(__m512i raw, __m512bh (&to)[4]) const {
        const __m512i mask = _mm512_set1_epi8(15);
        const __m512i first = _mm512_and_si512(raw, mask);
        const __m512i second = _mm512_and_si512(_mm512_srli_epi16(raw, 4), mask);
        __m512i low = _mm512_shuffle_epi8(low_table, first);
        __m512i high = _mm512_shuffle_epi8(high_table, first);
        to[0] = as_bf16(_mm512_unpacklo_epi8(low, high));
        to[1] = as_bf16(_mm512_unpackhi_epi8(low, high));
        low = _mm512_shuffle_epi8(low_table, second);
        high = _mm512_shuffle_epi8(high_table, second);
        to[2] = as_bf16(_mm512_unpacklo_epi8(low, high));
        to[3] = as_bf16(_mm512_unpackhi_epi8(low, high));
    }
};

// `count` (at most 4) neighbouring scales, zeros behind them.
FAST_INLINE __m128 scales_at(Number number, const char* scales, int64_t index, int64_t count) {
    const __mmask8 mask = (__mmask8)((1 << count) - 1);
    if (number == Number::kFloat) return _mm_maskz_loadu_ps(mask, scales + 4 * index);
    const __m128i halves = _mm_maskz_loadu_epi16(mask, scales + 2 * index);
    if (number == Number::kHalf) return _mm_cvtph_ps(halves);
    return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(halves), 16));
}

// GCC takes the plain intrinsic's undefined operand for a mistake of ours.
FAST_INLINE __m512 spread(__m512i lanes, __m128 values) {
    return _mm512_maskz_permutexvar_ps(0xffff, lanes, _mm512_zextps128_ps512(values));
}

// The sums of W x R vectors, each in the same order whatever W is.
template <int W, int R>
FAST_INLINE void finish(const DotCall& c, const __m512 (&sums)[W][R]) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        float* out = c.out + r * c.out_stride;
        const auto at = [&](int i) { return (Floats<16>)sums[i < W ? i : 0][r]; };
        const Floats<4> all = totals<16>(at(0), at(1), at(2), at(3));
        std::memcpy(out, &all, W * sizeof(float));
    }
}

// Has the vectors of x read again for each row of weights where GCC would keep more of them than
// there are registers.
template <int kLoads>
FAST_INLINE void forget_loads() {
    if constexpr (kLoads > 4) __asm__ volatile("" : : : "memory");
}

template <int W>
FAST_INLINE void fetch(const DotCall& c, int64_t at) {
#pragma GCC unroll 4
    for (int i = 0; i < W; ++i) _mm_prefetch(c.ahead[i] + at, _MM_HINT_T1);
}

// -- bf16 and 8 bits: a scale for whole steps -----------------------------------------------------

template <Kind kKind, bool kTail, int W, int R>
FAST_INLINE void step(const DotCall& c, const Decoder<kKind, Zeros::kNone>& decoder, int64_t at,
                      int64_t left, __m512 (&sums)[W][R], __m512 (&halves)[R]) {
    constexpr int V = Decoder<kKind, Zeros::kNone>::kVectors;
    fetch<W>(c, at);
    if constexpr (kKind == Kind::kInt8) {
        const __m512bh half = as_bf16(_mm512_set1_epi16(0x3f00));
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v)
                halves[r] = dot(halves[r], half, (const char*)c.x[r] + at * V + v * kLine);
    }
#pragma GCC unroll 4
    for (int i = 0; i < W; ++i) {
        forget_loads<R * V>();
        const __m512i raw = kTail ? load_some(c.w[i] + at, left) : load(c.w[i] + at);
        __m512bh w[V];
        decoder.decode(raw, w);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v)
                sums[i][r] = dot(sums[i][r], w[v], (const char*)c.x[r] + at * V + v * kLine);
    }
}

template <Kind kKind, int W, int R>
FAST void byte_tile(const DotCall& call) {
    const DotCall c = call;  // a copy that stores cannot change
    const Form form = *c.form;
    Decoder<kKind, Zeros::kNone> decoder;
    decoder.begin();
    const int64_t bytes = form.taken_bytes(), group = has_scales(kKind) ? form.group : bytes;
    __m512 totals[W][R];
#pragma GCC unroll 4
    for (int i = 0; i < W; ++i)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) totals[i][r] = _mm512_setzero_ps();
    int64_t at = 0;
    for (int64_t g = 0; at < bytes; ++g) {
        const int64_t end = at + group < bytes ? at + group : bytes;
        __m512 sums[W][R], halves[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            halves[r] = _mm512_setzero_ps();
#pragma GCC unroll 4
            for (int i = 0; i < W; ++i) sums[i][r] = _mm512_setzero_ps();
        }
        for (; at + kLine <= end; at += kLine)
            step<kKind, false, W, R>(c, decoder, at, kLine, sums, halves);
        if (at < end) step<kKind, true, W, R>(c, decoder, at, end - at, sums, halves);
        at = end;
#pragma GCC unroll 4
        for (int i = 0; i < W; ++i) {
            if constexpr (!has_scales(kKind)) {
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) totals[i][r] = sums[i][r];
                continue;
            }
            const __m512 scale = _mm512_set1_ps(fast_number_at(form.scale, c.scales[i], g));
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                const __m512 sum = kKind == Kind::kInt8 ? _mm512_sub_ps(sums[i][r], halves[r])
                                                        : sums[i][r];
                totals[i][r] = _mm512_fmadd_ps(sum, scale, totals[i][r]);
            }
        }
    }
    finish<W, R>(c, totals);
}

// -- 4 bits: a step has 128 k, in one to four groups ----------------------------------------------

// Lane l of a step's sums belongs to columns of the 128-bit lane l / 4: 32 of them.
FAST_INLINE __m512i lanes_of_groups(int64_t per_step) {
    alignas(64) int32_t index[16];
    for (int i = 0; i < 16; ++i) index[i] = (int32_t)(i / 4 * per_step / 4);
    return _mm512_load_si512(index);
}

template <Kind kKind, Zeros kZeros, bool kTail, int W, int R>
FAST_INLINE void nibble_step(const DotCall& c, const Form& form,
                             const Decoder<kKind, kZeros>& decoder, __m512i lanes,
                             int64_t per_step, int64_t groups, int64_t at, int64_t left,
                             __m512 (&totals)[W][R]) {
    constexpr int V = 4;
    fetch<W>(c, at);
    const int64_t group = per_step > 1 ? at * 2 / kRowDepth * per_step : at * 2 / form.group;
    const int64_t count = groups - group < per_step ? groups - group : per_step;
    __m512 of_x[R];  // sums of x
    if constexpr (kZeros != Zeros::kNone) {
        const __m512bh one = as_bf16(_mm512_set1_epi16(0x3f80));
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            of_x[r] = _mm512_setzero_ps();
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v)
                of_x[r] = dot(of_x[r], one, (const char*)c.x[r] + at * V + v * kLine);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < W; ++i) {
        forget_loads<R * V>();
        const __m512i raw = kTail ? load_some(c.w[i] + at, left) : load(c.w[i] + at);
        __m512bh w[V];
        decoder.decode(raw, w);
        const __m512 scale = spread(lanes, scales_at(form.scale, c.scales[i], group, count));
        __m512 zero;
        if constexpr (kZeros == Zeros::kOffsets) {
            zero = spread(lanes, scales_at(form.scale, c.zeros[i], group, count));
        } else if constexpr (kZeros == Zeros::kPoints) {
            const __m128i four =
                _mm_maskz_loadu_epi8((__mmask16)((1 << count) - 1), c.zeros[i] + group);
            zero = spread(lanes, _mm_cvtepi32_ps(_mm_cvtepu8_epi32(four)));
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            __m512 sum = _mm512_setzero_ps();
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v)
                sum = dot(sum, w[v], (const char*)c.x[r] + at * V + v * kLine);
            if constexpr (kZeros == Zeros::kPoints) sum = _mm512_fnmadd_ps(zero, of_x[r], sum);
            totals[i][r] = _mm512_fmadd_ps(sum, scale, totals[i][r]);
            if constexpr (kZeros == Zeros::kOffsets)
                totals[i][r] = _mm512_fmadd_ps(zero, of_x[r], totals[i][r]);
        }
    }
}

template <Kind kKind, Zeros kZeros, int W, int R>
FAST void nibble_tile(const DotCall& call) {
    const DotCall c = call;
    const Form form = *c.form;
    Decoder<kKind, kZeros> decoder;
    decoder.begin();
    const int64_t bytes = form.taken_bytes(), groups = form.groups();
    const int64_t per_step = form.group >= kRowDepth || groups == 1 ? 1 : kRowDepth / form.group;
    const __m512i lanes = lanes_of_groups(per_step);
    __m512 totals[W][R];
#pragma GCC unroll 4
    for (int i = 0; i < W; ++i)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) totals[i][r] = _mm512_setzero_ps();
    int64_t at = 0;
    for (; at + kLine <= bytes; at += kLine)
        nibble_step<kKind, kZeros, false, W, R>(c, form, decoder, lanes, per_step, groups, at,
                                                 kLine, totals);
    if (at < bytes)
        nibble_step<kKind, kZeros, true, W, R>(c, form, decoder, lanes, per_step, groups, at,
                                                bytes - at, totals);
    finish<W, R>(c, totals);
}

// Rows of the widest tile: sums of a group beside those of the whole row leave registers for two.
#define BYTES(kind, rows)                                                                        \
    {{byte_tile<kind, 4, 1>, byte_tile<kind, 4, 2>, byte_tile<kind, rows, 4>},                   \
     {byte_tile<kind, 1, 1>, byte_tile<kind, 1, 2>, byte_tile<kind, 1, 4>}, {4, 4, rows}}
#define NIBBLES(...)                                                                             \
    {{nibble_tile<__VA_ARGS__, 4, 1>, nibble_tile<__VA_ARGS__, 4, 2>,                            \
      nibble_tile<__VA_ARGS__, 2, 4>},                                                           \
     {nibble_tile<__VA_ARGS__, 1, 1>, nibble_tile<__VA_ARGS__, 1, 2>,                            \
      nibble_tile<__VA_ARGS__, 1, 4>}, {4, 4, 2}}

const DotTiles kBf16 = BYTES(Kind::kBf16, 4), kInt8 = BYTES(Kind::kInt8, 2),
               kFp8 = BYTES(Kind::kFp8, 2);
const DotTiles kInt4[] = {NIBBLES(Kind::kInt4, Zeros::kNone), NIBBLES(Kind::kInt4, Zeros::kPoints),
                          NIBBLES(Kind::kInt4, Zeros::kOffsets)};
const DotTiles kFp4 = NIBBLES(Kind::kFp4, Zeros::kNone);

}  // namespace

const DotTiles& bf16_dots(Kind kind, Zeros zeros) {
    switch (kind) {
        case Kind::kInt8: return kInt8;
        case Kind::kFp8: return kFp8;
        case Kind::kInt4: return kInt4[(int)zeros];
        case Kind::kFp4: return kFp4;
        default: return kBf16;
    }
}

}  // namespace hetero::experts
