// Products of few or many rows with packed weights: out[r][n] = sum over k of x[r][k] * w[n][k].
//
// One layout serves vector instructions and AMX tiles. A panel is 64 outputs; inside it k runs
// slowest: bf16 [k / 2][64][2], float [k][64], int8 [k / 4][64][4]. A strip is 16 outputs, a
// quarter of a panel: the unit in which threads share the work. Depth and outputs are padded with
// zeros to multiples of 64.

#pragma once

#include <cstdint>

#include "isa.h"

namespace hetero {

enum class Format : int { kBf16 = 0, kFloat = 1, kInt8 = 2 };

constexpr int64_t kPanel = 64, kStrip = 16, kDepth = 64;

struct Matrix {
    Format format;
    int64_t outputs, depth;                // as the model has them
    int64_t padded_outputs, padded_depth;  // multiples of kPanel and kDepth
    void* data;                            // packed, 64-byte aligned
    float* scales;   // kInt8: [padded_outputs], w = scale * integer; else null
    int32_t* sums;   // kInt8: [padded_outputs] sums of the integers; else null
};

// Bytes of `data`, a multiple of 64.
int64_t packed_bytes(Format format, int64_t outputs, int64_t depth);

// Packs outputs [first, last) of rows [outputs][depth] (row-major bf16 or float, `stride` elements
// apart) to the places of outputs [to, to + last - first). int8: symmetric, one scale per output,
// rounded to nearest. Padding is the caller's: `data` begins as zeros.
void pack(Matrix& matrix, const void* weight, bool weight_is_bf16, int64_t stride, int64_t first,
          int64_t last, int64_t to);

// Rows as `multiply` takes them: [rows][padded_depth] of bf16, float or int8 with one scale per row
// (x = scale * integer, symmetric), padding zero.
struct Rows {
    const void* data;
    int64_t stride;       // elements
    const float* scales;  // kInt8 only
};

// Bytes of one element of prepared rows.
constexpr int64_t element_bytes(Format format) {
    return format == Format::kFloat ? 4 : format == Format::kBf16 ? 2 : 1;
}

// Prepares float rows: rounds, copies or quantizes `depth` values and zeroes the rest up to
// `padded_depth`. scale: kInt8 only.
void prepare_row(Format format, const float* x, int64_t depth, int64_t padded_depth, void* out,
                 float* scale, Isa isa);

// out[r * out_stride + 16 * s + i] for rows [0, rows) of x and strips [first, first + strips):
// float sums in float (bf16, float) or exact integers scaled once (int8). Overwrites `out`. x
// points to the first row; `out` has room for padded outputs. A result does not depend on how rows
// and strips are divided among calls. int8 results are equal to the last bit at every level.
void multiply(const Matrix& matrix, const Rows& x, int64_t rows, int64_t first, int64_t strips,
              float* out, int64_t out_stride, Isa isa);

// Releases the calling thread's AMX tiles, whose state slows down context switches; `multiply`
// configures them again.
void release_tiles();

}  // namespace hetero
