// Single numbers: the smaller and the larger of two; bf16 and half floats by their bits.

#pragma once

#include <cstdint>
#include <cstring>

#define INLINE inline __attribute__((always_inline))

namespace hetero {

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// The bits of one number as a number of another type.
template <typename To, typename From>
INLINE To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <typename T>
INLINE T read_one(const void* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

INLINE float bf16_to_float(uint16_t bits) { return bit_cast<float>((uint32_t)bits << 16); }

// To nearest, ties to even; NaN stays NaN.
INLINE uint16_t float_to_bf16(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}

INLINE float half_to_float(uint16_t half) {
    const uint32_t magnitude = half & 0x7fffu, sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t bits = bit_cast<uint32_t>((float)(magnitude & 0x3ffu) * 0x1p-24f);
    if (magnitude >= 0x400u) bits = (magnitude << 13) + (112u << 23);
    if (magnitude >= 0x7c00u) bits += 112u << 23;
    return bit_cast<float>(bits | sign);
}

}  // namespace hetero
