// Attention of a chunk of rows of one sequence over the paged KV cache, with bf16 dot products.
//
// Flash attention in one pass. The query heads of one KV head and the rows are flattened to lanes
// (lane = row * group + head). Scores are computed transposed, tokens x lanes: a pair of K values
// is broadcast straight from the cache against a vector of 16 lanes' queries, so K needs no
// packing, maxima and sums need no reduction across a vector, and a lane never meets another.
// The output is accumulated as dim x lanes and turned once at the end.
//
// Chunks of tokens begin at multiples of kTokens of the sequence, and a token that a lane must not
// see adds an exact zero: a lane's result does not depend on the lanes or threads it shares work
// with. Cache layout and threads: see paged_attention.cpp.

#include "simd.h"

namespace {

constexpr int kMaxDim = 256;
constexpr int kTokens = 64;         // tokens between two updates of the running maximum
constexpr int kTall = 8;            // tokens or dims of a register tile; dim % kTall == 0
constexpr int kVectors = 3;         // vectors of lanes of a register tile: 8 * 3 accumulators
constexpr int kWide = kVectors * kLanes;
constexpr int kTiles = 2;           // tiles that share a packed V
constexpr float kHidden = -FLT_MAX;
constexpr float kLowest = -FLT_MAX / 4;  // first maximum: above kHidden, so hidden tokens weigh 0

struct Chunk {
    const Bf16 *q, *cache;
    const int64_t* table;  // K piece of the layer for each block
    Bf16* out;
    int64_t start, count, kv_heads, group, dim, block_size, q_row, q_head, piece_offset, window;
    float scale;  // of scores in powers of two
};

#ifdef HAS_DOT

// Up to kWide lanes of one KV head. position: the last token that a lane sees.
struct Tile {
    uint32_t q[kMaxDim / 2][kWide];  // pairs of bf16
    float out[kMaxDim][kWide];
    float top[kWide], total[kWide];
    int32_t position[kWide];
    int64_t first_lane, lanes, vectors;
};

struct Scratch {
    Tile tiles[kTiles];
    float scores[kTokens][kWide];
    uint32_t weights[kTokens / 2][kWide];       // pairs of tokens
    uint32_t values[kTokens / 2 * kMaxDim];     // [tokens / 2][dim] pairs of tokens
    const Bf16* keys[kTokens];
};

alignas(64) const Bf16 kZeros[kMaxDim] = {};

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE uint32_t load_pair(const void* p) { uint32_t v; std::memcpy(&v, p, sizeof v); return v; }

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
DOT void begin_tile(const Chunk& c, int64_t kv_head, int64_t first, int64_t lanes, Tile& tile) {
    tile.first_lane = first;
    tile.lanes = lanes;
    tile.vectors = (lanes + kLanes - 1) / kLanes;
    for (int64_t i = 0; i < tile.vectors * kLanes; ++i) {
        const int64_t lane = first + (i < lanes ? i : lanes - 1);
        const Bf16* q = c.q + lane / c.group * c.q_row +
                        (kv_head * c.group + lane % c.group) * c.q_head;
        if (i >= lanes) q = kZeros;
        for (int64_t p = 0; p < c.dim / 2; ++p) tile.q[p][i] = load_pair(q + 2 * p);
        tile.position[i] = (int32_t)(c.start + lane / c.group);
        tile.top[i] = kLowest;
        tile.total[i] = 0;
    }
    for (int64_t d = 0; d < c.dim; ++d) std::memset(tile.out[d], 0, tile.vectors * 64);
}

// Where K of the tokens begin .. begin + kTokens lies; zeros outside first .. last.
DOT void find_keys(const Chunk& c, int64_t kv_head, int64_t begin, int64_t first, int64_t last,
                   const Bf16** keys) {
    const int64_t row = c.kv_heads * c.dim;
    for (int64_t i = 0; i < kTokens; ++i) {
        const int64_t t = begin + i;
        keys[i] = kZeros;
        if (t < first || t >= last) continue;
        const int64_t piece = c.table[t / c.block_size] + c.piece_offset;
        keys[i] = c.cache + (piece * c.block_size + t % c.block_size) * row + kv_head * c.dim;
    }
}

DOT void pack_values(const Chunk& c, const Bf16* const* keys, int64_t tokens, uint32_t* values) {
    const int64_t piece = c.block_size * c.kv_heads * c.dim;
    for (int64_t t = 0; t < tokens; t += 2) {
        const Bf16* low = keys[t] == kZeros ? kZeros : keys[t] + piece;
        const Bf16* high = keys[t + 1] == kZeros ? kZeros : keys[t + 1] + piece;
        for (int64_t d = 0; d < c.dim; d += kLanes) {
            const __m512i both = _mm512_inserti64x4(
                _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(low + d))),
                _mm256_loadu_si256((const __m256i*)(high + d)), 1);
            _mm512_storeu_si512(values + t / 2 * c.dim + d, interleave(both));
        }
    }
}

