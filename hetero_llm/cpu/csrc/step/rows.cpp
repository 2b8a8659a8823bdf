// Row-wise parts of a decoder layer, see rows.h. Each kernel is a template over the vector width.

#include "rows.h"

#include <cmath>

#include "activation_lanes.h"
#include "lanes.h"
#include "matmul.h"
#include "noise_lanes.h"

namespace hetero {

namespace {

template <int N>
INLINE void rms_norm_lanes(const float* x, const float* weight, float eps, int64_t size,
                           float* out) {
    Floats<N> squares[4] = {};
    int64_t i = 0;
    for (; i + 4 * N <= size; i += 4 * N)
        for (int k = 0; k < 4; ++k) {
            const Floats<N> v = read<N>(x + i + k * N);
            squares[k] += v * v;
        }
    for (; i + N <= size; i += N) squares[0] += read<N>(x + i) * read<N>(x + i);
    if (i < size) {
        const Floats<N> v = read_some<N>(x + i, size - i);
        squares[1] += v * v;
    }
    const float sum = total<N>((squares[0] + squares[1]) + (squares[2] + squares[3]));
    const float scale = 1.0f / std::sqrt(sum / (float)size + eps);
    for (i = 0; i + N <= size; i += N)
        write<N>(out + i, read<N>(x + i) * scale * read<N>(weight + i));
    for (; i < size; ++i) out[i] = x[i] * scale * weight[i];
}

template <int N>
INLINE void rotate_lanes(float* head, const float* factors, int64_t rotary_dim) {
    const int64_t half = rotary_dim / 2;
    const float *cosines = factors, *sines = factors + half;
    int64_t i = 0;
    for (; i + N <= half; i += N) {
        const Floats<N> a = read<N>(head + i), b = read<N>(head + half + i);
        const Floats<N> c = read<N>(cosines + i), s = read<N>(sines + i);
        write<N>(head + i, a * c - b * s);
        write<N>(head + half + i, b * c + a * s);
    }
    for (; i < half; ++i) {
        const float a = head[i], b = head[half + i];
        head[i] = a * cosines[i] - b * sines[i];
        head[half + i] = b * cosines[i] + a * sines[i];
    }
}

template <int N, int kKind>
INLINE void gated_kind(const Block& in, float* out, int64_t out_stride) {
    for (int64_t r = 0; r < in.rows; ++r)
        for (int64_t strip = 0; strip < in.size; strip += kStrip)
            for (int64_t i = 0; i < kStrip; i += N) {
                const float* gate = in.data + r * in.stride + 2 * strip + i;
                write<N>(out + r * out_stride + strip + i,
                         activate<N, kKind>(read<N>(gate)) * read<N>(gate + kStrip));
            }
}

template <int N>
INLINE void gated_lanes(const Block& in, int kind, float* out, int64_t out_stride) {
    if (kind == 0) gated_kind<N, 0>(in, out, out_stride);
    else if (kind == 1) gated_kind<N, 1>(in, out, out_stride);
    else gated_kind<N, 2>(in, out, out_stride);
}

template <int N>
INLINE void add_block_lanes(float* x, int64_t stride, const Block& y, const float* bias) {
    for (int64_t r = 0; r < y.rows; ++r) {
        float* to = x + r * stride;
        const float* from = y.data + r * y.stride;
        int64_t i = 0;
        for (; i + N <= y.size; i += N)
            write<N>(to + i, read<N>(to + i) + (read<N>(from + i) + read<N>(bias + i)));
        for (; i < y.size; ++i) to[i] += from[i] + bias[i];
    }
}

template <int N>
INLINE void add_scaled_lanes(float* x, const float* y, float scale, int64_t size) {
    int64_t i = 0;
    for (; i + N <= size; i += N) write<N>(x + i, read<N>(x + i) + read<N>(y + i) * scale);
    for (; i < size; ++i) x[i] += y[i] * scale;
}

template <int N>
INLINE void add_lanes(float* x, const float* y, int64_t size) {
    int64_t i = 0;
    for (; i + N <= size; i += N) write<N>(x + i, read<N>(x + i) + read<N>(y + i));
    for (; i < size; ++i) x[i] += y[i];
}

template <int N>
INLINE void widen_lanes(const uint16_t* x, int64_t size, float* out) {
    int64_t i = 0;
    for (; i + N <= size; i += N) write<N>(out + i, read<N>((const Bf16*)(x + i)));
    for (; i < size; ++i) out[i] = bf16_to_float(x[i]);
}

template <int N>
INLINE void narrow_lanes(const float* x, int64_t size, uint16_t* out) {
    int64_t i = 0;
    for (; i + N <= size; i += N) write<N>((Bf16*)(out + i), read<N>(x + i));
    if (i < size) write<N>((Bf16*)(out + i), read_some<N>(x + i, size - i), size - i);
}

template <int N>
INLINE void forbid_lanes(float* scores, int64_t size, int64_t first, const uint32_t* mask) {
    Words<N> lane_bits;
    for (int i = 0; i < N; ++i) lane_bits[i] = 1u << i;
    const Floats<N> never = fill<N>(-INFINITY);
    int64_t i = 0;
    for (; i + N <= size; i += N) {  // N divides 16, so no vector needs bits of two words
        const int64_t token = first + i;
        const Words<N> bits = Words<N>{} + (mask[token / 32] >> (token % 32));
        write<N>(scores + i, (bits & lane_bits) != 0u ? read<N>(scores + i) : never);
    }
    for (; i < size; ++i)
        if (!(mask[(first + i) / 32] >> ((first + i) % 32) & 1u)) scores[i] = -INFINITY;
}

// Finds the maximum first, without its position: most calls do not change the best and end there.
template <int N>
INLINE void pick_greedy_lanes(const float* scores, int64_t size, int64_t first, float* best,
                              int64_t* token) {
    if (*token < 0) *token = first;  // with nothing but NaN or -infinity, too
    const Floats<N> lowest = fill<N>(-INFINITY);
    Floats<N> top[4] = {lowest, lowest, lowest, lowest};
    int64_t i = 0;
    for (; i + 4 * N <= size; i += 4 * N)
        for (int k = 0; k < 4; ++k) top[k] = larger<N>(read<N>(scores + i + k * N), top[k]);
    for (; i + N <= size; i += N) top[0] = larger<N>(read<N>(scores + i), top[0]);
    float highest = maximum<N>(larger<N>(larger<N>(top[0], top[1]), larger<N>(top[2], top[3])));
    for (; i < size; ++i) highest = scores[i] > highest ? scores[i] : highest;
    if (!(highest > *best || (highest == *best && first < *token))) return;
    int64_t at = 0;
    while (at < size && scores[at] != highest) ++at;
    if (at == size || (highest == *best && first + at > *token)) return;
    *best = highest;
    *token = first + at;
}

template <int N>
INLINE void pick_noisy_lanes(const float* scores, int64_t size, int64_t first, const Noise& noise,
                             float* best, int64_t* token) {
    alignas(64) float sums[kNoisy];
    for (int64_t begin = 0; begin < size; begin += kNoisy) {
        const int64_t count = size - begin < kNoisy ? size - begin : kNoisy;
        add_noise<N>(scores + begin, count, first + begin, noise, sums);
        pick_greedy_lanes<N>(sums, count, first + begin, best, token);
    }
}

}  // namespace

DEFINE_FOR_WIDTHS(rms_norm,
                  (const float* x, const float* weight, float eps, int64_t size, float* out),
                  (x, weight, eps, size, out))
DEFINE_FOR_WIDTHS(rotate, (float* head, const float* factors, int64_t rotary_dim),
                  (head, factors, rotary_dim))
DEFINE_FOR_WIDTHS(gated, (const Block& in, int kind, float* out, int64_t out_stride),
                  (in, kind, out, out_stride))
DEFINE_FOR_WIDTHS(add_block, (float* x, int64_t stride, const Block& y, const float* bias),
                  (x, stride, y, bias))
DEFINE_FOR_WIDTHS(add_scaled, (float* x, const float* y, float scale, int64_t size),
                  (x, y, scale, size))
DEFINE_FOR_WIDTHS(add, (float* x, const float* y, int64_t size), (x, y, size))
DEFINE_FOR_WIDTHS(widen, (const uint16_t* x, int64_t size, float* out), (x, size, out))
DEFINE_FOR_WIDTHS(narrow, (const float* x, int64_t size, uint16_t* out), (x, size, out))
DEFINE_FOR_WIDTHS(forbid, (float* scores, int64_t size, int64_t first, const uint32_t* mask),
                  (scores, size, first, mask))
DEFINE_FOR_WIDTHS(pick_greedy,
                  (const float* scores, int64_t size, int64_t first, float* best, int64_t* token),
                  (scores, size, first, best, token))
DEFINE_FOR_WIDTHS(pick_noisy,
                  (const float* scores, int64_t size, int64_t first, const Noise& noise,
                   float* best, int64_t* token),
                  (scores, size, first, noise, best, token))

bool allows_any(const uint32_t* mask, int64_t first, int64_t size) {
    const int64_t end = first + size;
    for (int64_t word = first / 32; word * 32 < end; ++word) {
        uint32_t bits = mask[word];
        if (word * 32 < first) bits &= ~0u << (first - word * 32);
        if (word * 32 + 32 > end) bits &= ~0u >> (word * 32 + 32 - end);
        if (bits) return true;
    }
    return false;
}

}  // namespace hetero

