// Products of few or many rows with packed weights: out[r][n] = sum over k of x[r][k] * w[n][k].
//
// One layout serves vector instructions and AMX tiles. A panel is 64 outputs; inside it k runs
// slowest: bf16 [k / 2][64][2], float [k][64], int8 [k / 4][64][4]. A strip is 16 outputs, a
// quarter of a panel: the unit in which threads share the work. Depth and outputs are padded with
// zeros to multiples of 64.
//
// Weights with scales for groups of k (kInt4, kInt8Groups): a panel is a row of groups, each with
// its scales [64], then zero points or offsets [64] if there are any, then its integers: int4
// [k / 8][64][4], where byte j has k = j in its low half and k = 4 + j in its high half, int8
// [k / 4][64][4]. A panel is one stream. The last group may be shorter.

#pragma once

#include <cstdint>

#include "isa.h"

namespace hetero {

enum class Format : int64_t { kBf16 = 0, kFloat = 1, kInt8 = 2, kInt4 = 3, kInt8Groups = 4 };

constexpr int64_t kPanel = 64, kStrip = 16, kDepth = 64;
constexpr int64_t kLargestGroup = 128;
constexpr int64_t strips_of(int64_t outputs) { return (outputs + kStrip - 1) / kStrip; }
constexpr int32_t kInt4Zero = 8;  // the code of int4 that stands for zero without zero points

// What a group of weights has beside its scale: w = scale * (integer - point) + offset.
enum class Zeros : int64_t { kNone = 0, kPoints = 1, kOffsets = 2 };

// kInt4, kInt8Groups. size: of k; a multiple of 32 (int4) or 16 (int8), at most kLargestGroup.
// half_scales: scales and offsets are half floats, else floats. zeros: int8 has none.
struct Groups {
    int64_t size;
    int64_t half_scales;  // a boolean
    Zeros zeros;
};

struct Form {  // the C ABI
    Format format;
    Groups groups;  // zeros for other formats
};

constexpr bool has_groups(Format format) {
    return format == Format::kInt4 || format == Format::kInt8Groups;
}

struct Matrix {
    Format format;
    int64_t outputs, depth;                // as the model has them
    int64_t padded_outputs, padded_depth;  // multiples of kPanel and kDepth
    void* data;                            // packed, 64-byte aligned
    float* scales;   // kInt8: [padded_outputs], w = scale * integer; else null
    int32_t* sums;   // kInt8: [padded_outputs] sums of the integers; else null
    Groups groups;
};

// Bytes of `data`, a multiple of 64.
int64_t packed_bytes(const Form& form, int64_t outputs, int64_t depth);

// Packs outputs [first, last) of rows [outputs][depth] (row-major bf16 or float, `stride` elements
// apart) to the places of outputs [to, to + last - first). Integers are rounded to nearest: int8
// symmetric, one scale per output; int4 with the scale, a half float, and the zero point of each
// group that give the least squared error of those tried (other levels of instructions may choose
// others), for which the matrix has half_scales and kPoints. kInt8Groups: `pack_quantized` only.
// Padding is the caller's: `data` begins as zeros.
void pack(Matrix& matrix, const void* weight, bool weight_is_bf16, int64_t stride, int64_t first,
          int64_t last, int64_t to);

// Integers of a matrix that was quantized before, rows without gaps: int4 [outputs][depth / 2], k
// in the low half of a byte and k + 1 in its high half (depth is even), int8 [outputs][depth].
// groups: ceil(depth / size), or 1 for kInt8. points: of kPoints, else null; offsets: of kOffsets,
// else null. Scales and offsets are rounded if the matrix has half_scales.
struct Quantized {
    const void* data;
    const float* scales;    // [outputs][groups]
    const uint8_t* points;  // [outputs][groups]
    const float* offsets;   // [outputs][groups]
};

// As `pack`, for kInt8, kInt4 and kInt8Groups.
void pack_quantized(Matrix& matrix, const Quantized& from, int64_t first, int64_t last, int64_t to);

// Rows as `multiply` takes them: [rows][padded_depth] of bf16, float or int8 with one scale per row
// (x = scale * integer, symmetric), padding zero. For weights with groups a row is its int8, then
// the scale of each group as float, then each group's correction: minus the sum of its integers as
// int32 or, if the weights have offsets, scale * sum as float. All that in row_stride bytes.
struct Rows {
    const void* data;
    int64_t stride;       // elements
    const float* scales;  // kInt8 only
};

// Bytes of one element of prepared rows.
constexpr int64_t element_bytes(Format format) {
    return format == Format::kFloat ? 4 : format == Format::kBf16 ? 2 : 1;
}

// The least stride of prepared rows in elements, a multiple of 64.
int64_t row_stride(const Matrix& matrix);
inline int64_t row_bytes(const Matrix& matrix) {
    return row_stride(matrix) * element_bytes(matrix.format);
}

// Prepares a float row: rounds, copies or quantizes `matrix.depth` values and zeroes the rest up to
// the padded depth. scale: kInt8 only.
void prepare_row(const Matrix& matrix, const float* x, void* out, float* scale, Isa isa);

// out[r * out_stride + 16 * s + i] for rows [0, rows) of x and strips [first, first + strips):
// float sums in float (bf16, float), exact integers scaled once (int8) or exact integers of each
// group scaled and added in the order of k (int4, int8 with groups). Overwrites `out`. x points to
// the first row; `out` has room for padded outputs. A result does not depend on how rows and strips
// are divided among calls. Results of integers are equal to the last bit at every level.
void multiply(const Matrix& matrix, const Rows& x, int64_t rows, int64_t first, int64_t strips,
              float* out, int64_t out_stride, Isa isa);

// A product with strips of one panel, each with inputs of its own: out[r][16 * s + i] = sum over k
// of x[r * x_stride + offsets[s] + k] * w[strip s][i][k], for strips [0, strips).
struct StripProduct {
    Format format;          // kBf16 or kFloat
    const void* panel;      // packed, from its first strip on
    int64_t depth;          // padded: a multiple of strip_depth
    int64_t strips;
    const void* x;          // prepared
    int64_t x_stride;       // elements
    int64_t offsets[kPanel / kStrip];  // elements
    int64_t rows;
    float* out;
    int64_t out_stride;
    const int32_t* places;  // row r of `out` is places[r] - places[0]; null: r
    bool add;               // to what `out` holds
};

// Overwrites `out` or adds to it. A result does not depend on other rows or strips.
void multiply_strips(const StripProduct& product, Isa isa);

// What the depth of a StripProduct is a multiple of.
constexpr int64_t strip_depth(Format format, Isa isa) {
    return format == Format::kFloat ? 4 : isa == kAmx ? 32 : 8;
}

// Releases the calling thread's AMX tiles, whose state slows down context switches; `multiply`
// configures them again.
void release_tiles();

}  // namespace hetero
