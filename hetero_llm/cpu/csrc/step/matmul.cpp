// Packed products: packs weights, prepares rows, and cuts a product into register tiles.

#include "matmul.h"

#include <cfloat>
#include <cstring>

#include "amx.h"
#include "lanes.h"
#include "matmul_groups.h"
#include "matmul_kernels.h"

namespace hetero {
namespace {

constexpr int64_t kAmxRowsInt8 = 8;         // with fewer rows, int8 is faster on vectors
constexpr int64_t kAmxRows = 32;            // of a call of multiply_tiles
constexpr int64_t kBlockBytes = 128 << 10;  // of a panel, for several tiles of rows: stays in L2
constexpr int64_t kSplitBytes = 32 << 10;   // the same if tiles are narrower than a panel: L1
constexpr int64_t kAll = (int64_t)1 << 40;  // a single tile of rows takes all of k at once
constexpr int64_t kLines = kUnroll * kStepBytes / 64;

// The kernels of rows are plain loops, which GCC makes vectors of.
template <int N>
INLINE void round_row_lanes(const float* x, int64_t size, uint16_t* out) {
    for (int64_t i = 0; i < size; ++i) out[i] = float_to_bf16(x[i]);
}

// The largest absolute value's bits: as integers these have the order of floats, NaN above all.
INLINE int32_t largest_bits(const float* x, int64_t size) {
    int32_t top = 0;
    for (int64_t i = 0; i < size; ++i) {
        const int32_t bits = bit_cast<int32_t>(x[i]) & 0x7fffffff;
        top = bits > top ? bits : top;
    }
    return top;
}

// The scale for a largest absolute value; 0 where its inverse might overflow.
INLINE float scale_of(int32_t largest, float* inverse) {
    const float value = bit_cast<float>(largest);
    const bool is_zero = value < 127 * FLT_MIN;
    *inverse = is_zero ? 0.0f : 127.0f / value;
    return is_zero ? 0.0f : value / 127.0f;
}

// Returns the sum of the integers. Infinity and NaN give any integers; the result's scale shows
// them. Adding 1.5 * 2^23 rounds too and needs no SSE4, but with FMA at hand GCC fuses it with the
// product.
template <int N>
INLINE int32_t to_integers(const float* x, int64_t size, float inverse, int8_t* out) {
    int32_t sum = 0;
    for (int64_t i = 0; i < size; ++i) {
        int32_t integer;
        if constexpr (N > 4) integer = (int32_t)__builtin_rintf(x[i] * inverse);
        else integer = bit_cast<int32_t>(x[i] * inverse + 12582912.0f);
        out[i] = (int8_t)integer;
        sum += (int8_t)integer;
    }
    return sum;
}

template <int N>
INLINE void quantize_row_lanes(const float* x, int64_t size, int8_t* out, float* scale) {
    float inverse;
    *scale = scale_of(largest_bits(x, size), &inverse);
    to_integers<N>(x, size, inverse, out);
}

// corrections: see `Rows`; of offsets if `scaled`.
template <int N>
INLINE void quantize_groups_lanes(const float* x, int64_t size, int64_t group, bool scaled,
                                  int8_t* out, float* scales, int32_t* corrections) {
    for (int64_t k = 0; k < size; k += group, ++scales, ++corrections) {
        const int64_t here = size - k < group ? size - k : group;
        float inverse;
        *scales = scale_of(largest_bits(x + k, here), &inverse);
        const int32_t sum = to_integers<N>(x + k, here, inverse, out + k);
        *corrections = scaled ? bit_cast<int32_t>(*scales * (float)sum) : -sum;
    }
}

DEFINE_FOR_WIDTHS(round_row, (const float* x, int64_t size, uint16_t* out), (x, size, out))
DEFINE_FOR_WIDTHS(quantize_row, (const float* x, int64_t size, int8_t* out, float* scale),
                  (x, size, out, scale))
DEFINE_FOR_WIDTHS(quantize_groups,
                  (const float* x, int64_t size, int64_t group, bool scaled, int8_t* out,
                   float* scales, int32_t* corrections),
                  (x, size, group, scaled, out, scales, corrections))

// A row for weights with groups, see `Rows`. Groups of padding alone are zeros, too.
void prepare_groups(const Matrix& matrix, const float* x, void* out, Isa isa) {
    const int64_t depth = matrix.depth, padded = matrix.padded_depth, size = matrix.groups.size;
    const int64_t count = (padded + size - 1) / size;
    int8_t* integers = (int8_t*)out;
    float* scales = (float*)(integers + padded);
    std::memset(integers + depth, 0, padded - depth + count * 8);
    quantize_groups(x, depth, size, matrix.groups.zeros == Zeros::kOffsets, integers, scales,
                    (int32_t*)(scales + count), isa);
}

// Weights of a row as the caller has them.
struct Source {
    const void* weight;
    bool is_bf16;
    int64_t stride, depth;
};

constexpr int64_t kChunk = 1024;  // weights of a row that are packed at a time

// `count` weights of row n from k = begin as floats: in place or widened into `buffer`.
const float* as_floats(const Source& source, int64_t n, int64_t begin, int64_t count,
                       float* buffer) {
    const int64_t at = n * source.stride + begin;
    if (!source.is_bf16) return (const float*)source.weight + at;
    const uint16_t* x = (const uint16_t*)source.weight + at;
    for (int64_t i = 0; i < count; ++i) buffer[i] = bf16_to_float(x[i]);
    return buffer;
}

// The scale of row n and its inverse, see scale_of.
float row_scale(const Source& source, int64_t n, float* inverse) {
    float buffer[kChunk];
    int32_t top = 0;
    for (int64_t k = 0; k < source.depth; k += kChunk) {
        const int64_t count = least(kChunk, source.depth - k);
        const int32_t here = largest_bits(as_floats(source, n, k, count, buffer), count);
        top = here > top ? here : top;
    }
    return scale_of(top, inverse);
}

// Weights [begin, begin + count) of row n in the packed format, zeros up to a whole chunk. inverse:
// of the row's scale. Returns the sum of the integers.
int32_t convert(Format format, const Source& source, int64_t n, int64_t begin, int64_t count,
                float inverse, void* out) {
    float buffer[kChunk];
    const int64_t bytes = element_bytes(format);
    std::memset((char*)out + count * bytes, 0, (kChunk - count) * bytes);
    if (format == Format::kBf16 && source.is_bf16) {
        std::memcpy(out, (const uint16_t*)source.weight + n * source.stride + begin, count * 2);
        return 0;
    }
    const float* x = as_floats(source, n, begin, count, buffer);
    if (format == Format::kFloat) std::memcpy(out, x, count * sizeof(float));
    else if (format == Format::kBf16) round_row_lanes<4>(x, count, (uint16_t*)out);
    else return to_integers<4>(x, count, inverse, (int8_t*)out);
    return 0;
}

// Four rows of `count` steps (a multiple of 4), kChunk apart, to four neighbouring columns.
void transpose(const float* rows, int64_t count, float* columns) {
    for (int64_t i = 0; i < count; i += 4) {
        __m128 a = _mm_load_ps(rows + i), b = _mm_load_ps(rows + kChunk + i);
        __m128 c = _mm_load_ps(rows + 2 * kChunk + i), d = _mm_load_ps(rows + 3 * kChunk + i);
        _MM_TRANSPOSE4_PS(a, b, c, d);
        _mm_storeu_ps(columns + i * kPanel, a);
        _mm_storeu_ps(columns + (i + 1) * kPanel, b);
        _mm_storeu_ps(columns + (i + 2) * kPanel, c);
        _mm_storeu_ps(columns + (i + 3) * kPanel, d);
    }
}

// Rows [first, last), which all go to one strip, to the places of outputs from `to`.
void pack_strip(Matrix& matrix, const Source& source, int64_t first, int64_t last, int64_t to) {
    const int64_t per_step = 4 / element_bytes(matrix.format);
    const int64_t panel_steps = matrix.padded_depth / per_step;
    float* column = (float*)matrix.data + to / kPanel * panel_steps * kPanel + to % kPanel;
    float inverses[kStrip] = {};
    if (matrix.format == Format::kInt8)
        for (int64_t i = 0; i < last - first; ++i) {
            matrix.scales[to + i] = row_scale(source, first + i, &inverses[i]);
            matrix.sums[to + i] = 0;
        }
    alignas(64) float rows[4 * kChunk];  // 4 bytes for each step, whatever they mean
    for (int64_t k = 0; k < source.depth; k += kChunk) {
        const int64_t count = least(kChunk, source.depth - k);
        const int64_t steps = ((count + per_step - 1) / per_step + 3) & ~(int64_t)3;
        float* begin = column + k / per_step * kPanel;
        for (int64_t n = first, more; n < last; n += more) {
            more = last - n < 4 ? 1 : 4;
            for (int64_t i = 0; i < more; ++i) {
                const int32_t sum = convert(matrix.format, source, n + i, k, count,
                                            inverses[n - first + i], rows + i * kChunk);
                if (matrix.sums) matrix.sums[to + n - first + i] += sum;
            }
            float* columns = begin + (n - first);
            if (more == 4) transpose(rows, steps, columns);
            else for (int64_t i = 0; i < steps; ++i) std::memcpy(columns + i * kPanel, rows + i, 4);
        }
    }
}

const Tiles& tiles_of(Format format, Isa isa) {
    return format == Format::kInt8 ? int8_tiles(isa) : vector_tiles(format, isa, false);
}

// How a product goes through k: in blocks of about the same size.
struct Blocks {
    int64_t steps, block, groups;  // groups: of rows, one register tile each
};

Blocks blocks_of(const Tiles& tiles, int64_t steps, int64_t rows, int64_t strips) {
    const int64_t groups = (rows + tiles.rows - 1) / tiles.rows;
    const int64_t width = tiles.strips[(rows + groups - 1) / groups - 1];
    const bool split = width < least(strips, kTileStrips);
    const int64_t most = (split ? kSplitBytes : groups > 1 ? kBlockBytes : kAll) / kStepBytes;
    const int64_t blocks = (steps + most - 1) / most;
    return {steps, (steps / kUnroll + blocks - 1) / blocks * kUnroll, groups};
}

// All rows with strips of one panel and one block of k, given by `c`. ahead: weights of the next
// call, or null; each pass prefetches its share of them.
void multiply_block(const Tiles& tiles, const Matrix& matrix, const Rows& x, int64_t rows,
                    int64_t strip, int64_t strips, TileCall c, const Blocks& blocks,
                    const char* ahead, float* out) {
    const int64_t groups = blocks.groups;
    const int64_t width = tiles.strips[(rows + groups - 1) / groups - 1];
    const int64_t passes = groups * ((strips + width - 1) / width);
    // Not in a single pass: it is one stream, which processors prefetch better by themselves.
    const bool fetch = ahead && strips == kTileStrips && passes > 1;
    const int64_t share = (kLines + passes - 1) / passes;
    const char *weights = c.weights, *inputs = c.x;
    int64_t fetched = 0;
    c.ahead = ahead;
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t r = rows * g / groups, count = rows * (g + 1) / groups - r;
        c.x = inputs + r * c.x_stride;
        c.x_scales = x.scales ? x.scales + r : nullptr;
        for (int64_t s = strip, wide; s < strip + strips; s += wide) {
            wide = least(tiles.strips[count - 1], strip + strips - s);
            c.weights = weights + (s - strip) * 64;
            c.out = out + r * c.out_stride + s * kStrip;
            c.scales = matrix.scales ? matrix.scales + s * kStrip : nullptr;
            c.sums = matrix.sums ? matrix.sums + s * kStrip : nullptr;
            c.lines = fetch ? least(share, kLines - fetched) : 0;
            tiles.tile[count - 1][wide - 1](c);
            c.ahead += c.lines * 64 * (c.steps / kUnroll);
            fetched += c.lines;
        }
    }
}

}  // namespace

