// Row-wise parts of a decoder layer, in float unless said otherwise.

#pragma once

#include <cstdint>

#include "isa.h"

namespace hetero {

// out = x / rms(x) * weight.
void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* out, Isa isa);

// Rotates one head in place, the first `rotary_dim` values: halves are pairs (Llama's convention).
// factors: cos [rotary_dim / 2], then sin [rotary_dim / 2].
void rotate(float* head, const float* factors, int64_t rotary_dim, Isa isa);

// Rows of a product's outputs, `size` of each.
struct Block {
    const float* data;
    int64_t stride, rows, size;
};

// out[i] = activation(gate[i]) * up[i]; kind 0: silu, 1: gelu with tanh, 2: exact gelu. The block
// has strips of 16 gates and of 16 ups alternately; `size` counts the pairs, a multiple of 16.
void gated(const Block& in, int kind, float* out, int64_t out_stride, Isa isa);

// x += y + bias, row by row; bias [size].
void add_block(float* x, int64_t stride, const Block& y, const float* bias, Isa isa);

// x += scale * y.
void add_scaled(float* x, const float* y, float scale, int64_t size, Isa isa);

// x += y.
void add(float* x, const float* y, int64_t size, Isa isa);

// bf16 to float and back (to nearest, ties to even).
void widen(const uint16_t* x, int64_t size, float* out, Isa isa);
void narrow(const float* x, int64_t size, uint16_t* out, Isa isa);

// Token masks: bit `token % 32` of word `token / 32` says whether a row may sample the token.

// Whether any of the tokens first .. first + size - 1 is allowed.
bool allows_any(const uint32_t* mask, int64_t first, int64_t size);

// scores[i] = -infinity where token first + i is forbidden; `first` is a multiple of 16.
void forbid(float* scores, int64_t size, int64_t first, const uint32_t* mask, Isa isa);

// Updates the largest score so far, `best`, and its token (the lowest one on ties); `first` is the
// token of scores[0]. Callers begin with -infinity and -1.
void pick_greedy(const float* scores, int64_t size, int64_t first, float* best, int64_t* token,
                 Isa isa);

// The same over scores / temperature + noise, see hetero_llm/sampling/noise.py for the noise:
// Philox4x32-10, key the seed, counter (token / 4, position, sample index, 0). `first` is a
// multiple of 4.
struct Noise {
    float temperature;
    uint64_t seed;
    uint32_t position, sample_index;
};
void pick_noisy(const float* scores, int64_t size, int64_t first, const Noise& noise, float* best,
                int64_t* token, Isa isa);

}  // namespace hetero
