// The register tiles that dots.cpp calls, and their arguments.

#pragma once

#include "matrix.h"

namespace hetero::experts {

constexpr int kMostTileRows = 4, kMostTileTokens = 4;

// Some rows of weights with some tokens.
struct DotCall {
    const char* w[kMostTileRows];       // rows
    const char* ahead[kMostTileRows];   // rows to prefetch at the same offsets
    const char* scales[kMostTileRows];  // of each row's first group
    const char* zeros[kMostTileRows];
    const void* x[kMostTileTokens];
    const Form* form;
    float* out;  // out[t * out_stride + i]
    int64_t out_stride;
};
using DotTile = void (*)(const DotCall& call);

// Tiles of a kind: tile[t] takes 1 << t tokens with `rows` rows, single[t] with one row.
struct DotTiles {
    DotTile tile[3], single[3];
    int rows[3];
};

const DotTiles& bf16_dots(Kind kind, Zeros zeros);
const DotTiles& float_dots(Kind kind, Isa isa);

}  // namespace hetero::experts