int64_t packed_bytes(const Form& form, int64_t outputs, int64_t depth) {
    const int64_t panels = (outputs + kPanel - 1) / kPanel;
    const int64_t padded_depth = (depth + kDepth - 1) / kDepth * kDepth;
    if (has_groups(form.format))
        return panels * group_layout(form.format, form.groups, padded_depth).panel_bytes;
    return panels * kPanel * padded_depth * element_bytes(form.format);
}

void pack(Matrix& matrix, const void* weight, bool weight_is_bf16, int64_t stride, int64_t first,
          int64_t last, int64_t to) {
    if (matrix.format == Format::kInt4) {
        pack_groups(matrix, weight, weight_is_bf16, stride, first, last, to);
        return;
    }
    const Source source{weight, weight_is_bf16, stride, matrix.depth};
    for (int64_t n = first, next; n < last; to += next - n, n = next) {
        next = least(last, n + kStrip - to % kStrip);
        pack_strip(matrix, source, n, next, to);
    }
}

void pack_quantized(Matrix& matrix, const Quantized& from, int64_t first, int64_t last,
                    int64_t to) {
    if (matrix.format != Format::kInt8) {
        pack_groups(matrix, from, first, last, to);
        return;
    }
    const int64_t depth = matrix.depth, panel = matrix.padded_depth * kPanel;
    for (int64_t n = first; n < last; ++n, ++to) {
        const int8_t* row = (const int8_t*)from.data + n * depth;
        int8_t* column = (int8_t*)matrix.data + to / kPanel * panel + to % kPanel * 4;
        int32_t sum = 0;
        for (int64_t k = 0; k < depth; ++k) {
            column[k / 4 * kStepBytes + k % 4] = row[k];
            sum += row[k];
        }
        matrix.scales[to] = from.scales[n];
        matrix.sums[to] = sum;
    }
}

