// Packed products on AMX tiles, bf16 and int8.
//
// Tiles 0-3 hold sums, 4 and 5 rows, 6 and 7 weights. Rows come straight from the prepared rows and
// weights from the packed panel: 16 steps of a strip are one tile. Groups of more than 16 rows take
// 2 x 2 tiles (32 rows x 32 outputs), smaller ones 1 x 4 (16 x 64).
//
// Of weights with groups of k a block is unpacked to int8, then the tiles sum one group of k at a
// time, 16, 8 or 4 steps to a tile, and vectors scale the sums and add them.

#include <cstring>

#include "amx.h"
#include "matmul_groups.h"
#include "matmul_kernels.h"

namespace hetero {
namespace {

#define AMX                                                                                        \
    __attribute__((target("amx-tile,amx-bf16,amx-int8,avx2,fma,avx512f,avx512bw,avx512dq,"         \
                          "avx512vl")))

constexpr int64_t kTileSteps = 16;     // of k in a tile
constexpr int64_t kTileRow = 64;       // bytes
constexpr int64_t kGroup = 32;         // rows
constexpr int64_t kBlockSteps = 256;   // two strips of that depth stay in the L1 cache
constexpr int64_t kAheadBytes = 8192;  // two steps of tiles

typedef int32_t Ints __attribute__((vector_size(64)));

struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Rows of the tiles 0, 1, 4 and of the tiles 2, 3, 5 in this thread's configuration; 0: none.
thread_local int64_t loaded_low = 0, loaded_lower = 0, loaded_steps = 0;  // steps: of k in a tile

// low, high: rows of the upper and lower tiles; high = 0: all sums are of the upper one.
AMX void set_tiles(int64_t low, int64_t high, int64_t steps) {
    const int64_t lower = high ? high : low;
    if (low == loaded_low && lower == loaded_lower && steps == loaded_steps) return;
    Config config;
    const int64_t rows[8] = {low, low, lower, lower, low, lower, steps, steps};
    for (int i = 0; i < 8; ++i) {
        const bool is_input = i == 4 || i == 5;
        config.row_bytes[i] = (uint16_t)(is_input ? steps * 4 : kTileRow);
        config.rows[i] = (uint8_t)rows[i];
    }
    // GCC's intrinsic reads, to the compiler, the first 8 bytes only: without this the rest would
    // not be written.
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
    loaded_low = low;
    loaded_lower = lower;
    loaded_steps = steps;
}

struct Part {
    const char* weights;  // first of the strips
    const char* x;
    int64_t x_stride, steps;
    float* out;
    int64_t out_stride;  // elements
    int64_t low, high, strips;
    bool add;
    int64_t fetch;  // cache lines of each step to prefetch: those of all strips of the call
    int64_t tile_steps;
};

AMX inline void fetch_ahead(const Part& p, const char* w) {
    if (p.fetch == 0) return;
    for (int64_t step = 0; step < kTileSteps; ++step)
        for (int64_t line = 0; line < p.fetch; ++line)
            __builtin_prefetch(w + kAheadBytes + step * kStepBytes + line * 64, 0, 2);
}

// Tile numbers have to be literals, hence macros.
#define MULTIPLY(sum, a, b)                                        \
    do {                                                           \
        if constexpr (kInt8) _tile_dpbssd(sum, a, b);              \
        else _tile_dpbf16ps(sum, a, b);                            \
    } while (0)

#define BEGIN(sum, wanted, at)                                     \
    do {                                                           \
        if (!(wanted)) break;                                      \
        if (p.add) _tile_loadd(sum, at, p.out_stride * 4);         \
        else _tile_zero(sum);                                      \
    } while (0)

#define FINISH(sum, wanted, at)                                    \
    do {                                                           \
        if (wanted) _tile_stored(sum, at, p.out_stride * 4);       \
    } while (0)

// Up to 32 rows x 2 strips.
template <bool kInt8>
AMX void square(const Part& p) {
    const bool two = p.strips > 1;
    float* below = p.out + p.low * p.out_stride;
    BEGIN(0, true, p.out);
    BEGIN(1, two, p.out + kStrip);
    BEGIN(2, true, below);
    BEGIN(3, two, below + kStrip);
    const char *w = p.weights, *x = p.x, *x_below = p.x + p.low * p.x_stride;
    for (int64_t step = 0; step < p.steps; step += p.tile_steps) {
        fetch_ahead(p, w);
        _tile_loadd(6, w, kStepBytes);
        _tile_loadd(4, x, p.x_stride);
        _tile_loadd(5, x_below, p.x_stride);
        MULTIPLY(0, 4, 6);
        MULTIPLY(2, 5, 6);
        if (two) {
            _tile_loadd(7, w + kTileRow, kStepBytes);
            MULTIPLY(1, 4, 7);
            MULTIPLY(3, 5, 7);
        }
        w += p.tile_steps * kStepBytes;
        x += p.tile_steps * 4;
        x_below += p.tile_steps * 4;
    }
    FINISH(0, true, p.out);
    FINISH(1, two, p.out + kStrip);
    FINISH(2, true, below);
    FINISH(3, two, below + kStrip);
}

// Up to 16 rows x 4 strips.
template <bool kInt8>
AMX void flat(const Part& p) {
    const int64_t strips = p.strips;
    BEGIN(0, true, p.out);
    BEGIN(1, strips > 1, p.out + kStrip);
    BEGIN(2, strips > 2, p.out + 2 * kStrip);
    BEGIN(3, strips > 3, p.out + 3 * kStrip);
    const char *w = p.weights, *x = p.x;
    for (int64_t step = 0; step < p.steps; step += p.tile_steps) {
        fetch_ahead(p, w);
        _tile_loadd(4, x, p.x_stride);
        _tile_loadd(6, w, kStepBytes);
        MULTIPLY(0, 4, 6);
        if (strips > 1) {
            _tile_loadd(7, w + kTileRow, kStepBytes);
            MULTIPLY(1, 4, 7);
        }
        if (strips > 2) {
            _tile_loadd(6, w + 2 * kTileRow, kStepBytes);
            MULTIPLY(2, 4, 6);
        }
        if (strips > 3) {
            _tile_loadd(7, w + 3 * kTileRow, kStepBytes);
            MULTIPLY(3, 4, 7);
        }
        w += p.tile_steps * kStepBytes;
        x += p.tile_steps * 4;
    }
    FINISH(0, true, p.out);
    FINISH(1, strips > 1, p.out + kStrip);
    FINISH(2, strips > 2, p.out + 2 * kStrip);
    FINISH(3, strips > 3, p.out + 3 * kStrip);
}

// One group of rows over `strips` strips of one panel and one block of steps.
void group(Part p, bool is_int8, int64_t rows) {
    p.low = least(rows, 16);
    p.high = rows - p.low;
    set_tiles(p.low, p.high, p.tile_steps);
    if (p.high) (is_int8 ? square<true> : square<false>)(p);
    else (is_int8 ? flat<true> : flat<false>)(p);
}

// Converts integers, which the tiles have left in `out`, to results.
AMX void scale_sums(const float* x_scales, const float* scales, int64_t rows, int64_t strips,
                    float* out, int64_t out_stride) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t s = 0; s < strips * kStrip; s += kStrip) {
            float* at = out + r * out_stride + s;
            const __m512 sums =
                __builtin_convertvector((Ints)_mm512_loadu_si512(at), __m512);
            const __m512 scale =
                _mm512_mul_ps(_mm512_set1_ps(x_scales[r]), _mm512_loadu_ps(scales + s));
            _mm512_storeu_ps(at, _mm512_mul_ps(sums, scale));
        }
}

