// A Llama-shaped model's weights, packed, in one arena in the order in which a step reads them.

#pragma once

#include <vector>

#include "arena.h"
#include "executor.h"
#include "matmul.h"
#include "numbers.h"

namespace hetero {

struct Expert {
    Matrix gate_up, down;
};

struct Layer {
    const float *norm, *second_norm;                // [hidden]
    const float *q_norm, *k_norm;                   // [dim]
    const float *qkv_bias, *out_bias, *down_bias;   // [outputs], zeros if the model has none
    Matrix qkv, out, gate_up, down;                 // gate_up: strips of both take turns
    int64_t inner;                                  // of gate_up and down; 0: it has neither
    Matrix router;                                  // the shared expert's gate is its last output
    std::vector<Expert> experts;                    // none: gate_up and down serve every token
};

struct Model {
    HeteroModel sizes;
    std::vector<Layer> layers;
    Matrix head;
    const float* final_norm;
    // Rows of the embedding, bf16 or float; null: they are read from the packed head (tied).
    const void* embedding = nullptr;
    bool embedding_is_bf16;
    Arena arena;

    int64_t all_heads() const { return sizes.heads + 2 * sizes.kv_heads; }
    int64_t widest_inner() const {
        int64_t widest = 0;
        for (const Layer& layer : layers) widest = most(widest, layer.inner);
        return widest;
    }
};

// Reserves memory for all weights; false if there is none. forms: see hetero_executor_new.
bool reserve_model(Model& model, const HeteroModel& sizes, const Form* forms);

// A weight as the caller has it, row-major: bf16, float or, if `quantized` is not null, integers.
struct GivenWeight {
    const void* data;
    int64_t rows, columns;
    bool is_bf16;
    const Quantized* quantized;
};

struct WeightPlace {
    int64_t layer, which, expert;
};

// See hetero_executor_set. Thread `part` of `parts` packs its share of the rows; part 0 copies
// vectors. False if the shape is not the model's, or integers are not in the matrix's format.
bool set_weight(Model& model, const WeightPlace& place, const GivenWeight& weight, int64_t part,
                int64_t parts);

// Row `token` of the embedding as floats, [hidden].
void embed(const Model& model, int64_t token, float* out, Isa isa);

}  // namespace hetero
