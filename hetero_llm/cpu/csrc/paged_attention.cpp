// Attention of single rows over the paged KV cache, and the store of K and V that precedes it.
//
// Cache layout: [block][layer][K|V][token][kv_head][dim]. A "piece" is K or V of one layer of one
// block, so a piece index times block_size * kv_heads * dim is an element offset.
//
// Split-KV with log-sum-exp merge (FlashDecoding): every task attends one chunk of one sequence's
// context for the query heads of one KV head; a second pass merges a sequence's chunks. Loops are
// written over GCC vectors of 16 floats and compiled per instruction set (target_clones).
//
// Threads: OpenMP without linking a runtime. The caller has loaded the runtime that torch uses, so
// both share one team of threads; two spinning teams on the same cores would starve each other.

#include "simd.h"

namespace {

constexpr int kChunk = 256;     // tokens of a task
constexpr int kMaxDim = 256;
constexpr int kAhead = 24;      // tokens between prefetch and use

struct Shape {
    int64_t block_size, kv_heads, group, dim, columns;
    int64_t q_row, q_head;  // strides of q in elements
    float scale, softcap;   // scores become softcap * tanh(score / softcap); 0: they stay
    const float* slopes;    // of each query head (ALiBi); null: none
};

// One chunk of one sequence's context for one KV head; the query is at `position`.
struct Task {
    int64_t piece_offset, kv_head, first, last, position;
};

// Where the K of each token of a task lies; its V lies one piece further.
template <typename T>
INLINE void find_keys(const T* cache, const int64_t* table, const Shape& s, const Task& task,
                      const T** keys) {
    const int64_t row = s.kv_heads * s.dim, piece = s.block_size * row;
    int64_t column = task.first / s.block_size, inside = task.first % s.block_size;
    for (int64_t t = 0; t < task.last - task.first; ++t) {
        keys[t] = cache + (table[column] + task.piece_offset) * piece + inside * row +
                  task.kv_head * s.dim;
        if (++inside == s.block_size) {
            inside = 0;
            ++column;
        }
    }
}

// Blocks of one layer lie far apart, which stops the hardware prefetcher at each of them.
template <typename T>
INLINE void prefetch(const T* const* keys, int64_t t, int64_t count, int64_t dim, int64_t piece) {
    const char* ahead = (const char*)keys[t + kAhead < count ? t + kAhead : t];
    for (int64_t b = 0; b < dim * (int64_t)sizeof(T); b += 64) {
        __builtin_prefetch(ahead + b);
        __builtin_prefetch((const char*)(keys[t] + piece) + b);
    }
}

// scores[g][t] = scale * (q of head g) . (k of token t), products in float.
template <typename T, int G>
INLINE void score(const T* q, const T* const* keys, int64_t count, const Shape& s,
                  float (*scores)[kChunk]) {
    float query[G][kMaxDim] __attribute__((aligned(64)));
    for (int g = 0; g < G; ++g)
        for (int64_t d = 0; d < s.dim; d += kLanes)
            store(query[g] + d, load(q + g * s.q_head + d) * s.scale);
    const int64_t piece = s.block_size * s.kv_heads * s.dim;
    for (int64_t t = 0; t < count; ++t) {
        prefetch(keys, t, count, s.dim, piece);
        F16 acc[G] = {};
        for (int64_t d = 0; d < s.dim; d += kLanes) {
            const F16 k = load(keys[t] + d);
            for (int g = 0; g < G; ++g) acc[g] += k * load(query[g] + d);
        }
        for (int g = 0; g < G; ++g) scores[g][t] = sum(acc[g]);
    }
}

#ifdef HAS_DOT
// The same with bf16 dot products: 32 pairs an instruction and no conversion. dim % 32 == 0.
template <int G>
DOT inline void score_dot(const Bf16* q, const Bf16* const* keys, int64_t count, const Shape& s,
                          float (*scores)[kChunk]) {
    const int64_t piece = s.block_size * s.kv_heads * s.dim;
    for (int64_t t = 0; t < count; ++t) {
        prefetch(keys, t, count, s.dim, piece);
        __m512 acc[G];
        for (int g = 0; g < G; ++g) acc[g] = _mm512_setzero_ps();
        for (int64_t d = 0; d < s.dim; d += 2 * kLanes) {
            const __m512bh k = (__m512bh)_mm512_loadu_si512(keys[t] + d);
            for (int g = 0; g < G; ++g)
                acc[g] = _mm512_dpbf16_ps(
                    acc[g], k, (__m512bh)_mm512_loadu_si512(q + g * s.q_head + d));
        }
        for (int g = 0; g < G; ++g) scores[g][t] = s.scale * sum((F16)acc[g]);
    }
}
#endif

// What follows the products of the heads from `head` on: the soft cap, then ALiBi, which adds slope
// times the distance of the key.
template <int G>
INLINE void bend(const Shape& s, const Task& task, int64_t head, float (*scores)[kChunk]) {
    if (s.softcap == 0 && s.slopes == nullptr) return;
    const F16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int64_t count = task.last - task.first;
    const F16 distance = lanes + (float)(task.first - task.position);
    for (int g = 0; g < G; ++g) {
        for (int64_t t = 0; t < count; t += kLanes) {
            F16 x = load(scores[g] + t);
            if (s.softcap != 0) {
                const F16 size = x < 0.0f ? -x : x;
                const F16 e = exp16(size * (-2.0f / s.softcap));
                const F16 bent = s.softcap * ((1.0f - e) / (1.0f + e));
                x = x < 0.0f ? -bent : bent;
            }
            if (s.slopes != nullptr) x += s.slopes[head + g] * (distance + (float)t);
            store(scores[g] + t, x);
        }
    }
}

// From scores to one partial result of G heads: dim weighted values each, then maximum and sum.
template <typename T, int G>
INLINE void weigh(const T* const* keys, int64_t count, const Shape& s, float (*scores)[kChunk],
                  float* partial, int64_t stride) {
    const int64_t dim = s.dim, piece = s.block_size * s.kv_heads * dim;
    const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
    for (int g = 0; g < G; ++g) {
        for (int64_t t = count; t < padded; ++t) scores[g][t] = -FLT_MAX;
        F16 top = load(scores[g]);
        for (int64_t t = kLanes; t < padded; t += kLanes) {
            const F16 v = load(scores[g] + t);
            top = v > top ? v : top;
        }
        const float maximum = highest(top);
        F16 total = {};
        for (int64_t t = 0; t < padded; t += kLanes) {
            const F16 e = exp16(load(scores[g] + t) - maximum);
            store(scores[g] + t, e);
            total += e;
        }
        partial[g * stride + dim] = maximum;
        partial[g * stride + dim + 1] = sum(total);
    }
    for (int64_t d = 0; d < dim; d += 2 * kLanes) {
        const bool pair = d + kLanes < dim;
        F16 low[G] = {}, high[G] = {};
        for (int64_t t = 0; t < count; ++t) {
            const T* value = keys[t] + piece + d;
            const F16 a = load(value);
            const F16 b = pair ? load(value + kLanes) : a;
            for (int g = 0; g < G; ++g) {
                low[g] += a * scores[g][t];
                high[g] += b * scores[g][t];
            }
        }
        for (int g = 0; g < G; ++g) {
            store(partial + g * stride + d, low[g]);
            if (pair) store(partial + g * stride + d + kLanes, high[g]);
        }
    }
}

template <typename T, int G>
INLINE void attend_heads(const T* q, const T* const* keys, const Shape& s, const Task& task,
                         int64_t head, float* partial, int64_t stride) {
    const int64_t count = task.last - task.first;
    float scores[G][kChunk] __attribute__((aligned(64)));
    score<T, G>(q + head * s.q_head, keys, count, s, scores);
    bend<G>(s, task, head, scores);
    weigh<T, G>(keys, count, s, scores, partial, stride);
}

#ifdef HAS_DOT
template <int G>
DOT inline void attend_heads_dot(const Bf16* q, const Bf16* const* keys, const Shape& s,
                                 const Task& task, int64_t head, float* partial, int64_t stride) {
    const int64_t count = task.last - task.first;
    float scores[G][kChunk] __attribute__((aligned(64)));
    score_dot<G>(q + head * s.q_head, keys, count, s, scores);
    bend<G>(s, task, head, scores);
    weigh<Bf16, G>(keys, count, s, scores, partial, stride);
}
#endif

// The query heads of one KV head, four, two or one at a time: HEADS(G) attends G of them.
#define FOR_HEADS(HEADS)                                                                          \
    for (int64_t g = 0; g < s.group;) {                                                           \
        const int64_t head = task.kv_head * s.group + g;                                          \
        float* out = partial + g * stride;                                                        \
        if (s.group - g >= 4) { HEADS(4); g += 4; }                                               \
        else if (s.group - g >= 2) { HEADS(2); g += 2; }                                          \
        else { HEADS(1); g += 1; }                                                                \
    }

template <typename T>
INLINE void attend_task(const T* q, const T* cache, const int64_t* table, const Shape& s,
                        const Task& task, float* partial, int64_t stride) {
    const T* keys[kChunk];
    find_keys(cache, table, s, task, keys);
#define HEADS(G) attend_heads<T, G>(q, keys, s, task, head, out, stride)
    FOR_HEADS(HEADS)
#undef HEADS
}

#ifdef HAS_DOT
DOT void attend_bf16_dot(const Bf16* q, const Bf16* cache, const int64_t* table, const Shape& s,
                         const Task& task, float* partial, int64_t stride) {
    const Bf16* keys[kChunk];
    find_keys(cache, table, s, task, keys);
#define HEADS(G) attend_heads_dot<G>(q, keys, s, task, head, out, stride)
    FOR_HEADS(HEADS)
#undef HEADS
}
#endif

// Joins the chunks of one query head: partials are `stride` floats apart.
template <typename T>
INLINE void merge(const float* partial, int64_t chunks, int64_t stride, int64_t dim, T* out) {
    float maximum = -FLT_MAX;
    for (int64_t c = 0; c < chunks; ++c) {
        const float m = partial[c * stride + dim];
        maximum = m > maximum ? m : maximum;
    }
    float total = 0;
    F16 acc[kMaxDim / kLanes] = {};
    for (int64_t c = 0; c < chunks; ++c) {
        const float* part = partial + c * stride;
        const float weight = exp16(splat(part[dim] - maximum))[0];
        total += weight * part[dim + 1];
        for (int64_t d = 0; d < dim; d += kLanes) acc[d / kLanes] += load(part + d) * weight;
    }
    for (int64_t d = 0; d < dim; d += kLanes) store(out + d, acc[d / kLanes] / total);
}

}  // namespace

