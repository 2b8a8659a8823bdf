// The product of AMX tiles that attention and adapters use.

#pragma once

#include <cstdint>

namespace hetero {

// out[r][i] (+)= sum over k of x[r][k] * panel[k][i] in bf16, for up to 32 rows. x: rows x_stride
// bytes apart; panel: [steps][64][2], k in pairs, as a packed matrix has it; strips: of 16 outputs,
// at most 4; steps: pairs of k, a multiple of 16; out_stride: floats. The
// call is not inlined, so it reads what the caller has written to memory before.
void multiply_tiles(const void* x, int64_t x_stride, int64_t rows, const void* panel,
                    int64_t steps, int64_t strips, float* out, int64_t out_stride, bool add);

}  // namespace hetero