// scores[t][lane] in powers of two, kHidden where the lane must not look; top: running maxima.
template <int V>
DOT inline void score(const Chunk& c, const Tile& tile, int64_t begin, int64_t tokens,
                      const Bf16* const* keys, float (*scores)[kWide], __m512* top) {
    const bool masked = begin + tokens - 1 > tile.position[0] ||
                        begin <= tile.position[tile.lanes - 1] - c.window;
    for (int64_t t = 0; t < tokens; t += kTall) {
        const Bf16* rows[kTall];
        __m512 acc[kTall][V];
        for (int r = 0; r < kTall; ++r) {
            rows[r] = keys[t + r];
            for (int v = 0; v < V; ++v) acc[r][v] = _mm512_setzero_ps();
        }
        for (int64_t p = 0; p < c.dim / 2; ++p) {
            __m512bh q[V];
            for (int v = 0; v < V; ++v)
                q[v] = (__m512bh)_mm512_loadu_si512(tile.q[p] + v * kLanes);
            for (int r = 0; r < kTall; ++r) {
                const __m512bh k = (__m512bh)_mm512_set1_epi32(load_pair(rows[r] + 2 * p));
                for (int v = 0; v < V; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], q[v], k);
            }
        }
        for (int r = 0; r < kTall; ++r) {
            const __m512i token = _mm512_set1_epi32((int32_t)(begin + t + r));
            const __m512i beyond = _mm512_set1_epi32((int32_t)(begin + t + r + c.window));
            for (int v = 0; v < V; ++v) {
                __m512 s = _mm512_mul_ps(acc[r][v], _mm512_set1_ps(c.scale));
                if (masked) {
                    const __m512i last = _mm512_loadu_si512(tile.position + v * kLanes);
                    const __mmask16 seen = _mm512_cmple_epi32_mask(token, last) &
                                           _mm512_cmplt_epi32_mask(last, beyond);
                    s = _mm512_mask_blend_ps(seen, _mm512_set1_ps(kHidden), s);
                }
                _mm512_storeu_ps(scores[t + r] + v * kLanes, s);
                top[v] = _mm512_max_ps(top[v], s);
            }
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
DOT void attend_tokens(const Chunk& c, Scratch& s, Tile& tile, int64_t begin, int64_t tokens) {
    __m512 top[V], factor[V];
    for (int v = 0; v < V; ++v) top[v] = _mm512_loadu_ps(tile.top + v * kLanes);
    score<V>(c, tile, begin, tokens, s.keys, s.scores, top);
    weigh<V>(tile, tokens, s.scores, top, s.weights, factor);
    accumulate<V>(tile, c.dim, tokens, s.weights, s.values, factor);
}

DOT void finish_tile(const Chunk& c, int64_t kv_head, const Tile& tile) {
    const int64_t heads = c.kv_heads * c.group;
    for (int64_t at = 0; at < tile.lanes; at += kLanes) {
        const __m512 total = _mm512_loadu_ps(tile.total + at);
        const int64_t lanes = tile.lanes - at < kLanes ? tile.lanes - at : kLanes;
        Bf16* to[kLanes];
        for (int64_t i = 0; i < lanes; ++i) {
            const int64_t lane = tile.first_lane + at + i;
            to[i] = c.out + (lane / c.group * heads + kv_head * c.group + lane % c.group) * c.dim;
        }
        for (int64_t d = 0; d < c.dim; d += 2) {
            uint32_t pairs[kLanes];
            _mm512_storeu_si512(
                pairs, to_pairs(_mm512_div_ps(_mm512_loadu_ps(tile.out[d] + at), total),
                                _mm512_div_ps(_mm512_loadu_ps(tile.out[d + 1] + at), total)));
            for (int64_t i = 0; i < lanes; ++i) std::memcpy(to[i] + d, pairs + i, 4);
        }
    }
}

// Tokens of a chunk to compute where `seen` are seen: whole register tiles.
INLINE int64_t whole_tiles(int64_t seen) {
    return least(kTokens, (seen + kTall - 1) / kTall * kTall);
}

// The lanes first_lane .. last_lane, at most kTiles * kWide.
DOT void attend_lanes(const Chunk& c, int64_t kv_head, int64_t first_lane, int64_t last_lane) {
    alignas(64) Scratch s;
    int64_t tiles = 0;
    for (int64_t lane = first_lane; lane < last_lane; lane += kWide)
        begin_tile(c, kv_head, lane, least(kWide, last_lane - lane), s.tiles[tiles++]);
    const int64_t lowest = c.start + first_lane / c.group - c.window + 1;
    const int64_t first = lowest > 0 ? lowest : 0;
    const int64_t last = c.start + (last_lane - 1) / c.group + 1;
    for (int64_t begin = first / kTokens * kTokens; begin < last; begin += kTokens) {
        find_keys(c, kv_head, begin, first, last, s.keys);
        pack_values(c, s.keys, whole_tiles(last - begin), s.values);
        for (int64_t i = 0; i < tiles; ++i) {
            Tile& tile = s.tiles[i];
            const int64_t seen = tile.position[tile.lanes - 1] + 1 - begin;
            const bool passed = begin + kTokens - 1 <= tile.position[0] - c.window;
            if (seen <= 0 || passed) continue;
            const int64_t tokens = whole_tiles(seen);
            if (tile.vectors == 3) attend_tokens<3>(c, s, tile, begin, tokens);
            else if (tile.vectors == 2) attend_tokens<2>(c, s, tile, begin, tokens);
            else attend_tokens<1>(c, s, tile, begin, tokens);
        }
    }
    for (int64_t i = 0; i < tiles; ++i) finish_tile(c, kv_head, s.tiles[i]);
}

#endif

}  // namespace

extern "C" {

int64_t hetero_can_attend_chunk() { return has_bf16_dot(); }

// Attends `count` rows of one sequence that follow `start` cached tokens, all in bf16; dim is a
// multiple of 32 up to 256. `table`: the K piece of layer 0 for each block. A row sees the last
// `window` tokens up to itself.
void hetero_attend_chunk(const void* q, const void* cache, const int64_t* table, void* out,
                         int64_t start, int64_t count, int64_t kv_heads, int64_t group,
                         int64_t dim, int64_t block_size, int64_t q_row, int64_t q_head,
                         int64_t piece_offset, int64_t window, float scale, int64_t threads) {
#ifdef HAS_DOT
    const Chunk c{(const Bf16*)q, (const Bf16*)cache, table, (Bf16*)out, start, count, kv_heads,
                  group, dim, block_size, q_row, q_head, piece_offset, window,
                  scale * 1.44269504088896341f};
    const int64_t lanes = count * group, vectors = (lanes + kLanes - 1) / kLanes;
    const int64_t most = kTiles * kVectors;
    int64_t parts = (vectors + most - 1) / most;
    // Few items should keep all threads busy.
    while (parts * kv_heads < 4 * threads && parts * kv_heads % threads && parts < vectors) ++parts;
    const int64_t size = (vectors + parts - 1) / parts * kLanes;
    parts = (lanes + size - 1) / size;
    // Later rows see more tokens: the largest items come first.
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t i = 0; i < parts * kv_heads; ++i) {
        const int64_t first = (parts - 1 - i / kv_heads) * size;
        attend_lanes(c, i % kv_heads, first, least(first + size, lanes));
    }
#endif
}

}  // extern "C"
