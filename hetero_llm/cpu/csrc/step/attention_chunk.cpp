// Attention kernel for many lanes: chunks of rows and draft trees, with bf16 dot products.
//
// Flash attention in one pass. Scores are computed transposed, tokens x lanes: a pair of K values
// is broadcast straight from the cache against a vector of 16 lanes' queries, so K needs no
// packing, maxima and sums need no reduction across a vector, and a lane never meets another.
// The output is accumulated as dim x lanes and turned once at the end.
//
// Groups of tokens begin at multiples of kTokens of the sequence, and a token that a lane must not
// see adds an exact zero: a lane's result does not depend on the lanes it shares a task with.

#include "attention_parts.h"

namespace hetero {

#ifdef HAS_DOT

namespace {

constexpr int kTall = 8;            // tokens or dims of a register tile; dim % kTall == 0
constexpr int kVectors = 3;         // vectors of lanes of a register tile: 8 * 3 accumulators
constexpr int kWide = kVectors * kLanes;
constexpr int kTiles = kMaxTile / kWide;  // tiles that share a packed V

// Up to kWide lanes. first, last, own: Sight of each lane; open_first .. open_last: tokens that all
// lanes see.
struct Tile {
    uint32_t q[kMaxDim / 2][kWide];  // pairs of bf16
    float out[kMaxDim][kWide];
    float top[kWide], total[kWide];
    int32_t first[kWide], last[kWide];
    uint32_t own[2][kWide];
    int64_t lanes, vectors;
    int64_t open_first, open_last, sees_last;
};

struct Scratch {
    Tile tiles[kTiles];
    float scores[kTokens][kWide];
    uint32_t weights[kTokens / 2][kWide];    // pairs of tokens
    uint32_t values[kTokens / 2 * kMaxDim];  // [tokens / 2][dim] pairs of tokens
    const Bf16* keys[kTokens];
};

alignas(64) const Bf16 kZeros[kMaxDim] = {};

INLINE uint32_t load_pair(const void* p) {
    uint32_t v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// Two vectors of 16 bf16, one after the other in v, to 16 pairs.
DOT inline __m512i interleave(__m512i v) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9,
                                           24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1,
                                           16, 0);
    return _mm512_permutexvar_epi16(order, v);
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
DOT void begin_tile(const Work& w, const Task& task, int64_t begin, int64_t lanes, Tile& tile) {
    tile.lanes = lanes;
    tile.vectors = (lanes + kLanes - 1) / kLanes;
    tile.open_first = 0;
    tile.open_last = tile.sees_last = task.last;
    if (!task.ancestors) tile.sees_last = sight_of(w, task, begin + lanes - 1).last;
    for (int64_t i = 0; i < tile.vectors * kLanes; ++i) {
        const int64_t lane = begin + least(i, lanes - 1);
        const Bf16* q = i < lanes ? (const Bf16*)query_of(w, task, lane, sizeof(Bf16)) : kZeros;
        for (int64_t p = 0; p < w.dim / 2; ++p) tile.q[p][i] = load_pair(q + 2 * p);
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
DOT void find_keys(const Work& w, const Task& task, int64_t begin, const Bf16** keys) {
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

DOT void pack_values(const Work& w, const Bf16* const* keys, int64_t tokens, uint32_t* values) {
    const int64_t piece = w.block_size * w.kv_heads * w.dim;
    for (int64_t t = 0; t < tokens; t += 2) {
        const Bf16* low = keys[t] == kZeros ? kZeros : keys[t] + piece;
        const Bf16* high = keys[t + 1] == kZeros ? kZeros : keys[t + 1] + piece;
        for (int64_t d = 0; d < w.dim; d += kLanes) {
            const __m512i both = _mm512_inserti64x4(
                _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(low + d))),
                _mm256_loadu_si256((const __m256i*)(high + d)), 1);
            _mm512_storeu_si512(values + t / 2 * w.dim + d, interleave(both));
        }
    }
}

// The lanes of vector v that see `token`.
DOT inline __mmask16 seen(const Tile& tile, int64_t token, int64_t start, int v) {
    const __m512i t = _mm512_set1_epi32((int32_t)token);
    __mmask16 lanes = _mm512_cmple_epi32_mask(_mm512_loadu_si512(tile.first + v * kLanes), t) &
                      _mm512_cmple_epi32_mask(t, _mm512_loadu_si512(tile.last + v * kLanes));
    const int64_t own = token - start;
    if (own >= 0 && own < 64)
        lanes |= _mm512_test_epi32_mask(_mm512_loadu_si512(tile.own[own / 32] + v * kLanes),
                                        _mm512_set1_epi32((int32_t)(1u << own % 32)));
    return lanes;
}

// scores[t][lane] in powers of two, kHidden where the lane must not look; top: running maxima.
template <int V>
DOT inline void score(const Work& w, const Tile& tile, int64_t start, int64_t begin,
                      int64_t tokens, const Bf16* const* keys, float (*scores)[kWide],
                      __m512* top) {
    const bool masked = begin < tile.open_first || begin + tokens - 1 > tile.open_last;
    for (int64_t t = 0; t < tokens; t += kTall) {
        const Bf16* rows[kTall];
        __m512 acc[kTall][V];
        for (int r = 0; r < kTall; ++r) {
            rows[r] = keys[t + r];
            for (int v = 0; v < V; ++v) acc[r][v] = _mm512_setzero_ps();
        }
        for (int64_t p = 0; p < w.dim / 2; ++p) {
            __m512bh q[V];
            for (int v = 0; v < V; ++v)
                q[v] = (__m512bh)_mm512_loadu_si512(tile.q[p] + v * kLanes);
            for (int r = 0; r < kTall; ++r) {
                const __m512bh k = (__m512bh)_mm512_set1_epi32(load_pair(rows[r] + 2 * p));
                for (int v = 0; v < V; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], q[v], k);
            }
        }
        for (int r = 0; r < kTall; ++r)
            for (int v = 0; v < V; ++v) {
                __m512 s = _mm512_mul_ps(acc[r][v], _mm512_set1_ps(w.scale));
                if (masked)
                    s = _mm512_mask_blend_ps(seen(tile, begin + t + r, start, v),
                                             _mm512_set1_ps(kHidden), s);
                _mm512_storeu_ps(scores[t + r] + v * kLanes, s);
                top[v] = _mm512_max_ps(top[v], s);
            }
    }
}

// Scores to weights. factor: what the sums of earlier tokens shrink by.
template <int V>
DOT inline void weigh(Tile& tile, int64_t tokens, const float (*scores)[kWide], const __m512* top,
                      uint32_t (*weights)[kWide], __m512* factor) {
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
DOT void attend_tokens(const Work& w, Scratch& s, Tile& tile, int64_t start, int64_t begin,
                       int64_t tokens) {
    __m512 top[V], factor[V];
    for (int v = 0; v < V; ++v) top[v] = _mm512_loadu_ps(tile.top + v * kLanes);
    score<V>(w, tile, start, begin, tokens, s.keys, s.scores, top);
    weigh<V>(tile, tokens, s.scores, top, s.weights, factor);
    accumulate<V>(tile, w.dim, tokens, s.weights, s.values, factor);
}

DOT void finish_tile(const Work& w, const Results& to, int64_t begin, const Tile& tile) {
    const __m512 one = _mm512_set1_ps(1.0f);
    for (int64_t at = 0; at < tile.lanes; at += kLanes) {
        const __m512 factor =
            to.ends ? one : _mm512_div_ps(one, _mm512_loadu_ps(tile.total + at));
        const int64_t lanes = least(tile.lanes - at, kLanes);
        float* out[kLanes];
        for (int64_t i = 0; i < lanes; ++i) {
            out[i] = result_of(w, to, begin + at + i);
            if (!to.ends) continue;
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

// Tokens of a group to compute where `seen` are seen: whole register tiles.
INLINE int64_t whole_tiles(int64_t seen) {
    return least(kTokens, (seen + kTall - 1) / kTall * kTall);
}

DOT void attend_many(const Work& w, const Task& task, const Results& to, void* scratch) {
    Scratch& s = *(Scratch*)scratch;
    const int64_t lanes = lanes_of(w, task);
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
            if (tile.vectors == 3) attend_tokens<3>(w, s, tile, task.start, begin, tokens);
            else if (tile.vectors == 2) attend_tokens<2>(w, s, tile, task.start, begin, tokens);
            else attend_tokens<1>(w, s, tile, task.start, begin, tokens);
        }
    }
    for (int64_t i = 0; i < tiles; ++i) finish_tile(w, to, i * kWide, s.tiles[i]);
}

}  // namespace

Kernel many_lanes_kernel(bool is_bf16, int64_t dim, Isa isa) {
    return is_bf16 && isa >= kAvx512Bf16 && dim % 32 == 0 ? attend_many : nullptr;
}

int64_t many_lanes_scratch() { return sizeof(Scratch); }

#else

Kernel many_lanes_kernel(bool, int64_t, Isa) { return nullptr; }

int64_t many_lanes_scratch() { return 0; }

#endif

}  // namespace hetero
