// Attention kernel for many lanes (chunks and draft trees) with bf16 dot products.
//
// A pair of K values is broadcast straight from the cache against a vector of 16 lanes' queries, so
// K needs no packing.

#include "attention_tile.h"

namespace hetero {

namespace {

constexpr int kTall = 8;            // tokens or dims of a register tile; dim % kTall == 0
constexpr int kVectors = 3;         // vectors of lanes of a register tile: 8 * 3 accumulators
constexpr int kWide = kVectors * kLanes;
constexpr int kTiles = kMaxTile / kWide;  // tiles that share a packed V

using Tile = LaneTile<kWide>;

struct Scratch {
    Tile tiles[kTiles];
    float scores[kTokens][kWide];
    uint32_t weights[kTokens / 2][kWide];    // pairs of tokens
    uint32_t values[kTokens / 2 * kMaxDim];  // [tokens / 2][dim] pairs of tokens
    const Bf16* keys[kTokens];
};

DOT void pack_values(const Work& w, const Bf16* const* keys, int64_t tokens, uint32_t* values) {
    const int64_t piece = w.block_size * w.kv_heads * w.dim;
    for (int64_t t = 0; t < tokens; t += 2) {
        for (int64_t d = 0; d < w.dim; d += kLanes)
            _mm512_storeu_si512(values + t / 2 * w.dim + d, value_pairs(keys + t, piece, d));
    }
}

// scores[t][lane] in powers of two, kHidden where the lane does not see the token; top: running
// maxima.
template <int V>
DOT inline void score(const Work& w, const Tile& tile, int64_t base, int64_t begin,
                      int64_t tokens, const Bf16* const* keys, float (*scores)[kWide],
                      __m512* top) {
    const bool masked = begin < tile.open_first || begin + tokens - 1 > tile.open_last;
    for (int64_t t = 0; t < tokens; t += kTall) {
        const Bf16* k_of[kTall];
        __m512 acc[kTall][V];
        for (int r = 0; r < kTall; ++r) {
            k_of[r] = keys[t + r];
            for (int v = 0; v < V; ++v) acc[r][v] = _mm512_setzero_ps();
        }
        for (int64_t p = 0; p < w.dim / 2; ++p) {
            __m512bh q[V];
            for (int v = 0; v < V; ++v)
                q[v] = (__m512bh)_mm512_loadu_si512(tile.q[p] + v * kLanes);
            for (int r = 0; r < kTall; ++r) {
                const __m512bh k = (__m512bh)_mm512_set1_epi32(read_one<uint32_t>(k_of[r] + 2 * p));
                for (int v = 0; v < V; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], q[v], k);
            }
        }
        for (int r = 0; r < kTall; ++r)
            for (int v = 0; v < V; ++v) {
                __m512 s = _mm512_mul_ps(acc[r][v], _mm512_set1_ps(w.scale));
                if (masked)
                    s = _mm512_mask_blend_ps(seen(tile, begin + t + r, base, v),
                                             _mm512_set1_ps(kHidden), s);
                _mm512_storeu_ps(scores[t + r] + v * kLanes, s);
                top[v] = _mm512_max_ps(top[v], s);
            }
    }
}

template <int V>
DOT inline void accumulate(Tile& tile, int64_t dim, int64_t tokens,
                           const uint32_t (*weights)[kWide], const uint32_t* values,
                           const __m512* factor) {
    for (int64_t d = 0; d < dim; d += kTall) {
        __m512 acc[kTall][V];
        for (int r = 0; r < kTall; ++r)
            for (int v = 0; v < V; ++v)
                acc[r][v] = _mm512_mul_ps(_mm512_loadu_ps(tile.out[d + r] + v * kLanes), factor[v]);
        for (int64_t t = 0; t < tokens / 2; ++t) {
            __m512bh w[V];
            for (int v = 0; v < V; ++v)
                w[v] = (__m512bh)_mm512_loadu_si512(weights[t] + v * kLanes);
            for (int r = 0; r < kTall; ++r) {
                const __m512bh value = (__m512bh)_mm512_set1_epi32(values[t * dim + d + r]);
                for (int v = 0; v < V; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], w[v], value);
            }
        }
        for (int r = 0; r < kTall; ++r)
            for (int v = 0; v < V; ++v)
                _mm512_storeu_ps(tile.out[d + r] + v * kLanes, acc[r][v]);
    }
}

// One tile and the tokens begin .. begin + tokens.
template <int V>
DOT void attend_tokens(const Work& w, Scratch& s, Tile& tile, int64_t base, int64_t begin,
                       int64_t tokens) {
    __m512 top[V], factor[V];
    for (int v = 0; v < V; ++v) top[v] = _mm512_loadu_ps(tile.top + v * kLanes);
    score<V>(w, tile, base, begin, tokens, s.keys, s.scores, top);
    weigh<V>(tile, tokens, s.scores, top, s.weights, factor);
    accumulate<V>(tile, w.dim, tokens, s.weights, s.values, factor);
}

// Tokens of a group to compute where `seen` are seen: whole register tiles.
INLINE int64_t whole_tiles(int64_t seen) {
    return least(kTokens, (seen + kTall - 1) / kTall * kTall);
}

DOT void attend_many(const Work& w, const Task& task, const Results& to, void* scratch) {
    Scratch& s = *(Scratch*)scratch;
    const int64_t lanes = task.lanes;
    int64_t tiles = 0;
    for (int64_t lane = 0; lane < lanes; lane += kWide)
        begin_tile(w, task, lane, least(kWide, lanes - lane), s.tiles[tiles++]);
    for (int64_t begin = task.first / kTokens * kTokens; begin < task.last; begin += kTokens) {
        find_keys(w, task, begin, s.keys);
        pack_values(w, s.keys, whole_tiles(task.last - begin), s.values);
        for (int64_t i = 0; i < tiles; ++i) {
            Tile& tile = s.tiles[i];
            const int64_t seen = least(tile.sees_last + 1, task.last) - begin;
            if (seen <= 0) continue;
            const int64_t tokens = whole_tiles(seen);
            if (tile.vectors == 3) attend_tokens<3>(w, s, tile, task.base, begin, tokens);
            else if (tile.vectors == 2) attend_tokens<2>(w, s, tile, task.base, begin, tokens);
            else attend_tokens<1>(w, s, tile, task.base, begin, tokens);
        }
    }
    for (int64_t i = 0; i < tiles; ++i) finish_tile(w, to, i * kWide, s.tiles[i]);
}

}  // namespace

Kernel many_lanes_kernel(bool is_bf16, int64_t dim, Isa isa) {
    return is_bf16 && isa >= kAvx512Bf16 && dim % 32 == 0 ? attend_many : nullptr;
}

int64_t many_lanes_scratch() { return sizeof(Scratch); }

}  // namespace hetero