int64_t row_stride(const Matrix& matrix) {
    if (!has_groups(matrix.format)) return matrix.padded_depth;
    const int64_t size = matrix.groups.size, count = (matrix.padded_depth + size - 1) / size;
    return (matrix.padded_depth + count * 8 + 63) / 64 * 64;
}

void prepare_row(const Matrix& matrix, const float* x, void* out, float* scale, Isa isa) {
    const int64_t depth = matrix.depth, bytes = element_bytes(matrix.format);
    if (has_groups(matrix.format)) {
        prepare_groups(matrix, x, out, isa);
        return;
    }
    if (matrix.format == Format::kFloat) std::memcpy(out, x, depth * sizeof(float));
    else if (matrix.format == Format::kBf16) round_row(x, depth, (uint16_t*)out, isa);
    else quantize_row(x, depth, (int8_t*)out, scale, isa);
    std::memset((char*)out + depth * bytes, 0, (matrix.padded_depth - depth) * bytes);
}

void multiply(const Matrix& matrix, const Rows& x, int64_t rows, int64_t first, int64_t strips,
              float* out, int64_t out_stride, Isa isa) {
    if (has_groups(matrix.format)) {
        if (isa == kAmx && rows >= kAmxRowsInt8)
            multiply_groups_amx(matrix, x, rows, first, strips, out, out_stride);
        else
            multiply_groups(matrix, x, rows, first, strips, out, out_stride, isa);
        return;
    }
    const bool tiles_serve = matrix.format == Format::kBf16 ||
                             (matrix.format == Format::kInt8 && rows >= kAmxRowsInt8);
    if (isa == kAmx && tiles_serve) {
        multiply_amx(matrix, x, rows, first, strips, out, out_stride);
        return;
    }
    const Tiles& tiles = tiles_of(matrix.format, isa);
    const int64_t bytes = element_bytes(matrix.format), last = first + strips;
    const Blocks blocks = blocks_of(tiles, matrix.padded_depth * bytes / 4, rows, strips);
    const auto weights_at = [&](int64_t strip, int64_t step) {
        return (const char*)matrix.data +
               (strip / kTileStrips * blocks.steps + step) * kStepBytes + strip % kTileStrips * 64;
    };
    TileCall c{};
    c.x_stride = x.stride * bytes;
    c.out_stride = out_stride;
    // Panels inside: their block of many rows' inputs stays in L2.
    for (int64_t begin = 0; begin < blocks.steps; begin += blocks.block) {
        c.steps = least(blocks.block, blocks.steps - begin);
        c.add = begin > 0;
        c.last = begin + blocks.block >= blocks.steps;
        for (int64_t strip = first, next; strip < last; strip = next) {
            next = least(last, (strip / kTileStrips + 1) * kTileStrips);
            c.weights = weights_at(strip, begin);
            c.x = (const char*)x.data + begin * 4;
            // The weights behind the last block are read by other threads.
            const char* ahead = next < last ? weights_at(next, begin)
                                : c.last    ? nullptr
                                            : weights_at(first, begin + blocks.block);
            multiply_block(tiles, matrix, x, rows, strip, next - strip, c, blocks, ahead, out);
        }
    }
}

