// Mixtures of experts: layers whose MLP is a router and gated MLPs, of which a token uses a few.
//
// A step reads the weights of the experts that its tokens chose, once: threads share a flat list of
// (expert, panel, block of its tokens), first of gate and up, then, behind a barrier, of down. Each
// thread adds its part of the outputs to the residual, one expert after the other in ascending
// order, the shared expert last: no sum depends on threads or on other tokens.

#pragma once

#include <vector>

#include "arena.h"
#include "matmul.h"

namespace hetero {

struct Executor;
struct Layer;
struct Run;

// The k likeliest of `experts` by their logits, the likeliest first and the lower one first where
// logits are equal, and their probabilities: a softmax over all experts, divided by the sum of the
// chosen ones' if `renormalize`. k is at most `experts`. NaN gives weights of NaN.
void route(const float* logits, int64_t experts, int64_t k, bool renormalize, int32_t* ids,
           float* weights);

// The tokens of one expert in a step, and where its inputs and outputs lie.
struct ExpertPart {
    const Matrix *gate_up, *down;
    const int32_t* tokens;   // [rows]
    const float* weights;    // [rows], what its outputs are multiplied by
    int64_t rows;
    Rows in, inner;          // inputs of gate_up, of down
    char* gates;             // [rows][gate_stride], float or as down takes it
    int64_t gate_stride;     // elements
    int64_t expert, first;   // its number, -1 of the shared one; its first row among all pairs
};

// Whose inputs a layer's tokens are prepared as: forms may differ.
enum MixtureInput : int { kRouterInput, kExpertInput, kSharedInput, kMixtureInputs };

// Scratch of a step.
struct Mixture {
    int64_t logit_stride, order_size;
    Buffer<char> inputs[kMixtureInputs];          // [tokens] prepared rows
    Buffer<float> input_scales[kMixtureInputs];   // [tokens]
    Buffer<float> logits;                         // [tokens][logit_stride], the shared gate's last
    Buffer<int32_t> ids;                          // [tokens][experts of one], or of each thread
    Buffer<float> id_weights;
    Buffer<int32_t> order;                        // [threads][order_size]: see `order_tokens`
    Buffer<float> order_weights;                  // [threads][order_size]
    Buffer<char> pairs;                           // rows by expert: of gate_up, then of down
    Buffer<float> pair_scales;
    Buffer<char> gates;                           // [pairs][gate stride], 4 bytes each
    std::vector<std::vector<ExpertPart>> parts;   // of each thread
};

// Reserves a step's scratch; `run` has its number of tokens.
void reserve_mixture(Mixture& mixture, const Run& run);

// Adds a layer's experts to the residual. All threads call it; it begins behind a barrier and ends
// before one.
void run_mixture(const Run& run, const Layer& layer, int64_t index, int thread);

}  // namespace hetero
