// Packs weights with groups: integers of checkpoints as they are, or int4 of floats, rounded to
// nearest with the scale and zero point of each group that a search finds best.

#include <cmath>
#include <vector>

#include "lanes.h"
#include "matmul_groups.h"
#include "rows.h"

namespace hetero {
namespace {

// -- one row --------------------------------------------------------------------------------------

// A row before it is laid out: [padded_depth] integers, and one value of each for every group.
struct Row {
    std::vector<uint8_t> integers, points;
    std::vector<float> scales, offsets;
};

uint16_t float_to_half(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value);
    const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (size >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (size < 0x38800000)  // subnormal: the sum's last bits are the result, rounded
        return (uint16_t)(sign | (bit_cast<uint32_t>(bit_cast<float>(size) + 0.5f) - 0x3f000000));
    const uint32_t rounded = size - (112u << 23) + 0xfff + (size >> 13 & 1);
    return (uint16_t)(sign | rounded >> 13);
}

// -- rounding floats to int4 ----------------------------------------------------------------------

constexpr float kLargestHalf = 65504.0f, kMagic = 12582912.0f;  // 1.5 * 2^23 rounds a sum
constexpr int kSide = 4, kTries = kSide * kSide;                // ranges, one to a lane
// Parts of a group's range, zero included, that are cut off at either end: first these, then these
// more or less than the best of them.
constexpr float kCoarse[kSide] = {0, 0.06f, 0.12f, 0.18f},
                kFine[kSide] = {-0.04f, -0.02f, 0.02f, 0.04f};

// The low and high ends of a group, and how it is rounded: w = scale * (integer - point).
struct Choice {
    float scale, point;
    float low_cut, high_cut, error;
};

// Positive floats up to kLargestHalf as half floats have them.
template <int N>
INLINE Floats<N> to_halves(Floats<N> x) {
    const Words<N> bits = (Words<N>)x;
    const Words<N> rounded = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
    return x < 6.103515625e-5f ? (x + 0.5f) - 0.5f : (Floats<N>)rounded;
}

// Tries kTries ranges of a group at once; keeps the best in `best`, whose error is to be beaten.
template <int N>
INLINE void try_ranges(const float* x, int64_t count, float low, float high, const float* low_cuts,
                       const float* high_cuts, Choice* best) {
    constexpr int kParts = kTries / N;
    Floats<N> scale[kParts], inverse[kParts], point[kParts], total[kParts];
    for (int i = 0; i < kParts; ++i) {
        const Floats<N> from = low * (1.0f - read<N>(low_cuts + i * N));
        const Floats<N> to = high * (1.0f - read<N>(high_cuts + i * N));
        const Floats<N> wanted = (to - from) / 15.0f;
        scale[i] = to_halves<N>(wanted < kLargestHalf ? wanted : fill<N>(kLargestHalf));
        inverse[i] = scale[i] > 0.0f ? 1.0f / scale[i] : fill<N>(0.0f);
        const Floats<N> nearest = (kMagic - from * inverse[i]) - kMagic;
        point[i] = nearest > 15.0f ? fill<N>(15.0f) : nearest;
        total[i] = fill<N>(0.0f);
    }
    for (int64_t k = 0; k < count; ++k)
        for (int i = 0; i < kParts; ++i) {
            Floats<N> integer = (x[k] * inverse[i] + kMagic) - kMagic;  // less its point
            integer = integer < -point[i] ? -point[i] : integer;
            const Floats<N> most = 15.0f - point[i];
            integer = integer > most ? most : integer;
            const Floats<N> error = integer * scale[i] - x[k];
            total[i] += error * error;
        }
    for (int i = 0; i < kParts; ++i)
        for (int n = 0; n < N; ++n)
            if (total[i][n] < best->error && scale[i][n] > 0)
                *best = {scale[i][n], point[i][n], low_cuts[i * N + n], high_cuts[i * N + n],
                         total[i][n]};
}

template <int N>
INLINE void search_lanes(const float* x, int64_t count, Choice* best) {
    float low = 0, high = 0;
    for (int64_t k = 0; k < count; ++k) {
        low = x[k] < low ? x[k] : low;
        high = x[k] > high ? x[k] : high;
    }
    *best = {0, 0, 0, 0, INFINITY};
    float low_cuts[kTries], high_cuts[kTries];
    for (int i = 0; i < kTries; ++i) {
        low_cuts[i] = kCoarse[i / kSide];
        high_cuts[i] = kCoarse[i % kSide];
    }
    try_ranges<N>(x, count, low, high, low_cuts, high_cuts, best);
    for (int i = 0; i < kTries; ++i) {
        low_cuts[i] = best->low_cut + kFine[i / kSide];
        high_cuts[i] = best->high_cut + kFine[i % kSide];
    }
    try_ranges<N>(x, count, low, high, low_cuts, high_cuts, best);
}

DEFINE_FOR_WIDTHS(search, (const float* x, int64_t count, Choice* best), (x, count, best))

// Rounds a group; of a group with NaN or infinity the scale is NaN.
void round_group(const float* x, int64_t count, Isa isa, Choice* choice, uint8_t* codes) {
    bool is_finite = true;
    for (int64_t k = 0; k < count; ++k) is_finite = is_finite && std::isfinite(x[k]);
    if (!is_finite) {
        *choice = {NAN, 0, 0, 0, 0};
        std::memset(codes, 0, count);
        return;
    }
    search(x, count, choice, isa);
    const float inverse = choice->scale > 0 ? 1 / choice->scale : 0;
    for (int64_t k = 0; k < count; ++k) {
        float value = x[k] * inverse;
        value = value > 16 ? 16 : value < -16 ? -16 : value;
        const float code = (value + kMagic) - kMagic + choice->point;
        codes[k] = (uint8_t)(code < 0 ? 0 : code > 15 ? 15 : code);
    }
}

void widen_row(const void* weight, bool is_bf16, int64_t at, int64_t count, float* out) {
    if (!is_bf16) std::memcpy(out, (const float*)weight + at, count * 4);
    else widen((const uint16_t*)weight + at, count, out, kBase);
}

// -- the layout -----------------------------------------------------------------------------------

void put_scale(const Matrix& matrix, char* parts, int64_t output, float value) {
    if (!matrix.groups.half_scales) {
        std::memcpy(parts + 4 * output, &value, 4);
        return;
    }
    const uint16_t half = float_to_half(value);
    std::memcpy(parts + 2 * output, &half, 2);
}

void lay_out(Matrix& matrix, const GroupLayout& layout, const Row& row, int64_t to) {
    const int64_t size = matrix.groups.size, output = to % kPanel;
    char* group = (char*)matrix.data + to / kPanel * layout.panel_bytes;
    for (int64_t g = 0; g < layout.count; ++g, group += layout.bytes) {
        put_scale(matrix, group, output, row.scales[g]);
        if (matrix.groups.zeros == Zeros::kPoints)
            group[layout.zeros_at + output] = (char)row.points[g];
        if (matrix.groups.zeros == Zeros::kOffsets)
            put_scale(matrix, group + layout.zeros_at, output, row.offsets[g]);
        const int64_t begin = g * size, end = least(begin + size, matrix.padded_depth);
        const uint8_t* from = row.integers.data() + begin;
        char* word = group + layout.data_at + output * 4;
        if (matrix.format == Format::kInt8Groups)
            for (int64_t k = begin; k < end; k += 4, from += 4, word += kStepBytes)
                std::memcpy(word, from, 4);
        else
            for (int64_t k = begin; k < end; k += 8, from += 8, word += kStepBytes)
                for (int j = 0; j < 4; ++j) word[j] = (char)(from[j] | from[4 + j] << 4);
    }
}

Row empty_row(const Matrix& matrix, const GroupLayout& layout) {
    Row row;
    row.integers.resize(matrix.padded_depth);
    row.points.resize(layout.count);
    row.scales.resize(layout.count);
    row.offsets.resize(layout.count);
    return row;
}

}  // namespace

void pack_groups(Matrix& matrix, const void* weight, bool weight_is_bf16, int64_t stride,
                 int64_t first, int64_t last, int64_t to) {
    const GroupLayout layout = group_layout(matrix);
    const int64_t size = matrix.groups.size;
    const Isa isa = best_isa();
    Row row = empty_row(matrix, layout);
    float values[kLargestGroup];
    for (int64_t n = first; n < last; ++n, ++to) {
        for (int64_t g = 0; g * size < matrix.depth; ++g) {
            const int64_t count = least(size, matrix.depth - g * size);
            widen_row(weight, weight_is_bf16, n * stride + g * size, count, values);
            Choice choice;
            round_group(values, count, isa, &choice, row.integers.data() + g * size);
            row.scales[g] = choice.scale;
            row.points[g] = (uint8_t)choice.point;
        }
        lay_out(matrix, layout, row, to);
    }
}

void pack_groups(Matrix& matrix, const Quantized& from, int64_t first, int64_t last, int64_t to) {
    const GroupLayout layout = group_layout(matrix);
    const int64_t depth = matrix.depth, size = matrix.groups.size;
    const int64_t groups = (depth + size - 1) / size;
    Row row = empty_row(matrix, layout);
    for (int64_t n = first; n < last; ++n, ++to) {
        if (matrix.format == Format::kInt8Groups)
            std::memcpy(row.integers.data(), (const uint8_t*)from.data + n * depth, depth);
        else
            for (int64_t k = 0; k < depth / 2; ++k) {
                const uint8_t two = ((const uint8_t*)from.data)[n * (depth / 2) + k];
                row.integers[2 * k] = two & 15;
                row.integers[2 * k + 1] = two >> 4;
            }
        std::memcpy(row.scales.data(), from.scales + n * groups, groups * 4);
        if (from.points) std::memcpy(row.points.data(), from.points + n * groups, groups);
        if (from.offsets) std::memcpy(row.offsets.data(), from.offsets + n * groups, groups * 4);
        lay_out(matrix, layout, row, to);
    }
}

}  // namespace hetero
