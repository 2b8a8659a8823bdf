// What the parts of attention share: a task and the kernels that run it.

#pragma once

#include <cfloat>
#include <cstdint>

#include "attention.h"
#include "lanes.h"

namespace hetero {

constexpr int64_t kMaxDim = 256;
constexpr int64_t kMaxTile = 96;   // lanes of a task; a lane is one query head of one token
constexpr int64_t kTokens = 64;    // of the context between two updates of the running maximum
constexpr int64_t kAllTokens = 1 << 30;  // a window without limit; int32 sums with it are in range
constexpr float kHidden = -FLT_MAX;
constexpr float kLowest = -FLT_MAX / 4;  // first maximum: above kHidden, so hidden tokens weigh 0

// What is the same for all tasks of a step. A piece is K or V of one layer of one block.
// block_pieces: pieces from one block id to the next; piece_offset: of K of the layer in its block.
// Scores are in powers of two (natural ones times log2(e)), and so are scale and softcap.
struct Work {
    const void* cache;
    int64_t block_size, block_pieces, kv_heads, group, dim, window, piece_offset;
    float scale;
    const void* q;
    int64_t q_stride;
    // Only the kernel for few lanes has these, and not for trees. softcap: scores become
    // softcap * tanh(score / softcap); 0: they stay. slopes: of natural scores, one for each query
    // head (ALiBi); null: none.
    float softcap = 0;
    const float* slopes = nullptr;
};

struct Task;
struct Results;

// Runs one task. scratch: as many bytes as the kernel asks for, 64-byte aligned.
using Kernel = void (*)(const Work& work, const Task& task, const Results& to, void* scratch);

// `lanes` lanes of one sequence and one KV head, and tokens first .. last of the context. A query
// is a token of the step: queries of a chunk count from the sequence's `start`, bits of a tree's
// ancestors from its `base`. Lanes are ordered by query, then by head; the first one is head `head`
// of the KV head's group and of query `query`. A cut context begins and ends at multiples of
// kTokens. The task of a single query may have several KV heads: they lie beside each other in
// memory and are best read together.
struct Task {
    const int32_t* table;
    const uint64_t* ancestors;  // of the sequence's queries; null: the queries are a chunk
    int64_t start, base, query, head, lanes, kv_head, first, last;
    int64_t step_token;  // the first query's index among the step's tokens
    int64_t partial;     // where its results go among the partial ones, in floats; -1: to `out`
    Kernel kernel;
    int64_t kv_heads;  // from kv_head on
};

// Where a task's results go, one vector of `dim` floats for each lane, from its first lane on.
// is_partial: they are not divided by their sums of weights yet, and maximum and sum follow each
// vector.
struct Results {
    float* data;
    int64_t token_stride, head_stride;  // floats
    bool is_partial;
};

INLINE const void* query_of(const Work& work, const Task& task, int64_t lane, int64_t bytes) {
    const int64_t token = task.step_token + (task.head + lane) / work.group;
    const int64_t head = task.kv_head * work.group + (task.head + lane) % work.group;
    return (const char*)work.q + (token * work.q_stride + head * work.dim) * bytes;
}

INLINE float* result_of(const Work& work, const Results& to, int64_t lane) {
    return to.data + lane / work.group * to.token_stride + lane % work.group * to.head_stride;
}

// The tokens a lane sees: first .. last, and base + j for each bit j of `own`.
struct Sight {
    int32_t first, last;
    uint64_t own;
};

inline Sight sight_of(const Work& work, const Task& task, int64_t lane) {
    const int64_t query = task.query + (task.head + lane) / work.group;
    if (!task.ancestors) {
        const int64_t position = task.start + query;
        return {(int32_t)most(0, position - work.window + 1), (int32_t)position, 0};
    }
    uint64_t own = task.ancestors[query];
    const int64_t depth = __builtin_popcountll(own);
    // Ancestors lie before their descendants, so the lowest bits are those furthest away.
    for (int64_t far = depth - work.window; far > 0; --far) own &= own - 1;
    return {(int32_t)most(0, task.base + depth - work.window), (int32_t)task.base - 1, own};
}

// For tasks of few lanes, and for all tasks where there is no other kernel: products along `dim`.
Kernel few_lanes_kernel(bool is_bf16, int64_t dim, Isa isa);
int64_t few_lanes_scratch();

// For tasks of many lanes: by bf16 dot products with 16 lanes a vector, and by AMX tiles. Null
// where the level, the type or `dim` does not allow it.
Kernel many_lanes_kernel(bool is_bf16, int64_t dim, Isa isa);
int64_t many_lanes_scratch();
Kernel tiles_kernel(bool is_bf16, int64_t dim, Isa isa);
int64_t tiles_scratch();

// Joins `count` partial results of one lane, `stride` floats apart.
void join(const float* partial, int64_t count, int64_t stride, int64_t dim, float* out, Isa isa);

}  // namespace hetero
