// Cuts products with rows of weights into register tiles.

#include "dots.h"

#include "dot_kernels.h"

namespace hetero::experts {
namespace {

// Tokens of a tile as a power of two: 3 are 2 and 1.
int tile_of(int64_t tokens) { return tokens >= 4 ? 2 : tokens >= 2 ? 1 : 0; }

void set_row(const DotJob& job, int64_t row, int64_t at, DotCall& call) {
    const Form& form = *job.form;
    call.w[at] = job.matrix.data + row * form.stride();
    if (!has_scales(form.kind)) return;
    const int64_t groups = form.groups();
    call.scales[at] =
        job.matrix.scales + row / form.scale_rows * groups * bytes_of(form.scale);
    const int64_t bytes = form.zeros == Zeros::kPoints ? 1 : bytes_of(form.scale);
    call.zeros[at] = form.zeros == Zeros::kNone ? nullptr : job.matrix.zeros + row * groups * bytes;
}

}  // namespace

bool takes_bf16(Kind kind, Number input, Isa isa) {
    if (input != Number::kBf16 || isa < kAvx512Bf16) return false;
    if (kind == Kind::kFloat || kind == Kind::kHalf) return false;
    return !is_8_bit(kind) || has_vbmi();
}

Layout dot_layout(Kind kind, bool bf16_rows, Isa isa) {
    if (is_8_bit(kind)) return {bf16_rows ? Order::kBytes : Order::kNatural, 0};
    if (!is_4_bit(kind)) return {Order::kNatural, 0};
    if (bf16_rows) return {Order::kNibbles, 0};
    return {Order::kWords, isa >= kAvx512 ? 16 : isa >= kAvx2 ? 8 : 4};
}

void dot_rows(const DotJob& job) {
    const Form& form = *job.form;
    const DotTiles& tiles = job.bf16_rows ? bf16_dots(form.kind, form.zeros)
                                          : float_dots(form.kind, job.isa);
    DotCall call{};
    call.form = &form;
    call.out_stride = job.out_stride;
    const int widest = tile_of(job.tokens);
    const int64_t last = job.first + job.count, stride = form.stride();
    // Rows outside: all tokens meet the weights while they are in the L1 or L2 cache.
    for (int64_t row = job.first, step; row < last; row += step) {
        step = last - row >= tiles.rows[widest] ? tiles.rows[widest] : 1;
        const char* ahead = row + step < last ? job.matrix.data + (row + step) * stride : job.next;
        for (int64_t i = 0; i < step; ++i) set_row(job, row + i, i, call);
        for (int64_t t = 0, some; t < job.tokens; t += some) {
            const int width = tile_of(job.tokens - t);
            some = (int64_t)1 << width;
            for (int64_t i = 0; i < some; ++i) call.x[i] = job.x[t + i];
            // Tiles of fewer tokens may have more rows than those of many, never fewer.
            const int64_t rows = step == 1 ? 1 : tiles.rows[widest];
            for (int64_t i = 0; i < rows; ++i)  // its own row: a hit that costs nothing
                call.ahead[i] = t == 0 && ahead ? ahead + i * stride : call.w[i];
            call.out = job.out + t * job.out_stride + (row - job.first);
            if (rows == tiles.rows[width]) tiles.tile[width](call);
            else if (rows == 1) tiles.single[width](call);
            else {
                // The rest of the tokens, with half of the rows that its tile could take.
                for (int64_t i = 0; i < rows; ++i) {
                    DotCall one = call;
                    one.w[0] = call.w[i];
                    one.ahead[0] = call.w[i];
                    one.scales[0] = call.scales[i];
                    one.zeros[0] = call.zeros[i];
                    one.out = call.out + i;
                    tiles.single[width](one);
                }
            }
        }
    }
    if (job.matrix.row_scale)
        for (int64_t t = 0; t < job.tokens; ++t)
            for (int64_t i = 0; i < job.count; ++i)
                job.out[t * job.out_stride + i] *= job.matrix.row_scale[job.first + i];
}

}  // namespace hetero::experts
