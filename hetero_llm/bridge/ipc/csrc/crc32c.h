// CRC32C (Castagnoli) by the SSE4.2 instruction if the processor has it, else by a table.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace hetero {

constexpr std::array<uint32_t, 256> make_crc32c_table() {
    std::array<uint32_t, 256> table{};
    for (uint32_t i = 0; i < 256; ++i) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82F63B78u : 0u);
        table[i] = crc;
    }
    return table;
}

// Both functions map register to register; the caller inverts it before and after.
inline uint32_t crc32c_by_table(const unsigned char* bytes, size_t count, uint32_t crc) {
    static constexpr std::array<uint32_t, 256> kTable = make_crc32c_table();
    for (size_t i = 0; i < count; ++i) crc = kTable[(crc ^ bytes[i]) & 0xFF] ^ (crc >> 8);
    return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) inline uint32_t crc32c_by_instruction(const unsigned char* bytes,
                                                                        size_t count,
                                                                        uint32_t crc) {
    uint64_t wide = crc;
    for (; count >= 8; bytes += 8, count -= 8) {
        uint64_t word;
        memcpy(&word, bytes, 8);
        wide = __builtin_ia32_crc32di(wide, word);
    }
    crc = (uint32_t)wide;
    for (; count > 0; ++bytes, --count) crc = __builtin_ia32_crc32qi(crc, *bytes);
    return crc;
}

inline bool has_crc32c() { return __builtin_cpu_supports("sse4.2"); }
#else
inline uint32_t crc32c_by_instruction(const unsigned char* bytes, size_t count, uint32_t crc) {
    return crc32c_by_table(bytes, count, crc);
}

inline bool has_crc32c() { return false; }
#endif

inline uint32_t crc32c(const void* bytes, size_t count, uint32_t seed) {
    static const bool fast = has_crc32c();
    const auto* first = static_cast<const unsigned char*>(bytes);
    return ~(fast ? crc32c_by_instruction : crc32c_by_table)(first, count, ~seed);
}

}  // namespace hetero
