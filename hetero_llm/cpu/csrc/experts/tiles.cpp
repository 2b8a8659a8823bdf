// Products on AMX tiles, see tiles.h. Tiles 0 to 3 hold sums of a block of tokens each, 4 the
// weights, 5 to 7 tokens.

#include "tiles.h"

#include "codes.h"

// GCC 12 takes operands that intrinsics leave undefined for mistakes of ours.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace hetero::experts {
namespace {

#define AMX                                                                                        \
    __attribute__((target("amx-tile,amx-bf16,avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,"    \
                          "avx512bf16,avx512vbmi")))
#define AMX_INLINE AMX inline __attribute__((always_inline))

constexpr int64_t kStep = 32;            // places of a tile
constexpr int64_t kBlock = 512;          // places that are unpacked at a time
constexpr int64_t kPairBytes = 64;       // of a pair of places of a block of tokens
constexpr int64_t kLine = 64;

struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

thread_local int64_t loaded_rows = 0;  // of weights in this thread's configuration

AMX void set_tiles(int64_t rows) {
    if (rows == loaded_rows) return;
    Config config;
    for (int i = 0; i < 8; ++i) {
        config.row_bytes[i] = 64;
        config.rows[i] = (uint8_t)(i < 5 ? rows : kTileRows);
    }
    // See matmul_amx.cpp: GCC takes the intrinsic to read 8 bytes only.
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
    loaded_rows = rows;
}

// Of -16 to 31, from which 16 neighbours are a table.
const Tables kInt4Tables = make_tables(48, [](int i) { return (float)(i - 16); });

AMX_INLINE __m512i load_some(const char* p, int64_t bytes) {
    return bytes >= kLine ? _mm512_loadu_si512(p)
                          : _mm512_maskz_loadu_epi8(((uint64_t)1 << bytes) - 1, p);
}

AMX_INLINE void unpack_int8(__m512i raw, uint16_t* to) {
    const __m512 a = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm512_castsi512_si128(raw)));
    const __m512 b = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm512_extracti32x4_epi32(raw, 1)));
    const __m512 c = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm512_extracti32x4_epi32(raw, 2)));
    const __m512 d = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm512_extracti32x4_epi32(raw, 3)));
    _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    _mm512_store_si512(to + 32, (__m512i)_mm512_cvtne2ps_pbh(d, c));
}

AMX_INLINE void unpack_fp8(__m512i raw, uint16_t* to) {
    const __m512i low =
        _mm512_permutex2var_epi8(_mm512_load_si512(kFp8Tables.low), raw,
                                 _mm512_load_si512(kFp8Tables.low + 64));
    const __m512i absolute =
        _mm512_permutex2var_epi8(_mm512_load_si512(kFp8Tables.high), raw,
                                 _mm512_load_si512(kFp8Tables.high + 64));
    const __m512i high = _mm512_ternarylogic_epi32(absolute, raw, _mm512_set1_epi8(-128), 0xf8);
    _mm512_store_si512(to, _mm512_unpacklo_epi8(low, high));
    _mm512_store_si512(to + 32, _mm512_unpackhi_epi8(low, high));
}

// Four tables of 16 bytes, one for each 128-bit lane.
AMX_INLINE __m512i tables_of(const uint8_t* a, const uint8_t* b, const uint8_t* c,
                             const uint8_t* d) {
    const __m512i first = _mm512_zextsi128_si512(_mm_loadu_si128((const __m128i*)a));
    const __m512i two = _mm512_inserti32x4(first, _mm_loadu_si128((const __m128i*)b), 1);
    const __m512i three = _mm512_inserti32x4(two, _mm_loadu_si128((const __m128i*)c), 2);
    return _mm512_inserti32x4(three, _mm_loadu_si128((const __m128i*)d), 3);
}

