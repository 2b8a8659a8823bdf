// AMX tiles in plain C++, so that kernels which use them can be tested on a machine without AMX.
//
// Included ahead of a kernel's source (-include). Follows Intel's manual where it is strict: tiles
// have to be configured, shapes have to match, and memory outside a tile's shape is not touched.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace amx_emulation {

struct Tile {
    int rows = 0, row_bytes = 0;
    uint8_t data[16][64];
};

inline thread_local Tile tiles[8];
inline thread_local bool configured = false;

inline void need(bool condition) {
    if (!condition) std::abort();  // the processor would raise an exception
}

inline void load_config(const void* memory) {
    const uint8_t* config = (const uint8_t*)memory;
    need(config[0] == 1);
    for (int i = 0; i < 8; ++i) {
        uint16_t row_bytes;
        std::memcpy(&row_bytes, config + 16 + 2 * i, 2);
        tiles[i].row_bytes = row_bytes;
        tiles[i].rows = config[48 + i];
        need(tiles[i].row_bytes <= 64 && tiles[i].rows <= 16);
        std::memset(tiles[i].data, 0, sizeof tiles[i].data);
    }
    configured = true;
}

inline Tile& used(int i) {
    need(configured && tiles[i].rows > 0 && tiles[i].row_bytes > 0);
    return tiles[i];
}

inline void load(int i, const void* base, int64_t stride) {
    Tile& t = used(i);
    std::memset(t.data, 0, sizeof t.data);
    for (int r = 0; r < t.rows; ++r)
        std::memcpy(t.data[r], (const char*)base + r * stride, t.row_bytes);
}

inline void store(int i, void* base, int64_t stride) {
    const Tile& t = used(i);
    for (int r = 0; r < t.rows; ++r)
        std::memcpy((char*)base + r * stride, t.data[r], t.row_bytes);
}

inline void zero(int i) { std::memset(used(i).data, 0, sizeof tiles[i].data); }

inline float widen(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

template <typename Number, typename Product>
void multiply(int sum, int a, int b, Product product) {
    Tile &c = used(sum), &x = used(a), &w = used(b);
    need(sum != a && sum != b && a != b);
    need(c.rows == x.rows && c.row_bytes == w.row_bytes && x.row_bytes / 4 == w.rows);
    for (int m = 0; m < c.rows; ++m)
        for (int k = 0; k < w.rows; ++k)
            for (int n = 0; n < c.row_bytes / 4; ++n) {
                Number value;
                std::memcpy(&value, c.data[m] + 4 * n, 4);
                value = product(value, x.data[m] + 4 * k, w.data[k] + 4 * n);
                std::memcpy(c.data[m] + 4 * n, &value, 4);
            }
}

inline void multiply_bf16(int sum, int a, int b) {
    multiply<float>(sum, a, b, [](float value, const void* x, const void* w) {
        uint16_t p[2], q[2];
        std::memcpy(p, x, 4);
        std::memcpy(q, w, 4);
        return value + widen(p[0]) * widen(q[0]) + widen(p[1]) * widen(q[1]);
    });
}

inline void multiply_int8(int sum, int a, int b) {
    multiply<int32_t>(sum, a, b, [](int32_t value, const void* x, const void* w) {
        int8_t p[4], q[4];
        std::memcpy(p, x, 4);
        std::memcpy(q, w, 4);
        for (int i = 0; i < 4; ++i) value += (int32_t)p[i] * q[i];
        return value;
    });
}

}  // namespace amx_emulation

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig(memory) amx_emulation::load_config(memory)
#define _tile_release() (amx_emulation::configured = false)
#define _tile_loadd(tile, base, stride) amx_emulation::load(tile, base, stride)
#define _tile_stream_loadd(tile, base, stride) amx_emulation::load(tile, base, stride)
#define _tile_stored(tile, base, stride) amx_emulation::store(tile, base, stride)
#define _tile_zero(tile) amx_emulation::zero(tile)
#define _tile_dpbf16ps(sum, a, b) amx_emulation::multiply_bf16(sum, a, b)
#define _tile_dpbssd(sum, a, b) amx_emulation::multiply_int8(sum, a, b)
