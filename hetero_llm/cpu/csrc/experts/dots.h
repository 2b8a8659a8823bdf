// Dot products of a few tokens with rows of weights, for every vector instruction set.
//
// A result is one chain of sums over k in an order of its own: it does not depend on other rows,
// on other tokens or on how calls share them.

#pragma once

#include "matrix.h"

namespace hetero::experts {

// Whether products take bf16 rows: bf16 inputs, and dot products of bf16 (for 8-bit weights also
// tables of bytes) in the instruction set. Else they take float rows.
bool takes_bf16(Kind kind, Number input, Isa isa);

// How rows for `dot_rows` are ordered.
Layout dot_layout(Kind kind, bool bf16_rows, Isa isa);

struct DotJob {
    const Form* form;
    Matrix matrix;
    int64_t first, count;    // rows of the matrix
    const void* const* x;    // [tokens] prepared rows: bf16 or float, padded, in order
    int64_t tokens;
    float* out;              // out[t * out_stride + i]: of token t and row first + i
    int64_t out_stride;
    const char* next;        // rows to prefetch while the last ones are read, or null
    bool bf16_rows;
    Isa isa;
};

void dot_rows(const DotJob& job);

}  // namespace hetero::experts
