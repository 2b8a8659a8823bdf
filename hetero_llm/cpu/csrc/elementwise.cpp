// Row-wise operations of a decoder layer in bfloat16, each in one pass over memory.

#include "simd.h"

namespace {

// total = x + residual, rounded; out = total / rms(total) rounded, times weight: the roundings are
// those of the torch path. residual is overwritten with the total; null means total = x.
INLINE void rms_norm_row(const Bf16* x, Bf16* residual, const Bf16* weight, Bf16* out,
                         int64_t size, float eps) {
    F16 squares = {};
    for (int64_t i = 0; i < size; i += kLanes) {
        F16 v = load(x + i);
        if (residual) {
            store(residual + i, v + load(residual + i));
            v = load(residual + i);
        }
        squares += v * v;
    }
    const Bf16* total = residual ? residual : x;
    const float scale = 1.0f / __builtin_sqrtf(sum(squares) / (float)size + eps);
    for (int64_t i = 0; i < size; i += kLanes) {
        store(out + i, load(total + i) * scale);
        store(out + i, load(out + i) * load(weight + i));
    }
}

INLINE void silu_mul_row(const Bf16* gate, const Bf16* up, Bf16* out, int64_t size) {
    for (int64_t i = 0; i < size; i += kLanes) {
        const F16 g = load(gate + i);
        const F16 magnitude = g < 0.0f ? g : -g;
        const F16 e = exp16(magnitude);  // of -|g|: no overflow
        const F16 sigmoid = (g < 0.0f ? e : splat(1.0f)) / (1.0f + e);
        store(out + i, g * sigmoid);
        store(out + i, load(out + i) * load(up + i));
    }
}

ISA void rms_norm_rows(const Bf16* x, Bf16* residual, const Bf16* weight, Bf16* out,
                       int64_t first, int64_t last, int64_t size, int64_t stride, float eps) {
    for (int64_t r = first; r < last; ++r)
        rms_norm_row(x + r * stride, residual ? residual + r * size : nullptr, weight,
                     out + r * size, size, eps);
}

ISA void silu_mul_rows(const Bf16* gate_up, Bf16* out, int64_t first, int64_t last,
                       int64_t size) {
    for (int64_t r = first; r < last; ++r)
        silu_mul_row(gate_up + 2 * r * size, gate_up + (2 * r + 1) * size, out + r * size, size);
}

constexpr int64_t kParallelElements = 32768;  // less work than this is not worth a fork
constexpr int64_t kRows = 16;                 // rows a thread takes at a time

}  // namespace

extern "C" {

// x [rows, size] with row stride `stride`; residual and out [rows, size], contiguous.
void hetero_rms_norm_bf16(const Bf16* x, Bf16* residual, const Bf16* weight, Bf16* out,
                          int64_t rows, int64_t size, int64_t stride, float eps,
                          int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > kParallelElements)
    for (int64_t r = 0; r < rows; r += kRows)
        rms_norm_rows(x, residual, weight, out, r, r + kRows < rows ? r + kRows : rows, size,
                      stride, eps);
}

// gate_up [rows, 2 * size], gate first -> silu(gate) * up, [rows, size].
void hetero_silu_mul_bf16(const Bf16* gate_up, Bf16* out, int64_t rows, int64_t size,
                          int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > kParallelElements)
    for (int64_t r = 0; r < rows; r += kRows)
        silu_mul_rows(gate_up, out, r, r + kRows < rows ? r + kRows : rows, size);
}

}  // extern "C"
