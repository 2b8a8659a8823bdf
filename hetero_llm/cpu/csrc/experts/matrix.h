// Weights of experts as they lie in host memory: row-major, as checkpoints have them.

#pragma once

#include <cstdint>

#include "../step/isa.h"
#include "../step/numbers.h"

namespace hetero::experts {

// Elements of weights; fp8 is e4m3fn, fp4 e2m1.
enum class Kind : int64_t { kFloat, kBf16, kHalf, kInt8, kFp8, kInt4, kFp4 };
enum class Number : int64_t { kFloat, kBf16, kHalf };  // of scales, biases, and a mailbox's x
// w = scale * (code - point), or scale * code + offset.
enum class Zeros : int64_t { kNone, kPoints, kOffsets };

constexpr int64_t kRowDepth = 128;  // prepared rows are padded with zeros to multiples of it
constexpr int32_t kInt4Centre = 8;  // the code of int4 that stands for zero without zero points

constexpr int64_t bytes_of(Number number) { return number == Number::kFloat ? 4 : 2; }

// One of some numbers as a float.
INLINE float number_at(Number number, const char* numbers, int64_t index) {
    if (number == Number::kFloat) return read_one<float>(numbers + 4 * index);
    const auto bits = read_one<uint16_t>(numbers + 2 * index);
    return number == Number::kHalf ? half_to_float(bits) : bf16_to_float(bits);
}

constexpr bool is_8_bit(Kind kind) { return kind == Kind::kInt8 || kind == Kind::kFp8; }
constexpr bool is_4_bit(Kind kind) { return kind == Kind::kInt4 || kind == Kind::kFp4; }
constexpr bool has_scales(Kind kind) { return is_8_bit(kind) || is_4_bit(kind); }

// Bytes of a row; 4-bit codes lie two to a byte, the first of them in its low half.
constexpr int64_t row_bytes(Kind kind, int64_t depth) {
    return kind == Kind::kFloat                            ? depth * 4
           : kind == Kind::kBf16 || kind == Kind::kHalf ? depth * 2
           : is_8_bit(kind)                             ? depth
                                                        : depth / 2;
}

// What all experts' matrices of one shape have in common; a part of `Setting`.
struct Form {
    Kind kind;
    Number scale;          // has_scales only
    int64_t group;         // columns that share a scale, at most `depth`: see `fits`
    int64_t scale_rows;    // rows that share a scale
    int64_t rows, depth;   // of a matrix: outputs and inputs
    Zeros zeros;           // int4 only: one for each scale, and scale_rows is 1
    int64_t stored;        // columns of a row in memory, of which products take the first `depth`

    int64_t groups() const { return (stored + group - 1) / group; }    // of a row in memory
    int64_t stride() const { return row_bytes(kind, stored); }         // between rows
    int64_t taken_bytes() const { return row_bytes(kind, depth); }     // of a row, in products
    bool is_one_group() const { return group >= stored; }
};

// Whether the products here serve the form. Groups: of 8 bits the whole depth or multiples of 64,
// of 4 bits 32, 64 or multiples of 128 (or the whole depth). 4-bit rows have whole bytes.
inline bool fits(const Form& form) {
    if (form.rows < 1 || form.depth < 1 || form.stored < form.depth) return false;
    if (!has_scales(form.kind)) return form.zeros == Zeros::kNone;
    if (form.group < 1 || form.group > form.stored || form.scale_rows < 1) return false;
    if (form.zeros != Zeros::kNone && (form.kind != Kind::kInt4 || form.scale_rows != 1))
        return false;
    if (is_4_bit(form.kind) && form.depth % 2 != 0) return false;
    if (form.is_one_group()) return true;
    if (is_8_bit(form.kind)) return form.group % 64 == 0;
    return form.group == 32 || form.group == 64 || form.group % 128 == 0;
}

// One matrix: addresses of its parts, or null.
struct Matrix {
    const char* data;        // [rows][depth]
    const char* scales;      // [ceil(rows / scale_rows)][groups]
    const char* zeros;       // [rows][groups]: points are uint8, offsets of the scales' type
    const float* row_scale;  // [rows], multiplies results
    const char* bias;        // [rows], of the mailbox's type
};

// How a prepared row orders its k, so that what a kernel unpacks of the weights meets it in place.
enum class Order : int64_t {
    kNatural,
    kBytes,    // of each 64: what unpacking bytes in 128-bit lanes gives
    kNibbles,  // of each 128: low halves of bytes first, unpacked likewise
    kWords,    // of each 8 * width: k = 8 i + j at j * width + i
};

struct Layout {
    Order order;
    int64_t width;  // kWords: lanes of a vector

    // Where a prepared row has k.
    int64_t place(int64_t k) const {
        switch (order) {
            case Order::kBytes: {
                const int64_t in = k % 64;
                return k - in + in % 16 / 8 * 32 + in / 16 * 8 + in % 8;
            }
            case Order::kNibbles: {
                const int64_t in = k % 128, byte = in / 2;
                return k - in + in % 2 * 64 + byte % 16 / 8 * 32 + byte / 16 * 8 + byte % 8;
            }
            case Order::kWords: {
                const int64_t in = k % (8 * width);
                return k - in + in % 8 * width + in / 8;
            }
            default: return k;
        }
    }
};

constexpr int64_t padded(int64_t depth) { return (depth + kRowDepth - 1) / kRowDepth * kRowDepth; }

}  // namespace hetero::experts
