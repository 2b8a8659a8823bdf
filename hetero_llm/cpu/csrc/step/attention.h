// Attention of a step's rows over the paged KV cache, in parts that threads share.
//
// Cache: [block][layer][K|V][token][kv_head][dim], bf16 or float. Rows of one sequence follow each
// other. Three kinds of sequences: one row (decoding), a draft tree (each row sees everything before
// a base and, from there on, its ancestors and itself, some of which may be in the cache since
// earlier steps), a chunk (rows see everything up to themselves).

#pragma once

#include <cstdint>

#include "isa.h"

namespace hetero {

struct CacheShape {
    void* data;
    bool is_bf16;
    int64_t layers, block_size, kv_heads, dim;
};

struct AttentionRows {
    int64_t sequences, rows;
    const int32_t* slots;       // [sequences]
    const int32_t* starts;      // [sequences] tokens in the cache before the step
    const int32_t* counts;      // [sequences] rows
    // [sequences] of a tree: where its window begins, at most its start; the window, up to the
    // tree's last row, has at most 64 tokens. Others are not looked at.
    const int32_t* bases;
    const uint8_t* is_tree;     // [sequences]
    const uint64_t* ancestors;  // [rows] tree rows: bit j says that the row sees token base + j
    const int32_t* tables;      // [slots][columns] block ids
    int64_t columns;
};

// The rows' queries after rotation: [rows][heads][dim], bf16 or float as the cache; outputs float.
struct AttentionPlan;

// Scratch is the plan's; it grows and is used again. One plan per executor.
AttentionPlan* new_attention_plan(int threads);
void free_attention_plan(AttentionPlan* plan);

// Cuts the step's attention into tasks, once per step and window (the same for all layers). Called
// by one thread. window: tokens a row sees, itself included; 0: all. What a tree's row does not see
// does not count, so that its window is that of its path as a chunk. heads: query heads.
void plan_attention(AttentionPlan* plan, const CacheShape& cache, const AttentionRows& rows,
                    int64_t heads, int64_t window, float scale, Isa isa);

// Whether results of cut contexts have to be merged (after a barrier).
bool needs_merge(const AttentionPlan* plan);

// This thread's share of the tasks of one layer; q and out as above, rows `stride` elements apart.
// Tasks are handed out dynamically: begin_layer (by one thread, before a barrier) resets the
// counter.
void begin_layer(AttentionPlan* plan);
void attend(AttentionPlan* plan, int64_t layer, const void* q, int64_t q_stride, float* out,
            int64_t out_stride, int thread);
void merge(AttentionPlan* plan, float* out, int64_t out_stride, int thread);

}  // namespace hetero