// Sums of one group of k, [rows][kPanel] integers, scaled and added to `out`, or put there.
// x_scales, x_corrections: of the group, of the first row; rows x_stride bytes apart.
AMX void add_group(const Matrix& matrix, const GroupLayout& layout, const char* header,
                   int64_t strip, int64_t strips, const int32_t* sums, const float* x_scales,
                   const int32_t* x_corrections, int64_t x_stride, int64_t rows, bool add,
                   float* out, int64_t out_stride) {
    const bool halves = matrix.groups.half_scales;
    const Zeros zeros = matrix.groups.zeros;
    const int32_t centre =
        matrix.format == Format::kInt4 && zeros == Zeros::kNone ? kInt4Zero : 0;
    for (int64_t s = 0; s < strips; ++s) {
        const int64_t output = (strip + s) * kStrip;
        const __m512 scale = wide_scales(halves, header, output);
        const __m512i points =
            wide_points(zeros == Zeros::kPoints, header + layout.zeros_at, output, centre);
        __m512 offset = _mm512_setzero_ps();
        if (zeros == Zeros::kOffsets)
            offset = wide_scales(halves, header + layout.zeros_at, output);
        for (int64_t r = 0; r < rows; ++r) {
            float* at = out + r * out_stride + s * kStrip;
            const float x_scale = *(const float*)((const char*)x_scales + r * x_stride);
            const int32_t correction =
                *(const int32_t*)((const char*)x_corrections + r * x_stride);
            const __m512i total =
                _mm512_add_epi32(_mm512_loadu_si512(sums + r * kPanel + s * kStrip),
                                 times_points(points, correction));
            __m512 value = add ? _mm512_loadu_ps(at) : _mm512_setzero_ps();
            value = _mm512_fmadd_ps(to_floats(total),
                                    _mm512_mul_ps(scale, _mm512_set1_ps(x_scale)), value);
            if (zeros == Zeros::kOffsets)
                value = _mm512_fmadd_ps(offset, _mm512_set1_ps(bit_cast<float>(correction)), value);
            _mm512_storeu_ps(at, value);
        }
    }
}

// The most steps of k in a tile that groups are multiples of.
int64_t steps_of_tile(int64_t group) {
    return group % 64 == 0 ? 16 : group % 32 == 0 ? 8 : 4;
}

}  // namespace

AMX void release_tiles() {
    if (loaded_low == 0) return;
    _tile_release();
    loaded_low = loaded_lower = loaded_steps = 0;
}

