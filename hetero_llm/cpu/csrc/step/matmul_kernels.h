// The register tiles that matmul.cpp calls, and their arguments.
//
// In every format a step of k is 4 bytes of a row and 4 bytes of each of a panel's 64 outputs: two
// bf16, one float or four int8.

#pragma once

#include "matmul.h"
#include "numbers.h"

namespace hetero {

constexpr int64_t kStepBytes = 256;  // of a panel
constexpr int64_t kUnroll = 4;       // steps; divides the steps of any padded depth
constexpr int kTileRows = 6, kTileStrips = 4;

struct TileCall {
    const char* weights;  // first step of the first strip; steps are kStepBytes apart
    const char* x;        // first step of the first row
    int64_t x_stride;     // bytes
    int64_t steps;        // multiple of kUnroll
    float* out;
    int64_t out_stride;  // elements
    bool add;            // to the sums that `out` holds (int8: as int32)
    bool last;           // int8: no more steps, scale the sums
    const char* ahead;   // weights to prefetch
    int64_t lines;       // cache lines of them to fetch for each kUnroll steps
    const float *x_scales, *scales;  // int8
    const int32_t* sums;             // int8
    // multiply_strips: bytes to the inputs of each strip, elements to the outputs of each row.
    const int64_t *offsets, *rows;
};
using Tile = void (*)(const TileCall& call);

// Tiles of one format and instruction set: tile[rows - 1][strips - 1], null where registers do not
// suffice. strips[rows - 1]: the widest tile with that number of rows.
struct Tiles {
    Tile tile[kTileRows][kTileStrips];
    int rows;
    int strips[kTileRows];
};

// bf16 or float; strips: for a StripProduct.
const Tiles& vector_tiles(Format format, Isa isa, bool strips);
const Tiles& int8_tiles(Isa isa);

// Products of weights with groups; arguments as of `multiply`.
void multiply_groups(const Matrix& matrix, const Rows& x, int64_t rows, int64_t first,
                     int64_t strips, float* out, int64_t out_stride, Isa isa);
void multiply_groups_amx(const Matrix& matrix, const Rows& x, int64_t rows, int64_t first,
                         int64_t strips, float* out, int64_t out_stride);

// `pack` of int4 and `pack_quantized` of weights with groups.
void pack_groups(Matrix& matrix, const void* weight, bool weight_is_bf16, int64_t stride,
                 int64_t first, int64_t last, int64_t to);
void pack_groups(Matrix& matrix, const Quantized& from, int64_t first, int64_t last, int64_t to);

// bf16 and int8 on AMX; arguments as of `multiply`.
void multiply_amx(const Matrix& matrix, const Rows& x, int64_t rows, int64_t first, int64_t strips,
                  float* out, int64_t out_stride);

}  // namespace hetero
