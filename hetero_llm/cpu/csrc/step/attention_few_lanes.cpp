// Attention kernel for few lanes: products along the head's dimension, one token after the other.
//
// Runs on every instruction set and every shape. A single token reads K and V once at the speed of
// memory; up to four heads of a group share each load. `dim` is a multiple of 2 N, and 2 N dims are
// processed at a time: of bf16 first the even, then the odd ones (lanes.h). Queries and results
// have this order, too, until finish_lanes restores the natural one.

#include "attention_parts.h"
#include "lanes.h"

namespace hetero {

namespace {

constexpr int64_t kLong = 256;   // tokens between two updates of the maximum, few lanes
constexpr int64_t kAhead = 24;   // tokens between prefetch and use
constexpr int64_t kFew = 16;     // most lanes for which kLong is used

struct Scratch {
    float query[kMaxTile][kMaxDim];
    float out[kMaxTile][kMaxDim];
    float scores[4][kLong];
    float top[kMaxTile], total[kMaxTile];
    float slope[kMaxTile];
    Sight sight[kMaxTile];
    const void* queries[kMaxTile];
    const void* keys[kLong + kAhead];
};

// Where K of `count` tokens lies; V lies one piece further.
template <typename T>
INLINE void find_keys(const Work& w, const Task& task, int64_t begin, int64_t count,
                      const void** keys) {
    const int64_t row = w.kv_heads * w.dim;
    int64_t column = begin / w.block_size, inside = begin % w.block_size;
    for (int64_t t = 0; t < count; ++t) {
        const int64_t piece = task.table[column] * w.block_pieces + w.piece_offset;
        keys[t] = (const T*)w.cache + (piece * w.block_size + inside) * row + task.kv_head * w.dim;
        if (++inside == w.block_size) {
            inside = 0;
            ++column;
        }
    }
}

// Fetches K of a later token and V of this one, which is read once the scores are done: blocks of a
// layer lie far apart, which stops the hardware's prefetcher at each of them.
template <typename T>
INLINE void prefetch(const T* ahead, const T* value, int64_t dim) {
    for (int64_t b = 0; b < dim * (int64_t)sizeof(T); b += 64) {
        __builtin_prefetch((const char*)ahead + b);
        __builtin_prefetch((const char*)value + b);
    }
}

// scores[g][t] of G lanes whose queries, scaled, are `query`. count is a multiple of 4.
template <typename T, int N, int G>
INLINE void score(const Scratch& s, int64_t lane, int64_t count, int64_t dim, int64_t piece,
                  bool fetch, float (*scores)[kLong]) {
    const float(*query)[kMaxDim] = s.query + lane;
    for (int64_t t = 0; t < count; t += 4) {
        const T* k[4];
        for (int i = 0; i < 4; ++i) {
            k[i] = (const T*)s.keys[t + i];
            if (fetch) prefetch((const T*)s.keys[t + i + kAhead], k[i] + piece, dim);
        }
        Floats<N> acc[G][4] = {};
        for (int64_t d = 0; d < dim; d += 2 * N)
            for (int i = 0; i < 4; ++i) {
                Floats<N> one, two;
                read_two<N>(k[i] + d, one, two);
                for (int g = 0; g < G; ++g) {
                    acc[g][i] += one * read<N>(query[g] + d);
                    acc[g][i] += two * read<N>(query[g] + d + N);
                }
            }
        for (int g = 0; g < G; ++g)
            write<4>(scores[g] + t, totals<N>(acc[g][0], acc[g][1], acc[g][2], acc[g][3]));
    }
}

// The same with bf16 dot products: 32 pairs an instruction and no conversion.
template <int G>
DOT inline void score_dot(const Scratch& s, int64_t lane, int64_t count, int64_t dim,
                          int64_t piece, bool fetch, float scale, float (*scores)[kLong]) {
    const Bf16* const* query = (const Bf16* const*)s.queries + lane;
    for (int64_t t = 0; t < count; t += 4) {
        const Bf16* k[4];
        for (int i = 0; i < 4; ++i) {
            k[i] = (const Bf16*)s.keys[t + i];
            if (fetch) prefetch((const Bf16*)s.keys[t + i + kAhead], k[i] + piece, dim);
        }
        __m512 acc[G][4];
        for (int g = 0; g < G; ++g)
            for (int i = 0; i < 4; ++i) acc[g][i] = _mm512_setzero_ps();
        for (int64_t d = 0; d < dim; d += 32)
            for (int g = 0; g < G; ++g) {
                const __m512bh q = (__m512bh)_mm512_loadu_si512(query[g] + d);
                for (int i = 0; i < 4; ++i)
                    acc[g][i] = _mm512_dpbf16_ps(acc[g][i], q,
                                                 (__m512bh)_mm512_loadu_si512(k[i] + d));
            }
        for (int g = 0; g < G; ++g) {
            const Floats<4> sums =
                totals<16>((Floats<16>)acc[g][0], (Floats<16>)acc[g][1], (Floats<16>)acc[g][2],
                           (Floats<16>)acc[g][3]);
            write<4>(scores[g] + t, sums * scale);
        }
    }
}

// The soft cap, then ALiBi: slope times the distance from the lane's own token, which is the last
// one that it sees, to token `begin` + t. count: a multiple of N.
template <int N>
INLINE void bend(float softcap, float slope, int64_t distance, int64_t count, float* scores) {
    Floats<N> offsets;
    for (int i = 0; i < N; ++i) offsets[i] = (float)(distance + i);
    for (int64_t t = 0; t < count; t += N) {
        Floats<N> x = read<N>(scores + t);
        if (softcap != 0) {
            const Floats<N> size = x < 0.0f ? -x : x;
            const Floats<N> e = power_of_two<N>(size * (-2.0f * kLog2e / softcap));
            const Floats<N> bent = softcap * ((1.0f - e) / (1.0f + e));
            x = x < 0.0f ? -bent : bent;
        }
        write<N>(scores + t, x + slope * (offsets + (float)t));
    }
}

INLINE void hide(const Sight& sight, int64_t begin, int64_t base, int64_t count, float* scores) {
    for (int64_t t = 0; t < count; ++t) {
        const int64_t token = begin + t, own = token - base;
        const bool seen = (token >= sight.first && token <= sight.last) ||
                          (own >= 0 && own < 64 && (sight.own >> own & 1));
        if (!seen) scores[t] = kHidden;
    }
}

// Turns scores into weights. Returns the factor for the sums of earlier tokens. count: a multiple
// of N.
template <int N>
INLINE float weigh(float* scores, int64_t count, float* top, float* sum) {
    Floats<N> highest = fill<N>(*top);
    for (int64_t t = 0; t < count; t += N) highest = larger<N>(read<N>(scores + t), highest);
    const float now = maximum<N>(highest);
    Floats<N> all = {};
    for (int64_t t = 0; t < count; t += N) {
        const Floats<N> e = power_of_two<N>(read<N>(scores + t) - now);
        write<N>(scores + t, e);
        all += e;
    }
    const float factor = power_of_two<4>(fill<4>(*top - now))[0];
    *top = now;
    *sum = *sum * factor + total<N>(all);
    return factor;
}

// out[g][d] = out[g][d] * factor[g] + sum over t of weight * V for D vectors of dims from `d`.
template <typename T, int N, int G, int D>
INLINE void add_values(const void* const* keys, int64_t count, int64_t piece, int64_t d,
                       const float (*weights)[kLong], const float* factor, float (*out)[kMaxDim]) {
    Floats<N> acc[G][D];
    for (int g = 0; g < G; ++g)
        for (int i = 0; i < D; ++i) acc[g][i] = read<N>(out[g] + d + i * N) * factor[g];
    for (int64_t t = 0; t < count; ++t) {
        const T* value = (const T*)keys[t] + piece + d;
        for (int i = 0; i < D; i += 2) {
            Floats<N> one, two;
            read_two<N>(value + i * N, one, two);
            for (int g = 0; g < G; ++g) {
                acc[g][i] += one * weights[g][t];
                acc[g][i + 1] += two * weights[g][t];
            }
        }
    }
    for (int g = 0; g < G; ++g)
        for (int i = 0; i < D; ++i) write<N>(out[g] + d + i * N, acc[g][i]);
}

// G lanes from `lane` and the tokens begin .. begin + count, whose keys are found.
template <typename T, int N, int G, bool kDot>
INLINE void attend_tokens(const Work& w, const Task& task, Scratch& s, int64_t lane, int64_t begin,
                          int64_t count, bool fetch) {
    const int64_t piece = w.block_size * w.kv_heads * w.dim;
    const int64_t whole = (count + 15) / 16 * 16;
    const int64_t fours = (count + 3) / 4 * 4;
    if constexpr (!kDot)
        score<T, N, G>(s, lane, fours, w.dim, piece, fetch, s.scores);
    else
        score_dot<G>(s, lane, fours, w.dim, piece, fetch, w.scale, s.scores);
    float factor[G];
    for (int g = 0; g < G; ++g) {
        const Sight& sight = s.sight[lane + g];
        if (w.softcap != 0 || w.slopes)
            bend<N>(w.softcap, s.slope[lane + g], begin - sight.last, whole, s.scores[g]);
        for (int64_t t = count; t < whole; ++t) s.scores[g][t] = kHidden;
        if (begin < sight.first || begin + count - 1 > sight.last)
            hide(sight, begin, task.base, count, s.scores[g]);
        factor[g] = weigh<N>(s.scores[g], whole, &s.top[lane + g], &s.total[lane + g]);
    }
    float(*out)[kMaxDim] = s.out + lane;
    int64_t d = 0;
    constexpr int kWide = N == 16 || G == 1 ? 4 : 2;
    for (; d + kWide * N <= w.dim; d += kWide * N)
        add_values<T, N, G, kWide>(s.keys, count, piece, d, s.scores, factor, out);
    for (; d < w.dim; d += 2 * N)
        add_values<T, N, G, 2>(s.keys, count, piece, d, s.scores, factor, out);
}

// Even and odd values to the first and the second half.
template <int N>
INLINE void in_order(Floats<N>& even, Floats<N>& odd) {
    typename Lanes<N>::Integer first, second;
    for (int i = 0; i < N / 2; ++i) {
        first[2 * i] = i;
        first[2 * i + 1] = i + N;
    }
    second = first + N / 2;
    const Floats<N> low = __builtin_shuffle(even, odd, first);
    odd = __builtin_shuffle(even, odd, second);
    even = low;
}

template <typename T, int N, bool kDot>
INLINE void begin_lanes(const Work& w, const Task& task, int64_t first, int64_t lanes,
                        Scratch& s) {
    for (int64_t lane = first; lane < first + lanes; ++lane) {
        const T* q = (const T*)query_of(w, task, lane - first, sizeof(T));
        s.queries[lane] = q;
        if constexpr (!kDot)
            for (int64_t d = 0; d < w.dim; d += 2 * N) {
                Floats<N> one, two;
                read_two<N>(q + d, one, two);
                write<N>(s.query[lane] + d, one * w.scale);
                write<N>(s.query[lane] + d + N, two * w.scale);
            }
        s.sight[lane] = sight_of(w, task, lane - first);
        const int64_t head = task.kv_head * w.group + (task.head + lane - first) % w.group;
        s.slope[lane] = w.slopes ? w.slopes[head] * kLog2e : 0;
        s.top[lane] = kLowest;
        s.total[lane] = 0;
        std::memset(s.out[lane], 0, w.dim * sizeof(float));
    }
}

template <typename T, int N>
INLINE void finish_lanes(const Work& w, int64_t first, int64_t lanes, const Results& to,
                         const Scratch& s) {
    for (int64_t lane = first; lane < first + lanes; ++lane) {
        float* out = result_of(w, to, lane - first);
        const float factor = to.is_partial ? 1.0f : 1.0f / s.total[lane];
        for (int64_t d = 0; d < w.dim; d += 2 * N) {
            Floats<N> one = read<N>(s.out[lane] + d) * factor;
            Floats<N> two = read<N>(s.out[lane] + d + N) * factor;
            if (sizeof(T) == sizeof(Bf16)) in_order<N>(one, two);
            write<N>(out + d, one);
            write<N>(out + d + N, two);
        }
        if (!to.is_partial) continue;
        out[w.dim] = s.top[lane];
        out[w.dim + 1] = s.total[lane];
    }
}

// The lanes of one KV head, which begin with `first`, and the tokens begin .. end.
template <typename T, int N, bool kDot>
INLINE void attend_head(const Work& w, const Task& task, Scratch& s, int64_t first, int64_t begin,
                        int64_t end) {
    constexpr int kMost = N == 16 ? 4 : 2;  // lanes at a time, as many as there are registers for
    const int64_t count = end - begin, last = first + task.lanes;
    const int64_t found = least(count + kAhead, task.last - begin);
    find_keys<T>(w, task, begin, found, s.keys);
    for (int64_t t = found; t < (count + 3) / 4 * 4 + kAhead; ++t) s.keys[t] = s.keys[found - 1];
    for (int64_t lane = first; lane < last;) {
        const bool fetch = lane == first;
        if (kMost == 4 && last - lane >= 4) {
            attend_tokens<T, N, kMost, kDot>(w, task, s, lane, begin, count, fetch);
            lane += 4;
        } else if (last - lane >= 2) {
            attend_tokens<T, N, 2, kDot>(w, task, s, lane, begin, count, fetch);
            lane += 2;
        } else {
            attend_tokens<T, N, 1, kDot>(w, task, s, lane, begin, count, fetch);
            lane += 1;
        }
    }
}

template <typename T, int N, bool kDot>
INLINE void attend_few(const Work& w, const Task& task, const Results& to, void* scratch) {
    Scratch& s = *(Scratch*)scratch;
    const int64_t lanes = task.lanes;
    // With several heads groups of tokens are short, so that they are still in a cache when the
    // next head reads them. The model decides, not the task, so that results do not depend on how
    // many heads a task has.
    const int64_t tokens = lanes > kFew || w.kv_heads > 1 ? kTokens : kLong;
    Task head = task;
    for (int64_t h = 0; h < task.kv_heads; ++h, ++head.kv_head)
        begin_lanes<T, N, kDot>(w, head, h * lanes, lanes, s);
    for (int64_t begin = task.first; begin < task.last;) {
        const int64_t end = least((begin / tokens + 1) * tokens, task.last);
        head.kv_head = task.kv_head;
        for (int64_t h = 0; h < task.kv_heads; ++h, ++head.kv_head)
            attend_head<T, N, kDot>(w, head, s, h * lanes, begin, end);
        begin = end;
    }
    Results of_head = to;
    for (int64_t h = 0; h < task.kv_heads; ++h, of_head.data += lanes * to.head_stride)
        finish_lanes<T, N>(w, h * lanes, lanes, of_head, s);
}

template <int N>
INLINE void join_lanes(const float* partial, int64_t count, int64_t stride, int64_t dim,
                       float* out) {
    float top = kLowest, sum = 0;
    for (int64_t c = 0; c < count; ++c) {
        const float m = partial[c * stride + dim];
        top = m > top ? m : top;
    }
    for (int64_t c = 0; c < count; ++c) {
        const float* part = partial + c * stride;
        const float weight = power_of_two<4>(fill<4>(part[dim] - top))[0];
        sum += weight * part[dim + 1];
        for (int64_t d = 0; d < dim; d += N) {
            const Floats<N> before = c ? read<N>(out + d) : fill<N>(0.0f);
            write<N>(out + d, before + read<N>(part + d) * weight);
        }
    }
    for (int64_t d = 0; d < dim; d += N) write<N>(out + d, read<N>(out + d) * (1.0f / sum));
}

}  // namespace

#define FEW_LANES(NAME, TARGET, T, N, DOTS)                                                       \
    TARGET static void NAME(const Work& w, const Task& task, const Results& to, void* scratch) {  \
        attend_few<T, N, DOTS>(w, task, to, scratch);                                             \
    }
FEW_LANES(attend_bf16_4, , Bf16, 4, false)
FEW_LANES(attend_bf16_8, ON_AVX2, Bf16, 8, false)
FEW_LANES(attend_bf16_16, ON_AVX512, Bf16, 16, false)
FEW_LANES(attend_float_4, , float, 4, false)
FEW_LANES(attend_float_8, ON_AVX2, float, 8, false)
FEW_LANES(attend_float_16, ON_AVX512, float, 16, false)
FEW_LANES(attend_dot, DOT, Bf16, 16, true)

Kernel few_lanes_kernel(bool is_bf16, int64_t dim, Isa isa) {
    // Processors with AMX run bf16 dot products slower than conversions and float products.
    if (is_bf16 && isa == kAvx512Bf16 && dim % 32 == 0) return attend_dot;
    if (isa >= kAvx512 && dim % 32 == 0) return is_bf16 ? attend_bf16_16 : attend_float_16;
    if (isa >= kAvx2 && dim % 16 == 0) return is_bf16 ? attend_bf16_8 : attend_float_8;
    return is_bf16 ? attend_bf16_4 : attend_float_4;
}

int64_t few_lanes_scratch() { return sizeof(Scratch); }

ON_AVX2 static void join_8(const float* partial, int64_t count, int64_t stride, int64_t dim,
                           float* out) {
    join_lanes<8>(partial, count, stride, dim, out);
}

void join(const float* partial, int64_t count, int64_t stride, int64_t dim, float* out, Isa isa) {
    if (isa >= kAvx2) join_8(partial, count, stride, dim, out);
    else join_lanes<4>(partial, count, stride, dim, out);
}

}  // namespace hetero