// For tests; scalars other than integers come by pointer.
extern "C" {

void hetero_rows_rms_norm(const float* x, const float* weight, const float* eps, int64_t size,
                          float* out, int64_t isa) {
    hetero::rms_norm(x, weight, *eps, size, out, (hetero::Isa)isa);
}

void hetero_rows_rotate(float* head, const float* factors, int64_t rotary_dim, int64_t isa) {
    hetero::rotate(head, factors, rotary_dim, (hetero::Isa)isa);
}

void hetero_rows_gated(const float* in, int64_t stride, int64_t rows, int64_t size, int64_t kind,
                       float* out, int64_t out_stride, int64_t isa) {
    hetero::gated({in, stride, rows, size}, (int)kind, out, out_stride, (hetero::Isa)isa);
}

void hetero_rows_add_block(float* x, int64_t stride, const float* y, int64_t y_stride,
                           int64_t rows, int64_t size, const float* bias, int64_t isa) {
    hetero::add_block(x, stride, {y, y_stride, rows, size}, bias, (hetero::Isa)isa);
}

void hetero_rows_add_scaled(float* x, const float* y, const float* scale, int64_t size,
                            int64_t isa) {
    hetero::add_scaled(x, y, *scale, size, (hetero::Isa)isa);
}

void hetero_rows_add(float* x, const float* y, int64_t size, int64_t isa) {
    hetero::add(x, y, size, (hetero::Isa)isa);
}

void hetero_rows_widen(const uint16_t* x, int64_t size, float* out, int64_t isa) {
    hetero::widen(x, size, out, (hetero::Isa)isa);
}

void hetero_rows_narrow(const float* x, int64_t size, uint16_t* out, int64_t isa) {
    hetero::narrow(x, size, out, (hetero::Isa)isa);
}

void hetero_rows_forbid(float* scores, int64_t size, int64_t first, const uint32_t* mask,
                        int64_t isa) {
    hetero::forbid(scores, size, first, mask, (hetero::Isa)isa);
}

int64_t hetero_rows_allows_any(const uint32_t* mask, int64_t first, int64_t size) {
    return hetero::allows_any(mask, first, size);
}

void hetero_rows_pick_greedy(const float* scores, int64_t size, int64_t first, float* best,
                             int64_t* token, int64_t isa) {
    hetero::pick_greedy(scores, size, first, best, token, (hetero::Isa)isa);
}

void hetero_rows_pick_noisy(const float* scores, int64_t size, int64_t first,
                            const float* temperature, const uint64_t* seed, int64_t position,
                            int64_t sample_index, float* best, int64_t* token, int64_t isa) {
    const hetero::Noise noise{*temperature, *seed, (uint32_t)position, (uint32_t)sample_index};
    hetero::pick_noisy(scores, size, first, noise, best, token, (hetero::Isa)isa);
}

}  // extern "C"
