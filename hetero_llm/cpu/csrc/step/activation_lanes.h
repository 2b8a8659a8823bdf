// Activations of gated MLPs on vectors.

#pragma once

#include "lanes.h"

namespace hetero {

// The normal distribution function. With z = |x| / sqrt(2) and t = 1 / (1 + z / 2),
// erfc(z) = t * p(t) * exp(-z * z); p has a relative error of 1e-8.
template <int N>
INLINE Floats<N> normal(Floats<N> x) {
    const Floats<N> z = (x < 0.0f ? -x : x) * 0.70710678118654752f;
    const Floats<N> t = 1.0f / (1.0f + z * 0.5f);
    Floats<N> p = fill<N>(2.2444437267e-2f);
    p = p * t - 1.7808012395e-1f;
    p = p * t + 5.5688112664e-1f;
    p = p * t - 8.3916439930e-1f;
    p = p * t + 5.6051873212e-1f;
    p = p * t - 1.7217732920e-1f;
    p = p * t + 2.5072791558e-1f;
    p = p * t + 2.3333156231e-1f;
    p = p * t + 2.8348525976e-1f;
    p = p * t + 2.8203281215e-1f;
    const Floats<N> tail = 0.5f * t * p * power_of_two<N>(x * x * (-0.5f * kLog2e));
    return x < 0.0f ? tail : 1.0f - tail;
}

// 0: silu, 1: gelu with tanh, 2: exact gelu.
template <int N, int kKind>
INLINE Floats<N> activate(Floats<N> x) {
    if constexpr (kKind == 0) return x * sigmoid<N>(x);
    // (1 + tanh(u)) / 2 = sigmoid(2 u)
    if constexpr (kKind == 1)
        return x * sigmoid<N>(1.5957691216057308f * x * (1.0f + 0.044715f * x * x));
    if constexpr (kKind == 2) return x * normal<N>(x);
}

}  // namespace hetero
