// A tile of lanes, its masks, weights and results: shared by the two kernels for many lanes.
//
// Flash attention in one pass. Scores are computed transposed, tokens x lanes, so that maxima and
// sums need no reduction across a vector, and no operation mixes lanes. The output is accumulated
// as dim x lanes and transposed once at the end.
//
// Groups of tokens begin at multiples of kTokens of the sequence, and a token that a lane does not
// see adds an exact zero: a lane's result does not depend on the other lanes of its task.

#pragma once

#include "attention_parts.h"

namespace hetero {

alignas(64) inline const Bf16 kZeros[kMaxDim] = {};

// Up to W lanes, a multiple of kLanes. first, last, own: Sight of each lane; open_first ..
// open_last: tokens that all lanes see. sees_last: the last one that
// any lane sees.
template <int W>
struct LaneTile {
    alignas(64) uint32_t q[kMaxDim / 2][W];  // pairs of bf16
    float out[kMaxDim][W];
    float top[W], total[W];
    int32_t first[W], last[W];
    uint32_t own[2][W];
    int64_t lanes, vectors;
    int64_t open_first, open_last, sees_last;
};

// Two vectors of 16 bf16, one after the other in v, to 16 pairs.
DOT inline __m512i interleave(__m512i v) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9,
                                           24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1,
                                           16, 0);
    return _mm512_permutexvar_epi16(order, v);
}

// Pairs of V of the dims d .. d + 15 of two tokens; piece: from K to V.
DOT inline __m512i value_pairs(const Bf16* const* keys, int64_t piece, int64_t d) {
    const Bf16* low = keys[0] == kZeros ? kZeros : keys[0] + piece;
    const Bf16* high = keys[1] == kZeros ? kZeros : keys[1] + piece;
    return interleave(_mm512_inserti64x4(
        _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(low + d))),
        _mm256_loadu_si256((const __m256i*)(high + d)), 1));
}

DOT inline __m512i to_pairs(__m512 low, __m512 high) {
    return interleave((__m512i)_mm512_cvtne2ps_pbh(high, low));
}