// 128 codes; each lane's 32, which one group holds, go to one step of a tile.
AMX_INLINE void unpack_nibbles(__m512i raw, __m512i high_table, __m512i low_table, uint16_t* to) {
    const __m512i mask = _mm512_set1_epi8(15);
    const __m512i codes[2] = {_mm512_and_si512(raw, mask),
                              _mm512_and_si512(_mm512_srli_epi16(raw, 4), mask)};
    for (int half = 0; half < 2; ++half) {
        const __m512i low = _mm512_shuffle_epi8(low_table, codes[half]);
        const __m512i high = _mm512_shuffle_epi8(high_table, codes[half]);
        const __m512i parts[2] = {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
        for (int part = 0; part < 2; ++part) {
            uint16_t* at = to + half * 16 + part * 8;
            _mm_store_si128((__m128i*)at, _mm512_castsi512_si128(parts[part]));
            _mm_store_si128((__m128i*)(at + 32), _mm512_extracti32x4_epi32(parts[part], 1));
            _mm_store_si128((__m128i*)(at + 64), _mm512_extracti32x4_epi32(parts[part], 2));
            _mm_store_si128((__m128i*)(at + 96), _mm512_extracti32x4_epi32(parts[part], 3));
        }
    }
}

// Places [begin, begin + count) of a row, zeros behind its end; count is a multiple of what 64
// bytes hold or ends with the row.
AMX void unpack(const TileJob& job, int64_t row, int64_t begin, int64_t count, uint16_t* to) {
    const Form& form = *job.form;
    const char* data = job.matrix.data + row * form.stride();
    const int64_t end = form.taken_bytes();
    if (form.kind == Kind::kBf16) {
        for (int64_t k = 0; k < count; k += 32, to += 32)
            _mm512_store_si512(to, load_some(data + 2 * (begin + k), end - 2 * (begin + k)));
        return;
    }
    if (is_8_bit(form.kind)) {
        for (int64_t k = 0; k < count; k += 64, to += 64) {
            const __m512i raw = load_some(data + begin + k, end - begin - k);
            if (form.kind == Kind::kInt8) unpack_int8(raw, to);
            else unpack_fp8(raw, to);
        }
        return;
    }
    const bool is_int4 = form.kind == Kind::kInt4;
    const uint8_t* high = is_int4 ? kInt4Tables.high + 16 - kInt4Centre : kFp4Tables.high;
    const uint8_t* low = is_int4 ? kInt4Tables.low + 16 - kInt4Centre : kFp4Tables.low;
    const int64_t groups = form.groups();
    const uint8_t* points = (const uint8_t*)job.matrix.zeros + row * groups;
    __m512i high_table = tables_of(high, high, high, high);
    __m512i low_table = tables_of(low, low, low, low);
    for (int64_t k = 0; k < count; k += 128, to += 128) {
        if (form.zeros == Zeros::kPoints) {
            // Codes less their point: a table that begins with -point.
            int64_t from[4];
            for (int lane = 0; lane < 4; ++lane) {
                const int64_t group = (begin + k + 32 * lane) / form.group;
                from[lane] = 16 - (points[group < groups ? group : groups - 1] & 15);
            }
            high_table =
                tables_of(kInt4Tables.high + from[0], kInt4Tables.high + from[1],
                          kInt4Tables.high + from[2], kInt4Tables.high + from[3]);
            low_table = tables_of(kInt4Tables.low + from[0], kInt4Tables.low + from[1],
                                  kInt4Tables.low + from[2], kInt4Tables.low + from[3]);
        }
        const int64_t at = (begin + k) / 2;
        unpack_nibbles(load_some(data + at, end - at), high_table, low_table, to);
    }
}

// Tile numbers have to be literals.
#define ON_BLOCKS(DO)                      \
    do {                                   \
        DO(0, 5);                          \
        if (blocks > 1) DO(1, 6);          \
        if (blocks > 2) DO(2, 7);          \
        if (blocks > 3) DO(3, 5);          \
    } while (0)

// Adds `steps` steps of weights (rows `stride` bytes apart) and of tokens to the sums' tiles.
AMX_INLINE void add_steps(const char* w, int64_t stride, const char* x, int64_t x_block,
                          int64_t steps, int64_t blocks, const char* ahead) {
    for (int64_t s = 0; s < steps; ++s) {
        if (ahead) {
            for (int64_t i = 0; i < kTileRows; ++i)
                _mm_prefetch(ahead + i * stride + s * kLine, _MM_HINT_T1);
        }
        _tile_loadd(4, w + s * kLine, stride);
#define ADD(sum, token)                                        \
    do {                                                       \
        _tile_loadd(token, x + sum * x_block, kPairBytes);     \
        _tile_dpbf16ps(sum, 4, token);                         \
    } while (0)
        ON_BLOCKS(ADD);
        x += kStep / 2 * kPairBytes;
    }
}

AMX_INLINE void zero_sums(int64_t blocks) {
#define ZERO(sum, token) _tile_zero(sum)
    ON_BLOCKS(ZERO);
}

AMX_INLINE void store_sums(float* to, int64_t blocks) {
    const int64_t stride = blocks * kTileTokens * 4;
#define STORE(sum, token) _tile_stored(sum, to + sum * kTileTokens, stride)
    ON_BLOCKS(STORE);
}

// out (+)= scale * sums of group g, row by row.
AMX_INLINE void add_group(const TileJob& job, int64_t g, const float* sums, bool add) {
    const Form& form = *job.form;
    const int64_t groups = form.groups(), width = job.blocks * kTileTokens;
    for (int64_t i = 0; i < job.count; ++i) {
        const int64_t row = (job.first + i) / form.scale_rows;
        const __m512 scale = _mm512_set1_ps(fast_number_at(form.scale, job.matrix.scales,
                                                       row * groups + g));
        for (int64_t t = i * width; t < (i + 1) * width; t += 16) {
            const __m512 sum = _mm512_loadu_ps(sums + t);
            const __m512 value = add ? _mm512_fmadd_ps(sum, scale, _mm512_loadu_ps(job.out + t))
                                     : _mm512_mul_ps(sum, scale);
            _mm512_storeu_ps(job.out + t, value);
        }
    }
}

}  // namespace

