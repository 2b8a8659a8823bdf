// Where a packed matrix has its groups: see matmul.h. And what products with them share.

#pragma once

#include <cstring>

#include "matmul.h"
#include "matmul_kernels.h"

namespace hetero {

// Bytes of a group in a panel: scales, then zero points or offsets, then integers.
struct GroupLayout {
    int64_t zeros_at, data_at;  // scales are at 0
    int64_t bytes;              // of a whole group
    int64_t count;              // groups of a panel
    int64_t panel_bytes;
};

inline GroupLayout group_layout(Format format, const Groups& groups, int64_t padded_depth) {
    GroupLayout at;
    const int64_t scales = kPanel * (groups.half_scales ? 2 : 4);
    const int64_t per_byte = format == Format::kInt4 ? 2 : 1;
    at.zeros_at = scales;
    at.data_at = scales;
    if (groups.zeros == Zeros::kPoints) at.data_at += kPanel;
    if (groups.zeros == Zeros::kOffsets) at.data_at += scales;
    at.bytes = at.data_at + groups.size * kPanel / per_byte;
    at.count = (padded_depth + groups.size - 1) / groups.size;
    at.panel_bytes = at.count * at.data_at + padded_depth * kPanel / per_byte;
    return at;
}

inline GroupLayout group_layout(const Matrix& matrix) {
    return group_layout(matrix.format, matrix.groups, matrix.padded_depth);
}

// Scales and corrections of a prepared row whose integers begin at `row`.
inline const float* scales_of_row(const int8_t* row, int64_t padded_depth) {
    return (const float*)(row + padded_depth);
}
inline const int32_t* corrections_of_row(const int8_t* row, int64_t padded_depth, int64_t groups) {
    return (const int32_t*)(row + padded_depth) + groups;
}

// k of a panel that several tiles read one after the other: 16 KiB of int4, 32 KiB as int8.
constexpr int64_t kBlockDepth = 512;
static_assert(kBlockDepth % kLargestGroup == 0 && kBlockDepth % kDepth == 0, "");

// k of a block of whole groups, at most kBlockDepth.
inline int64_t block_depth(const Groups& groups) {
    return kBlockDepth / groups.size * groups.size;
}

#define WIDE __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))
#define WIDE_INLINE WIDE inline __attribute__((always_inline))

// int4 of `depth` k (a multiple of 8) and `strips` strips to int8 [k / 4][64][4], both kStepBytes a
// step.
WIDE inline void unpack_int4(const char* from, int64_t depth, int64_t strips, char* to) {
    const __m512i low = _mm512_set1_epi8(15);
    for (int64_t k = 0; k < depth; k += 8, from += kStepBytes, to += 2 * kStepBytes)
        for (int64_t s = 0; s < strips; ++s) {
            const __m512i both = _mm512_loadu_si512(from + s * 64);
            _mm512_storeu_si512(to + s * 64, _mm512_and_si512(both, low));
            _mm512_storeu_si512(to + kStepBytes + s * 64,
                                _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
        }
}

// GCC 12 warns of the undefined vectors inside its plain conversions; these have none.
typedef int32_t WideInts __attribute__((vector_size(64)));

WIDE_INLINE __m512 to_floats(__m512i x) { return __builtin_convertvector((WideInts)x, __m512); }
WIDE_INLINE __m512 widen_halves(const char* p) {
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)p));
}
WIDE_INLINE __m512i widen_bytes(const char* p) {
    return _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128((const __m128i*)p));
}

// Scales or offsets of the 16 outputs from `output`; at: those of the group's first output.
WIDE_INLINE __m512 wide_scales(bool are_halves, const char* at, int64_t output) {
    return are_halves ? widen_halves(at + 2 * output) : _mm512_loadu_ps(at + 4 * output);
}

// Their zero points, with `centre` added.
WIDE_INLINE __m512i wide_points(bool has_points, const char* at, int64_t output, int32_t centre) {
    const __m512i same = _mm512_set1_epi32(centre);
    return has_points ? _mm512_add_epi32(widen_bytes(at + output), same) : same;
}

// Zero points times minus the sum of a row's integers in a group, which fits in 16 bits: a product
// of halves takes one operation, of whole integers two or more. The points' upper halves are zeros.
static_assert(127 * kLargestGroup < 1 << 15, "");
WIDE_INLINE __m512i times_points(__m512i points, int32_t correction) {
    return _mm512_madd_epi16(points, _mm512_set1_epi32(correction));
}

}  // namespace hetero