// 2^x for x <= 0, error below 3e-6, 0 under 2^-149. The operand order of max keeps NaN.
DOT inline __m512 power(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(1.3333558146e-3f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6181291076e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504108665e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022650696e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718056e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

// Queries as pairs x lanes; lanes that do not exist see what the last one sees, with zeros.
template <int W>
DOT inline void begin_tile(const Work& w, const Task& task, int64_t begin, int64_t lanes,
                           LaneTile<W>& tile) {
    tile.lanes = lanes;
    tile.vectors = (lanes + kLanes - 1) / kLanes;
    tile.open_first = 0;
    tile.open_last = tile.sees_last = task.last;
    if (!task.ancestors) tile.sees_last = sight_of(w, task, begin + lanes - 1).last;
    for (int64_t i = 0; i < tile.vectors * kLanes; ++i) {
        const int64_t lane = begin + least(i, lanes - 1);
        const Bf16* q = i < lanes ? (const Bf16*)query_of(w, task, lane, sizeof(Bf16)) : kZeros;
        for (int64_t p = 0; p < w.dim / 2; ++p) tile.q[p][i] = read_one<uint32_t>(q + 2 * p);
        const Sight sight = sight_of(w, task, lane);
        tile.first[i] = sight.first;
        tile.last[i] = sight.last;
        tile.own[0][i] = (uint32_t)sight.own;
        tile.own[1][i] = (uint32_t)(sight.own >> 32);
        tile.open_first = most(tile.open_first, sight.first);
        tile.open_last = least(tile.open_last, sight.last);
        tile.top[i] = kLowest;
        tile.total[i] = 0;
    }
    for (int64_t d = 0; d < w.dim; ++d) std::memset(tile.out[d], 0, tile.vectors * 64);
}

// Where K of the tokens begin .. begin + kTokens lies; zeros outside first .. last of the task.
DOT inline void find_keys(const Work& w, const Task& task, int64_t begin, const Bf16** keys) {
    const int64_t row = w.kv_heads * w.dim;
    for (int64_t i = 0; i < kTokens; ++i) {
        const int64_t t = begin + i;
        keys[i] = kZeros;
        if (t < task.first || t >= task.last) continue;
        const int64_t piece = task.table[t / w.block_size] * w.block_pieces + w.piece_offset;
        keys[i] = (const Bf16*)w.cache + (piece * w.block_size + t % w.block_size) * row +
                  task.kv_head * w.dim;
    }
}

// The lanes of vector v that see `token`.
template <int W>
DOT inline __mmask16 seen(const LaneTile<W>& tile, int64_t token, int64_t base, int v) {
    const __m512i t = _mm512_set1_epi32((int32_t)token);
    __mmask16 lanes = _mm512_cmple_epi32_mask(_mm512_loadu_si512(tile.first + v * kLanes), t) &
                      _mm512_cmple_epi32_mask(t, _mm512_loadu_si512(tile.last + v * kLanes));
    const int64_t own = token - base;
    if (own >= 0 && own < 64)
        lanes |= _mm512_test_epi32_mask(_mm512_loadu_si512(tile.own[own / 32] + v * kLanes),
                                        _mm512_set1_epi32((int32_t)(1u << own % 32)));
    return lanes;
}

// Turns scores into weights. factor: for the sums of earlier tokens.
template <int V, int W>
DOT inline void weigh(LaneTile<W>& tile, int64_t tokens, const float (*scores)[W],
                      const __m512* top, uint32_t (*weights)[W], __m512* factor) {
    for (int v = 0; v < V; ++v) {
        const int at = v * kLanes;
        factor[v] = power(_mm512_sub_ps(_mm512_loadu_ps(tile.top + at), top[v]));
        __m512 total = _mm512_mul_ps(_mm512_loadu_ps(tile.total + at), factor[v]);
        for (int64_t t = 0; t < tokens; t += 2) {
            const __m512 a = power(_mm512_sub_ps(_mm512_loadu_ps(scores[t] + at), top[v]));
            const __m512 b = power(_mm512_sub_ps(_mm512_loadu_ps(scores[t + 1] + at), top[v]));
            total = _mm512_add_ps(total, _mm512_add_ps(a, b));
            _mm512_storeu_si512(weights[t / 2] + at, to_pairs(a, b));
        }
        _mm512_storeu_ps(tile.top + at, top[v]);
        _mm512_storeu_ps(tile.total + at, total);
    }
}

template <int W>
DOT inline void finish_tile(const Work& w, const Results& to, int64_t begin,
                            const LaneTile<W>& tile) {
    const __m512 one = _mm512_set1_ps(1.0f);
    for (int64_t at = 0; at < tile.lanes; at += kLanes) {
        const __m512 factor =
            to.is_partial ? one : _mm512_div_ps(one, _mm512_loadu_ps(tile.total + at));
        const int64_t lanes = least(tile.lanes - at, kLanes);
        float* out[kLanes];
        for (int64_t i = 0; i < lanes; ++i) {
            out[i] = result_of(w, to, begin + at + i);
            if (!to.is_partial) continue;
            out[i][w.dim] = tile.top[at + i];
            out[i][w.dim + 1] = tile.total[at + i];
        }
        for (int64_t d = 0; d < w.dim; d += kLanes) {
            alignas(64) float turned[kLanes][kLanes];
            for (int j = 0; j < kLanes; ++j)
                _mm512_store_ps(turned[j],
                                _mm512_mul_ps(_mm512_loadu_ps(tile.out[d + j] + at), factor));
            for (int64_t i = 0; i < lanes; ++i)
                for (int j = 0; j < kLanes; ++j) out[i][d + j] = turned[j][i];
        }
    }
}

}  // namespace hetero