TileOrder tile_order(Kind kind) {
    if (kind == Kind::kFp8) return TileOrder::kBytes;
    return is_4_bit(kind) ? TileOrder::kGroups : TileOrder::kNatural;
}

int64_t tile_place(TileOrder order, int64_t k) {
    if (order == TileOrder::kBytes) return Layout{Order::kBytes, 0}.place(k);
    if (order == TileOrder::kNatural) return k;
    const int64_t in = k % 128, byte = in / 2;
    return k - in + byte / 16 * 32 + in % 2 * 16 + byte % 16;
}

AMX void tile_rows(const TileJob& job) {
    const Form& form = *job.form;
    const int64_t blocks = job.blocks, x_block = tile_block_size(form.stored) * 2;
    const char* x = (const char*)job.x;
    set_tiles(job.count);
    if (form.kind == Kind::kBf16 && form.depth % kStep == 0) {
        zero_sums(blocks);
        add_steps(job.matrix.data + job.first * form.stride(), form.stride(), x, x_block,
                  form.depth / kStep, blocks, job.next);
        store_sums(job.out, blocks);
    } else {
        alignas(64) uint16_t unpacked[kTileRows * kBlock];
        alignas(64) float sums[kTileRows * kMostTileBlocks * kTileTokens];
        const int64_t group = has_scales(form.kind) ? form.group : form.depth;
        const int64_t unit = is_8_bit(form.kind) ? 64 : kStep;  // that places stay inside
        // A group that is longer than what is unpacked at a time keeps its sums in the tiles.
        for (int64_t begin = 0; begin < form.depth; begin += kBlock) {
            const int64_t end = begin + kBlock < form.depth ? begin + kBlock : form.depth;
            const int64_t bytes_begin = row_bytes(form.kind, begin);
            const int64_t bytes_end = row_bytes(form.kind, end);
            for (int64_t i = 0; i < job.count; ++i) {
                if (job.next)
                    for (int64_t at = bytes_begin; at < bytes_end; at += kLine)
                        _mm_prefetch(job.next + i * form.stride() + at, _MM_HINT_T1);
                unpack(job, job.first + i, begin, end - begin, unpacked + i * kBlock);
            }
            for (int64_t k = begin, stop; k < end; k = stop) {
                const int64_t g = k / group, last = (g + 1) * group;
                stop = last < end ? last : end;
                if (k % group == 0) zero_sums(blocks);
                add_steps((const char*)(unpacked + (k - begin)), kBlock * 2,
                          x + k / 2 * kPairBytes, x_block,
                          (stop - k + unit - 1) / unit * (unit / kStep), blocks, nullptr);
                if (stop != last && stop != form.depth) continue;
                if (!has_scales(form.kind)) {
                    store_sums(job.out, blocks);
                    continue;
                }
                store_sums(sums, blocks);
                add_group(job, g, sums, g > 0);
            }
        }
    }
    if (!job.matrix.row_scale) return;
    const int64_t width = blocks * kTileTokens;
    for (int64_t i = 0; i < job.count; ++i)
        for (int64_t t = 0; t < width; ++t)
            job.out[i * width + t] *= job.matrix.row_scale[job.first + i];
}

AMX void release_expert_tiles() {
    if (loaded_rows == 0) return;
    _tile_release();
    loaded_rows = 0;
}

}  // namespace hetero::experts
