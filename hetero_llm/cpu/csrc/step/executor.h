// The whole step of a Llama-shaped decoder as one call: C ABI of executor.cpp.

#pragma once

#include <cstdint>

#include "matmul.h"

namespace hetero {
struct Executor;
}
using HeteroExecutor = hetero::Executor;

extern "C" {

// Sizes of a model. activation: rows.h's `gated` kind. inner: of the layers without experts.
// experts: of each of the others, 0 if there are none; shared_inner: of the expert that every token
// uses, 0 if there is none; renormalize: see mixture.h's `route`. sparse [layers]: whether a layer
// has experts; null without any, read by hetero_executor_new alone.
struct HeteroModel {
    int64_t layers, hidden, inner, heads, kv_heads, dim, vocab, rotary_dim, max_positions;
    int64_t activation, qk_norm, cache_is_bf16, tied_head;
    int64_t experts, experts_per_token, expert_inner, shared_inner, renormalize;
    const uint8_t* sparse;
    double eps, attention_scale;
};

// A quantized weight [rows][columns].
struct HeteroQuantized {
    int64_t rows, columns;
    hetero::Quantized tensors;
};

// What a step runs. Arrays of tokens and sequences as in attention.h, and of each token its
// slot_mapping: the KV slot (block * block size + offset) for its K and V.
//
// Samples: sampled_after [samples] is the token that each one follows. modes [samples]: 0 greedy, 1
// with noise, 2 logits only, 3 the `num_candidates` likeliest tokens (with noise if the temperature
// is not 0). sample_positions: of the tokens to be sampled, for the noise. masks
// [rows][mask_words]: token masks (rows.h); mask_rows [samples]: the row of each sample, -1 for
// none. Both may be null. A forbidden token is neither sampled nor a candidate; where every token
// is, token 0 is sampled.
//
// adapter_slots [sequences]: the slot of each one's adapter, filled before, -1 for none; null: no
// sequence has one.
//
// Outputs: sampled [samples], of modes 0 and 1; candidates and log_probs [samples][num_candidates],
// of mode 3, null without it (candidates.h: merge_candidates); logits [samples][vocab] or null,
// those of forbidden tokens included; hidden [tokens][hidden] after the final norm, or null.
struct HeteroStep {
    int64_t num_tokens, num_sequences, num_samples, columns, num_candidates, mask_words;
    const int32_t *token_ids, *positions, *slot_mapping;
    const int32_t *request_slots, *num_computed, *num_scheduled, *bases;
    const uint8_t* is_tree;
    const uint64_t* ancestors;
    const int32_t* block_tables;
    const int32_t* adapter_slots;
    const int32_t* sampled_after;
    const uint8_t* modes;
    const float* temperatures;
    const uint64_t* seeds;
    const int32_t *sample_positions, *sample_indices;
    const int32_t* mask_rows;
    const uint32_t* masks;
    int64_t* sampled;
    int32_t* candidates;
    float* log_probs;
    float* logits;
    float* hidden;
};

// forms: of qkv, output, gate and up, down, router, the experts' gate and up, their down of each
// layer (those that it does not have mean nothing), then of the head; int8 with groups takes
// quantized weights only, a router bf16 or float. cache: the paged KV cache. windows [layers]: 0
// for none. rotary: [max_positions][rotary_dim] floats, cos then sin. isa: isa.h's level, -1 for
// the best. cpus: see team.h; may be null. pools [threads]: of each thread its NUMA node's number,
// from 0 on and ascending; null: one node. Returns null if there is no memory.
HeteroExecutor* hetero_executor_new(const HeteroModel* model, const hetero::Form* forms,
                                    void* cache, int64_t block_size, const int64_t* windows,
                                    const float* rotary, int64_t threads, const int32_t* cpus,
                                    const int32_t* pools, int64_t isa);
void hetero_executor_free(HeteroExecutor* executor);

// Team::slept_ns of its threads.
int64_t hetero_executor_slept(HeteroExecutor* executor);

// Weights, row-major, copied and packed. which: 0 embedding, 1 final norm, 2 head; of a layer: 3
// input norm, 4 qkv, 5 qkv bias, 6 output, 7 output bias, 8 second norm, 9 gate and up, 10 down,
// 11 q norm, 12 k norm, 13 router, 14 the shared expert's gate [1][hidden], 15 an expert's gate and
// up, 16 its down; 9 and 10 of a layer with experts are the shared one's. expert: which, of 15 and
// 16. dtype: 0 bf16, 1 float, of norms and biases too. Returns 0, or -1 if the shape is not the
// model's.
int64_t hetero_executor_set(HeteroExecutor* executor, int64_t layer, int64_t which, int64_t expert,
                            const void* data, int64_t rows, int64_t columns, int64_t dtype);

// The same for a matrix that was quantized before, in the format of its form.
int64_t hetero_executor_set_quantized(HeteroExecutor* executor, int64_t layer, int64_t which,
                                      int64_t expert, const HeteroQuantized* weight);

// B of one module that a LoRA adapter changes: rows first_row .. first_row + rows - 1 of a product
// get the product of its rank columns with ranks first_rank .. first_rank + rank - 1 of A's.
struct HeteroAdapterPart {
    int64_t first_row, rows, first_rank, rank;
    const void* b;  // [rows][rank]
};

// What an adapter adds to a product of a layer. product: 0 qkv, 1 output, 2 gate and up, 3 down (of
// a layer with experts the shared one's), 4 router, 5 the shared expert's gate. expert: whose gate
// and up or down it is; -1: no expert's.
struct HeteroAdapterProduct {
    int64_t layer, product, expert, ranks, columns, num_parts;
    const void* a;        // [ranks][columns], of all modules
    const float* scales;  // [ranks]
};

// An adapter, row-major, in the executor's adapter type. parts: of all products, one product after
// the other, each by first_row. Of gate and up, which are one product, there is one part each, or
// one of both.
struct HeteroAdapter {
    int64_t num_products;
    const HeteroAdapterProduct* products;
    const HeteroAdapterPart* parts;
};

// Makes empty slots for adapters; once, before any is filled. dtype: 0 bf16, 1 float.
void hetero_executor_make_slots(HeteroExecutor* executor, int64_t slots, int64_t dtype);

// Copies and packs an adapter; it replaces what the slot had. Returns 0, -1 if the adapter does not
// fit the model, or -2 if there is no memory; the slot is empty then.
int64_t hetero_executor_fill_slot(HeteroExecutor* executor, int64_t slot,
                                  const HeteroAdapter* adapter);

void hetero_executor_step(HeteroExecutor* executor, const HeteroStep* step);

}