void multiply_strips(const StripProduct& p, Isa isa) {
    const int64_t bytes = element_bytes(p.format);
    int64_t offsets[kTileStrips], rows[kTileRows];
    for (int64_t s = 0; s < p.strips; ++s) offsets[s] = p.offsets[s] * bytes;
    const auto out_of = [&](int64_t r) {
        return (p.places ? p.places[r] - p.places[0] : r) * p.out_stride;
    };
    if (isa == kAmx && p.format == Format::kBf16) {
        for (int64_t r = 0, end; r < p.rows; r = end) {
            end = p.places ? r + 1 : least(r + kAmxRows, p.rows);
            while (p.places && end < least(r + kAmxRows, p.rows) &&
                   p.places[end] == p.places[end - 1] + 1)
                ++end;
            for (int64_t s = 0; s < p.strips; ++s)
                multiply_tiles((const char*)p.x + r * p.x_stride * bytes + offsets[s],
                               p.x_stride * bytes, end - r, (const char*)p.panel + s * 64,
                               p.depth * bytes / 4, 1, p.out + out_of(r) + s * kStrip,
                               p.out_stride, p.add);
        }
        return;
    }
    const Tiles& tiles = vector_tiles(p.format, isa, true);
    TileCall c{};
    c.x_stride = p.x_stride * bytes;
    c.steps = p.depth * bytes / 4;
    c.add = p.add;
    c.rows = rows;
    for (int64_t r = 0; r < p.rows; r += tiles.rows) {
        const int64_t count = least(tiles.rows, p.rows - r), width = tiles.strips[count - 1];
        for (int64_t i = 0; i < count; ++i) rows[i] = out_of(r + i);
        c.x = (const char*)p.x + r * c.x_stride;
        for (int64_t s = 0, wide; s < p.strips; s += wide) {
            wide = least(width, p.strips - s);
            c.weights = (const char*)p.panel + s * 64;
            c.out = p.out + s * kStrip;
            c.offsets = offsets + s;
            tiles.tile[count - 1][wide - 1](c);
        }
    }
}

}  // namespace hetero

