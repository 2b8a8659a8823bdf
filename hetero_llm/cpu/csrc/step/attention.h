// Attention of a step's tokens over the paged KV cache, in tasks that threads share.
//
// Cache: [block][layer][K|V][token][kv_head][dim], bf16 or float. A step's tokens are ordered by
// sequence. A sequence has one of three kinds of tokens: a single one (decoding); a chunk, whose
// tokens see everything up to themselves; a draft tree, whose nodes see everything before a base
// and, from the base on, their ancestors and themselves. Earlier steps may have left some of these
// ancestors in the cache.

#pragma once

#include <cstdint>

#include "isa.h"

namespace hetero {

struct CacheShape {
    void* data;
    bool is_bf16;
    int64_t layers, block_size, kv_heads, dim;
};

struct AttentionTokens {
    int64_t sequences, tokens;
    const int32_t* request_slots;  // [sequences] row of block_tables
    const int32_t* num_computed;   // [sequences] tokens in the cache before the step
    const int32_t* num_scheduled;  // [sequences] tokens in the step
    // [sequences] where a tree's window begins, at most num_computed; the window, up to the tree's
    // last node, has at most 64 tokens. Unused for other sequences.
    const int32_t* bases;
    const uint8_t* is_tree;        // [sequences]
    const uint64_t* ancestors;     // [tokens] of tree nodes: bit j: the node sees token base + j
    const int32_t* block_tables;   // [request slots][columns] block ids
    int64_t columns;
};

// The tasks of a step and their scratch memory, which grows and is used again by the next step. An
// executor has one for each window.
struct AttentionPlan;
AttentionPlan* new_attention_plan(int threads);
void free_attention_plan(AttentionPlan* plan);

// Cuts the step's attention into tasks, once per step and window (the same for all layers). Called
// by one thread. window: tokens a token sees, itself included; 0: all. For a tree's node only the
// tokens of its path count, as if the path were a chunk. heads: query heads.
void plan_attention(AttentionPlan* plan, const CacheShape& cache, const AttentionTokens& tokens,
                    int64_t heads, int64_t window, float scale, Isa isa);

// Whether contexts were cut, so that `merge` has to follow `attend`, behind a barrier.
bool needs_merge(const AttentionPlan* plan);

// Runs tasks of one layer until none is left. q: rotated queries [tokens][heads][dim], bf16 or
// float as the cache; out: the same shape in float; tokens are q_stride and out_stride elements
// apart. Every thread takes the next task of a counter, which begin_layer resets (called by one
// thread, before a barrier).
void begin_layer(AttentionPlan* plan);
void attend(AttentionPlan* plan, int64_t layer, const void* q, int64_t q_stride, float* out,
            int64_t out_stride, int thread);
void merge(AttentionPlan* plan, float* out, int64_t out_stride, int thread);

}  // namespace hetero