void multiply_tiles(const void* x, int64_t x_stride, int64_t rows, const void* panel,
                    int64_t steps, int64_t strips, float* out, int64_t out_stride, bool add) {
    Part p{(const char*)panel, (const char*)x, x_stride, steps, out, out_stride, 16, rows - 16,
           strips, add, 0, kTileSteps};
    if (rows <= 16) {
        group(p, false, rows);
        return;
    }
    for (int64_t s = 0; s < strips; s += 2) {
        p.strips = least(2, strips - s);
        group(p, false, rows);
        p.weights += 2 * kTileRow;
        p.out += 2 * kStrip;
    }
}

void multiply_amx(const Matrix& matrix, const Rows& x, int64_t rows, int64_t first, int64_t strips,
                  float* out, int64_t out_stride) {
    const int64_t bytes = element_bytes(matrix.format);
    const int64_t steps = matrix.padded_depth * bytes / 4, last = first + strips;
    const bool is_int8 = matrix.format == Format::kInt8;
    const int64_t block = rows <= kGroup ? steps : kBlockSteps;
    // 16 rows or fewer take all strips of a panel at once, more of them two.
    const int64_t width = rows <= 16 ? kTileStrips : 2;
    Part p;
    p.tile_steps = kTileSteps;
    p.x_stride = x.stride * bytes;
    p.out_stride = out_stride;
    // Panels inside: their share of a block of many rows' inputs stays in L2.
    for (int64_t begin = 0; begin < steps; begin += block) {
        p.steps = least(block, steps - begin);
        p.add = begin > 0;
        for (int64_t strip = first, next; strip < last; strip = next) {
            next = least(last, (strip / kTileStrips + 1) * kTileStrips);
            const char* panel = (const char*)matrix.data + strip / kTileStrips * steps * kStepBytes;
            for (int64_t s = strip; s < next; s += width) {
                p.strips = least(width, next - s);
                p.weights = panel + begin * kStepBytes + s % kTileStrips * kTileRow;
                for (int64_t r = 0; r < rows; r += kGroup) {
                    p.x = (const char*)x.data + r * p.x_stride + begin * 4;
                    p.out = out + r * out_stride + s * kStrip;
                    p.fetch = r == 0 && s == strip ? next - strip : 0;
                    group(p, is_int8, least(kGroup, rows - r));
                }
            }
        }
    }
    if (is_int8)
        scale_sums(x.scales, matrix.scales + first * kStrip, rows, strips, out + first * kStrip,
                   out_stride);
}

AMX void multiply_groups_amx(const Matrix& matrix, const Rows& x, int64_t rows, int64_t first,
                             int64_t strips, float* out, int64_t out_stride) {
    const GroupLayout layout = group_layout(matrix);
    const int64_t size = matrix.groups.size, padded = matrix.padded_depth, last = first + strips;
    const int64_t block = block_depth(matrix.groups), width = rows <= 16 ? kTileStrips : 2;
    const bool is_int4 = matrix.format == Format::kInt4;
    alignas(64) char unpacked[kBlockDepth * kPanel];
    alignas(64) int32_t sums[kGroup * kPanel];
    Part p;
    p.x_stride = x.stride;
    p.out = (float*)sums;
    p.out_stride = kPanel;
    p.add = false;
    p.fetch = 0;
    p.tile_steps = steps_of_tile(size);
    // Panels inside: their share of a block of many rows' inputs stays in L2.
    for (int64_t begin = 0; begin < padded; begin += block) {
        const int64_t end = least(begin + block, padded);
        for (int64_t strip = first, next; strip < last; strip = next) {
            next = least(last, (strip / kTileStrips + 1) * kTileStrips);
            const int64_t inside = strip % kTileStrips;
            const char* header = (const char*)matrix.data +
                                 strip / kTileStrips * layout.panel_bytes +
                                 begin / size * layout.bytes;
            for (int64_t k = begin, g = 0; is_int4 && k < end; k += size, ++g)
                unpack_int4(header + g * layout.bytes + layout.data_at + inside * 64,
                            least(size, end - k), next - strip, unpacked + g * size * kPanel);
            for (int64_t r = 0; r < rows; r += kGroup) {
                const int64_t count = least(kGroup, rows - r);
                const int8_t* row = (const int8_t*)x.data + r * x.stride;
                for (int64_t s = 0; s < next - strip; s += width)
                    for (int64_t k = begin, g = 0; k < end; k += size, ++g) {
                        p.strips = least(width, next - strip - s);
                        p.steps = least(size, end - k) / 4;
                        p.x = (const char*)row + k;
                        p.weights = is_int4 ? unpacked + g * size * kPanel + s * kTileRow
                                            : header + g * layout.bytes + layout.data_at +
                                                  (inside + s) * kTileRow;
                        group(p, true, count);
                        add_group(matrix, layout, header + g * layout.bytes, inside + s, p.strips,
                                  sums, scales_of_row(row, padded) + k / size,
                                  corrections_of_row(row, padded, layout.count) + k / size,
                                  x.stride, count, k > 0,
                                  out + r * out_stride + (strip + s) * kStrip, out_stride);
                    }
            }
        }
    }
}

}  // namespace hetero
