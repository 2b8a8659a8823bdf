// Row-wise operations of a decoder layer in bfloat16, each in one pass over memory.

#include <cmath>

#include "step/lanes.h"

namespace hetero {
namespace {

constexpr int64_t kParallelElements = 32768;  // less work than this is not worth a fork
constexpr int64_t kRows = 16;                 // rows a thread takes at a time

// total = x + residual, rounded; out = total / rms(total) rounded, times weight: the roundings are
// those of the torch path. residual is overwritten with the total; null means total = x.
template <int N>
INLINE void rms_norm_row(const Bf16* x, Bf16* residual, const Bf16* weight, Bf16* out,
                         int64_t size, float eps) {
    Floats<N> squares = {};
    for (int64_t i = 0; i < size; i += N) {
        Floats<N> v = read<N>(x + i);
        if (residual) {
            v = rounded<N>(v + read<N>(residual + i));
            write_rounded<N>(residual + i, v);
        }
        squares += v * v;
    }
    const Bf16* sums = residual ? residual : x;
    const float scale = 1.0f / std::sqrt(total<N>(squares) / (float)size + eps);
    for (int64_t i = 0; i < size; i += N)
        write<N>(out + i, rounded<N>(read<N>(sums + i) * scale) * read<N>(weight + i));
}

template <int N>
INLINE void rms_norm_lanes(const Bf16* x, Bf16* residual, const Bf16* weight, Bf16* out,
                           int64_t rows, int64_t size, int64_t stride, float eps) {
    for (int64_t r = 0; r < rows; ++r)
        rms_norm_row<N>(x + r * stride, residual ? residual + r * size : nullptr, weight,
                        out + r * size, size, eps);
}

template <int N>
INLINE void silu_mul_lanes(const Bf16* gate_up, Bf16* out, int64_t rows, int64_t size) {
    for (int64_t r = 0; r < rows; ++r, gate_up += 2 * size, out += size)
        for (int64_t i = 0; i < size; i += N) {
            const Floats<N> gate = read<N>(gate_up + i);
            write<N>(out + i, rounded<N>(gate * sigmoid<N>(gate)) * read<N>(gate_up + size + i));
        }
}

DEFINE_FOR_WIDTHS(rms_norm,
                  (const Bf16* x, Bf16* residual, const Bf16* weight, Bf16* out, int64_t rows,
                   int64_t size, int64_t stride, float eps),
                  (x, residual, weight, out, rows, size, stride, eps))
DEFINE_FOR_WIDTHS(silu_mul, (const Bf16* gate_up, Bf16* out, int64_t rows, int64_t size),
                  (gate_up, out, rows, size))

}  // namespace
}  // namespace hetero

extern "C" {

// Sizes are multiples of 16.

// x [rows, size] with row stride `stride`; residual and out [rows, size], contiguous.
void hetero_rms_norm_bf16(const hetero::Bf16* x, hetero::Bf16* residual,
                          const hetero::Bf16* weight, hetero::Bf16* out, int64_t rows,
                          int64_t size, int64_t stride, float eps, int64_t threads) {
    using namespace hetero;
    const Isa isa = best_isa();
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > kParallelElements)
    for (int64_t r = 0; r < rows; r += kRows)
        rms_norm(x + r * stride, residual ? residual + r * size : nullptr, weight, out + r * size,
                 rows - r < kRows ? rows - r : kRows, size, stride, eps, isa);
}

// gate_up [rows, 2 * size], gate first -> silu(gate) * up, [rows, size].
void hetero_silu_mul_bf16(const hetero::Bf16* gate_up, hetero::Bf16* out, int64_t rows,
                          int64_t size, int64_t threads) {
    using namespace hetero;
    const Isa isa = best_isa();
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > kParallelElements)
    for (int64_t r = 0; r < rows; r += kRows)
        silu_mul(gate_up + 2 * r * size, out + r * size, rows - r < kRows ? rows - r : kRows, size,
                 isa);
}

}  // extern "C"