namespace {

// A matrix as the functions below take it.
struct Packed {
    hetero::Form form;
    int64_t outputs, depth;
    void* data;
    float* scales;
    int32_t* sums;
};

hetero::Matrix matrix_of(const Packed& p) {
    using namespace hetero;
    return {p.form.format, p.outputs, p.depth, (p.outputs + kPanel - 1) / kPanel * kPanel,
            (p.depth + kDepth - 1) / kDepth * kDepth, p.data, p.scales, p.sums, p.form.groups};
}

}  // namespace

extern "C" {

int64_t hetero_matmul_packed_bytes(const Packed* packed) {
    return hetero::packed_bytes(packed->form, packed->outputs, packed->depth);
}

int64_t hetero_matmul_row_stride(const Packed* packed) {
    return hetero::row_stride(matrix_of(*packed));
}

// weight [last, depth], `stride` elements apart, bf16 or float.
void hetero_matmul_pack(const Packed* packed, const void* weight, int64_t weight_is_bf16,
                        int64_t stride, int64_t first, int64_t last, int64_t to) {
    hetero::Matrix matrix = matrix_of(*packed);
    hetero::pack(matrix, weight, weight_is_bf16, stride, first, last, to);
}

// See `Quantized`.
void hetero_matmul_pack_quantized(const Packed* packed, const void* data, const float* scales,
                                  const uint8_t* points, const float* offsets, int64_t first,
                                  int64_t last, int64_t to) {
    hetero::Matrix matrix = matrix_of(*packed);
    hetero::pack_quantized(matrix, {data, scales, points, offsets}, first, last, to);
}

// x [rows, depth] float -> out [rows, row stride], scales [rows] (int8, else null).
void hetero_matmul_prepare(const Packed* packed, const float* x, int64_t rows, void* out,
                           float* scales, int64_t isa) {
    const hetero::Matrix matrix = matrix_of(*packed);
    const int64_t bytes = hetero::row_bytes(matrix);
    for (int64_t r = 0; r < rows; ++r)
        hetero::prepare_row(matrix, x + r * packed->depth, (char*)out + r * bytes,
                            scales ? scales + r : nullptr, (hetero::Isa)isa);
}

// x [rows, x_stride] prepared, out [rows, out_stride]. `copies` equal matrices lie one after the
// other in `data` and are all multiplied (what a bench needs to find weights out of the caches).
void hetero_matmul_multiply(const Packed* packed, const void* x, int64_t x_stride,
                            const float* x_scales, int64_t rows, int64_t first, int64_t strips,
                            float* out, int64_t out_stride, int64_t isa, int64_t copies) {
    hetero::Matrix matrix = matrix_of(*packed);
    const int64_t bytes = hetero::packed_bytes(packed->form, packed->outputs, packed->depth);
    for (int64_t i = 0; i < copies; ++i) {
        hetero::multiply(matrix, {x, x_stride, x_scales}, rows, first, strips, out, out_stride,
                         (hetero::Isa)isa);
        matrix.data = (char*)matrix.data + bytes;
    }
    hetero::release_tiles();
}

}