#define DEFINE_TASKS(NAME, T)                                                                     \
    ISA static void attend_##NAME(const T* q, const T* cache, const int64_t* table,              \
                                  const Shape& s, const Task& task, float* partial,              \
                                  int64_t stride) {                                              \
        attend_task<T>(q, cache, table, s, task, partial, stride);                               \
    }                                                                                             \
    ISA static void merge_##NAME(const float* partial, int64_t chunks, int64_t stride,           \
                                 int64_t dim, T* out) {                                          \
        merge<T>(partial, chunks, stride, dim, out);                                             \
    }

DEFINE_TASKS(bf16, Bf16)
DEFINE_TASKS(f32, float)

extern "C" {

int64_t hetero_attention_chunk() { return kChunk; }

// Copies rows of K and V to their places: `rows[t]` is the row of K in units of kv_heads * dim.
void hetero_store_kv(const char* k, const char* v, char* cache, const int64_t* rows, int64_t count,
                     int64_t row_bytes, int64_t k_stride_bytes, int64_t v_stride_bytes,
                     int64_t row_offset, int64_t block_size, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (count * row_bytes > 65536)
    for (int64_t t = 0; t < count; ++t) {
        char* key = cache + (rows[t] + row_offset) * row_bytes;
        std::memcpy(key, k + t * k_stride_bytes, row_bytes);
        std::memcpy(key + block_size * row_bytes, v + t * v_stride_bytes, row_bytes);
    }
}

// Attends `rows` single rows. `tasks` [num_tasks][4]: row, kv_head, first and last token; tasks of
// one (row, kv_head) are neighbours and `starts` [rows * kv_heads + 1] says where each begins.
// `partial` has room for num_tasks * group * (dim + 16) floats. `is_bf16` chooses bf16 or float.
// `softcap` and `slopes`: see Shape. Each row is at the position of its last token.
void hetero_attend_rows(const void* q, const void* cache, const int64_t* tables, void* out,
                        const int64_t* tasks, const int64_t* starts, int64_t num_tasks,
                        int64_t rows, int64_t kv_heads, int64_t group, int64_t dim,
                        int64_t block_size, int64_t columns, int64_t q_row, int64_t q_head,
                        int64_t piece_offset, float scale, float softcap, const float* slopes,
                        float* partial, int64_t is_bf16, int64_t threads) {
    const Shape s{block_size, kv_heads, group, dim, columns, q_row, q_head, scale, softcap, slopes};
    const int64_t stride = dim + kLanes;
    const int64_t heads = kv_heads * group;
    [[maybe_unused]] const bool dot = is_bf16 && dim % (2 * kLanes) == 0 && has_bf16_dot();
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_tasks; ++i) {
            const int64_t* entry = tasks + i * 4;
            const int64_t* newest = tasks + (starts[entry[0] * kv_heads + entry[1] + 1] - 1) * 4;
            const Task task{piece_offset, entry[1], entry[2], entry[3], newest[3] - 1};
            const int64_t* table = tables + entry[0] * columns;
            float* to = partial + i * group * stride;
            if (!is_bf16) {
                attend_f32((const float*)q + entry[0] * q_row, (const float*)cache, table, s, task,
                           to, stride);
                continue;
            }
            const Bf16* query = (const Bf16*)q + entry[0] * q_row;
#ifdef HAS_DOT
            if (dot) {
                attend_bf16_dot(query, (const Bf16*)cache, table, s, task, to, stride);
                continue;
            }
#endif
            attend_bf16(query, (const Bf16*)cache, table, s, task, to, stride);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows * kv_heads; ++i) {
            const int64_t first = starts[i], chunks = starts[i + 1] - first;
            for (int64_t g = 0; g < group; ++g) {
                const float* from = partial + (first * group + g) * stride;
                const int64_t at = ((i / kv_heads) * heads + (i % kv_heads) * group + g) * dim;
                if (is_bf16)
                    merge_bf16(from, chunks, group * stride, dim, (Bf16*)out + at);
                else
                    merge_f32(from, chunks, group * stride, dim, (float*)out + at);
            }
        }
    }
}

}  // extern "C"
