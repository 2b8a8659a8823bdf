// Attention of the torch path over the paged KV cache, by the step executor's kernels, and the
// store of K and V that precedes it.
//
// Cache layout: [block][layer][K|V][token][kv_head][dim]. A piece is K or V of one layer of one
// block, so a piece index times block_size * kv_heads * dim is an element offset. Results do not
// depend on the number of threads: contexts are cut at fixed places, and no operation mixes a
// chunk's tokens.
//
// Threads: OpenMP without linking a runtime. The caller has loaded the runtime that torch uses, so
// both share one team of threads; two spinning teams on the same cores would starve each other.

#include "step/arena.h"
#include "step/attention_parts.h"
#include "step/rows.h"

namespace hetero {
namespace {

constexpr int64_t kCut = 256;  // a decoded token's context is cut at multiples of it

// A thread's own memory, which it keeps from one call to the next.
char* scratch_of(int64_t bytes) {
    static thread_local Buffer<char> buffer;
    return buffer.reserve(bytes);
}

void write_result(const float* from, int64_t count, bool is_bf16, void* out, int64_t at, Isa isa) {
    if (is_bf16) narrow(from, count, (uint16_t*)out + at, isa);
    else std::memcpy((float*)out + at, from, count * sizeof(float));
}

}  // namespace
}  // namespace hetero

extern "C" {

int64_t hetero_attention_cut() { return hetero::kCut; }

// Floats of one head's partial result.
int64_t hetero_attention_partial(int64_t dim) {
    return hetero::round_up(dim + 2, hetero::kLanes);
}

// Copies K and V of `count` tokens to their places: `rows[t]` is the row of K in units of
// kv_heads * dim.
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

// Attends `tokens` single tokens, each the last one of its sequence. q, out: [tokens][heads][dim],
// bf16 or float as the cache; q's tokens are q_stride elements apart. tables [tokens][columns]: K
// piece of layer 0 of each block. tasks [num_tasks][4]: token, KV head, first and last token of its
// context; those of one (token, KV head) are neighbours and starts [tokens * kv_heads + 1] says
// where each begins. partial: room for num_tasks * group partial results. softcap: 0 for none;
// slopes: [heads] or null.
void hetero_attend_rows(const void* q, const void* cache, const int32_t* tables, void* out,
                        const int64_t* tasks, const int64_t* starts, int64_t num_tasks,
                        int64_t tokens, int64_t kv_heads, int64_t group, int64_t dim,
                        int64_t block_size, int64_t columns, int64_t q_stride,
                        int64_t piece_offset, float scale, float softcap, const float* slopes,
                        float* partial, int64_t is_bf16, int64_t threads) {
    using namespace hetero;
    const Isa isa = best_isa();
    const Kernel kernel = few_lanes_kernel(is_bf16, dim, isa);
    const Work work{cache, block_size, 1, kv_heads, group, dim, kAllTokens, piece_offset,
                    scale * kLog2e, q, q_stride, softcap * kLog2e, slopes};
    const int64_t stride = hetero_attention_partial(dim);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_tasks; ++i) {
            const int64_t *entry = tasks + i * 4, token = entry[0], kv_head = entry[1];
            const int64_t next = starts[token * kv_heads + kv_head + 1];
            const int64_t position = tasks[(next - 1) * 4 + 3] - 1;
            Task task{tables + token * columns, nullptr, position, position, 0, 0, 0, kv_head,
                      entry[2], entry[3], token, -1, kernel, 1};
            for (; task.head < group; task.head += task.lanes) {
                task.lanes = least(kMaxTile, group - task.head);
                kernel(work, task, {partial + (i * group + task.head) * stride, 0, stride, true},
                       scratch_of(few_lanes_scratch()));
            }
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tokens * kv_heads; ++i) {
            const int64_t first = starts[i], cuts = starts[i + 1] - first;
            float joined[kMaxDim];
            for (int64_t g = 0; g < group; ++g) {
                const float* from = partial + (first * group + g) * stride;
                join(from, cuts, group * stride, dim, joined, isa);
                write_result(joined, dim, is_bf16, out, (i * group + g) * dim, isa);
            }
        }
    }
}

int64_t hetero_can_attend_chunk(int64_t dim) {
    return hetero::many_lanes_kernel(true, dim, hetero::best_isa()) != nullptr;
}

// Attends `count` tokens of one sequence that follow `start` cached ones, all in bf16. q, out:
// [count][heads][dim]; q's tokens are q_stride elements apart. table: K piece of layer 0 of each
// block. A token sees the last `window` tokens up to itself.
void hetero_attend_chunk(const void* q, const void* cache, const int32_t* table, void* out,
                         int64_t start, int64_t count, int64_t kv_heads, int64_t group,
                         int64_t dim, int64_t block_size, int64_t q_stride, int64_t piece_offset,
                         int64_t window, float scale, int64_t threads) {
    using namespace hetero;
    const Isa isa = best_isa();
    const Kernel kernel = many_lanes_kernel(true, dim, isa);
    const Work work{cache, block_size, 1, kv_heads, group, dim, window, piece_offset,
                    scale * kLog2e, q, q_stride};
    const int64_t lanes = count * group, vectors = (lanes + kLanes - 1) / kLanes;
    int64_t parts = (lanes + kMaxTile - 1) / kMaxTile;
    // Few tasks should keep all threads busy.
    while (parts * kv_heads < 4 * threads && parts * kv_heads % threads && parts < vectors) ++parts;
    const int64_t size = (vectors + parts - 1) / parts * kLanes;
    parts = (lanes + size - 1) / size;
    // Later tokens see more: the largest tasks come first.
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t i = 0; i < parts * kv_heads; ++i) {
        const int64_t kv_head = i % kv_heads, begin = (parts - 1 - i / kv_heads) * size;
        const int64_t end = least(begin + size, lanes), query = begin / group;
        const Task task{table, nullptr, start, start, query, begin % group, end - begin, kv_head,
                        most(0, start + query - window + 1), start + (end - 1) / group + 1, query,
                        -1, kernel, 1};
        const int64_t kernel_bytes = round_up(many_lanes_scratch(), kLine);
        char* scratch = scratch_of(kernel_bytes + kMaxTile * dim * (int64_t)sizeof(float));
        float* result = (float*)(scratch + kernel_bytes);
        kernel(work, task, {result, group * dim, dim, false}, scratch);
        for (int64_t lane = begin; lane < end; ++lane, result += dim) {
            const int64_t head = (lane / group * kv_heads + kv_head) * group + lane % group;
            narrow(result, dim, (uint16_t*)out + head * dim, isa);
        }
    }
}

}  // extern "C"
