// What codes of 8 and 4 bits stand for, as tables of bytes, and scales: for processors with bf16
// dot products.

#pragma once

#include <cmath>

#include "matrix.h"

namespace hetero::experts {

// High and low bytes of the bf16 for each code; tables of fewer codes repeat them.
struct alignas(64) Tables {
    uint8_t high[128], low[128];
};

template <typename Value>
Tables make_tables(int codes, Value value) {
    Tables tables;
    for (int i = 0; i < 128; ++i) {
        const auto bits = bit_cast<uint32_t>((float)value(i % codes));  // the lower half is zero
        tables.high[i] = (uint8_t)(bits >> 24);
        tables.low[i] = (uint8_t)(bits >> 16);
    }
    return tables;
}

// e4m3 without its sign (OCP 8-bit Floating Point Specification 1.0): 15 exponents, no infinity.
inline const Tables kFp8Tables = make_tables(128, [](int i) {
    const int exponent = i >> 3, fraction = i & 7;
    if (i == 127) return NAN;
    return exponent ? std::ldexp(8.0f + fraction, exponent - 10) : std::ldexp(1.0f * fraction, -9);
});

// e2m1 (OCP Microscaling Formats 1.0).
inline const Tables kFp4Tables = make_tables(16, [](int i) {
    constexpr float kValues[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    return i < 8 ? kValues[i] : -kValues[i - 8];
});

// As number_at.
__attribute__((target("avx2,f16c"), always_inline)) inline float fast_number_at(
    Number number, const char* numbers, int64_t index) {
    if (number == Number::kFloat) return read_one<float>(numbers + 4 * index);
    const auto bits = read_one<uint16_t>(numbers + 2 * index);
    if (number == Number::kHalf) return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
    return bf16_to_float(bits);
}

}  // namespace hetero::experts
