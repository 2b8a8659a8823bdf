// Attention kernel for many lanes (chunks and draft trees) on AMX tiles.
//
// Both products have a panel of 64 lanes as their right side: queries as pairs of dims, weights as
// pairs of tokens, as weigh() leaves them. K comes straight from the cache wherever 16
// tokens lie in one block; V is turned to dims x tokens once for all tiles of a task.

#include "amx.h"
#include "attention_tile.h"

namespace hetero {

namespace {

constexpr int kWide = 64;                                  // lanes of a tile: a panel
constexpr int kTiles = (kMaxTile + kWide - 1) / kWide;     // that share V
constexpr int kTall = 16;                                  // tokens of a product of K

using Tile = LaneTile<kWide>;

struct Scratch {
    Tile tiles[kTiles];
    float scores[kTokens][kWide];
    uint32_t weights[kTokens / 2][kWide];    // pairs of tokens
    uint32_t values[kMaxDim][kTokens / 2];   // dims x pairs of tokens
    uint32_t copied[kTokens][kMaxDim / 2];   // K of tokens that do not lie in one block
    const Bf16* keys[2][kTokens];            // of this group and of the next
};

// Transposes 16 rows of 16 words.
DOT inline void turn(__m512i (&v)[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; ++j) {
            t[i + j] = _mm512_shuffle_i32x4(v[i + j], v[i + j + 4], 0x88);
            t[i + j + 4] = _mm512_shuffle_i32x4(v[i + j], v[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; ++j) {
        v[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
        v[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
    }
}

// values[d][t / 2] of kTokens tokens; zeros where the task has none.
DOT void turn_values(const Work& w, const Bf16* const* keys, uint32_t (*values)[kTokens / 2]) {
    const int64_t piece = w.block_size * w.kv_heads * w.dim;
    for (int64_t t = 0; t < kTokens; t += 2 * kLanes)
        for (int64_t d = 0; d < w.dim; d += kLanes) {
            __m512i v[kLanes];
            for (int i = 0; i < kLanes; ++i) v[i] = value_pairs(keys + t + 2 * i, piece, d);
            turn(v);
            for (int i = 0; i < kLanes; ++i) _mm512_storeu_si512(values[d + i] + t / 2, v[i]);
        }
}

// Prefetches K and V of a group while the one before it is attended: blocks of a layer lie far
// apart, which stops the hardware's prefetcher at each of them.
void fetch_group(const Work& w, const Bf16* const* keys) {
    const int64_t piece = w.block_size * w.kv_heads * w.dim;
    for (int64_t t = 0; t < kTokens; ++t) {
        if (keys[t] == kZeros) continue;
        for (int64_t d = 0; d < w.dim; d += 32) {
            __builtin_prefetch(keys[t] + d, 0, 2);
            __builtin_prefetch(keys[t] + piece + d, 0, 2);
        }
    }
}

// Makes rows of K of the group addressable with one stride per kTall tokens.
void align_keys(const Work& w, Scratch& s, const Bf16* const* keys, const Bf16** first,
                int64_t* stride) {
    const int64_t row = w.kv_heads * w.dim;
    for (int64_t t = 0; t < kTokens; t += kTall) {
        bool straight = true;
        for (int64_t i = 1; i < kTall; ++i) straight &= keys[t + i] == keys[t] + i * row;
        first[t / kTall] = keys[t];
        stride[t / kTall] = row * sizeof(Bf16);
        if (straight) continue;
        for (int64_t i = 0; i < kTall; ++i)
            std::memcpy(s.copied[t + i], keys[t + i], w.dim * sizeof(Bf16));
        first[t / kTall] = (const Bf16*)s.copied[t];
        stride[t / kTall] = sizeof s.copied[t];
    }
}

// Scales scores to powers of two and hides tokens that a lane does not see; top: running maxima.
template <int V>
DOT inline void mask(const Work& w, const Tile& tile, int64_t base, int64_t begin, int64_t tokens,
                     float (*scores)[kWide], __m512* top) {
    const bool masked = begin < tile.open_first || begin + tokens - 1 > tile.open_last;
    for (int64_t t = 0; t < tokens; ++t)
        for (int v = 0; v < V; ++v) {
            float* at = scores[t] + v * kLanes;
            __m512 s = _mm512_mul_ps(_mm512_loadu_ps(at), _mm512_set1_ps(w.scale));
            if (masked)
                s = _mm512_mask_blend_ps(seen(tile, begin + t, base, v), _mm512_set1_ps(kHidden),
                                         s);
            _mm512_storeu_ps(at, s);
            top[v] = _mm512_max_ps(top[v], s);
        }
}

template <int V>
DOT inline void shrink(Tile& tile, int64_t dim, const __m512* factor) {
    __mmask16 same = 0xffff;
    for (int v = 0; v < V; ++v)
        same &= _mm512_cmp_ps_mask(factor[v], _mm512_set1_ps(1.0f), _CMP_EQ_OQ);
    if (same == 0xffff) return;
    for (int64_t d = 0; d < dim; ++d)
        for (int v = 0; v < V; ++v) {
            float* at = tile.out[d] + v * kLanes;
            _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), factor[v]));
        }
}

// One tile and the tokens begin .. begin + tokens, whole register tiles of them.
template <int V>
DOT void attend_tokens(const Work& w, Scratch& s, Tile& tile, int64_t base, int64_t begin,
                       int64_t tokens, const Bf16* const* keys, const int64_t* strides) {
    __m512 top[V], factor[V];
    for (int v = 0; v < V; ++v) top[v] = _mm512_loadu_ps(tile.top + v * kLanes);
    for (int64_t t = 0; t < tokens; t += kTall)
        multiply_tiles(keys[t / kTall], strides[t / kTall], kTall, tile.q, w.dim / 2, V,
                       s.scores[t], kWide, false);
    mask<V>(w, tile, base, begin, tokens, s.scores, top);
    weigh<V>(tile, tokens, s.scores, top, s.weights, factor);
    shrink<V>(tile, w.dim, factor);
    for (int64_t d = 0; d < w.dim; d += 2 * kTall)
        multiply_tiles(s.values[d], sizeof s.values[d], 2 * kTall, s.weights, tokens / 2, V,
                       tile.out[d], kWide, true);
}

using Attend = void (*)(const Work&, Scratch&, Tile&, int64_t, int64_t, int64_t,
                        const Bf16* const*, const int64_t*);
const Attend kAttend[] = {attend_tokens<1>, attend_tokens<2>, attend_tokens<3>, attend_tokens<4>};

DOT void attend_many(const Work& w, const Task& task, const Results& to, void* scratch) {
    constexpr int64_t kStep = 2 * kLanes;  // tokens of a product with V
    Scratch& s = *(Scratch*)scratch;
    const int64_t lanes = task.lanes;
    int64_t tiles = 0;
    for (int64_t lane = 0; lane < lanes; lane += kWide)
        begin_tile(w, task, lane, least(kWide, lanes - lane), s.tiles[tiles++]);
    const int64_t first = task.first / kTokens * kTokens;
    find_keys(w, task, first, s.keys[0]);
    for (int64_t begin = first, turn = 0; begin < task.last; begin += kTokens, turn ^= 1) {
        const Bf16* keys[kTokens / kTall];
        int64_t strides[kTokens / kTall];
        find_keys(w, task, begin + kTokens, s.keys[turn ^ 1]);
        fetch_group(w, s.keys[turn ^ 1]);
        align_keys(w, s, s.keys[turn], keys, strides);
        turn_values(w, s.keys[turn], s.values);
        for (int64_t i = 0; i < tiles; ++i) {
            Tile& tile = s.tiles[i];
            const int64_t seen = least(tile.sees_last + 1, task.last) - begin;
            if (seen <= 0) continue;
            const int64_t tokens = least(kTokens, (seen + kStep - 1) / kStep * kStep);
            kAttend[tile.vectors - 1](w, s, tile, task.base, begin, tokens, keys, strides);
        }
    }
    for (int64_t i = 0; i < tiles; ++i) finish_tile(w, to, i * kWide, s.tiles[i]);
}

}  // namespace

Kernel tiles_kernel(bool is_bf16, int64_t dim, Isa isa) {
    return is_bf16 && isa == kAmx && dim % 32 == 0 ? attend_many : nullptr;
}

int64_t tiles_scratch() { return sizeof(Scratch); }

}  // namespace hetero
