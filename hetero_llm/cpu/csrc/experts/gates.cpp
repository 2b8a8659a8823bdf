// Activations of experts, see gates.h.

#include "gates.h"

#include "../step/activation_lanes.h"

namespace hetero::experts {
namespace {

template <int N>
INLINE Floats<N> clamped(Floats<N> gate, Floats<N> up, float alpha, float limit) {
    gate = gate > limit ? fill<N>(limit) : gate;
    up = up > limit ? fill<N>(limit) : up;
    up = up < -limit ? fill<N>(-limit) : up;
    return (up + 1.0f) * (gate * sigmoid<N>(gate * alpha));
}

template <int N, Gate kGate>
INLINE Floats<N> gated(Floats<N> gate, Floats<N> up, const GateForm& form) {
    if constexpr (kGate == Gate::kClamped)
        return clamped<N>(gate, up, (float)form.alpha, (float)form.limit);
    else if constexpr (kGate == Gate::kRelu || kGate == Gate::kReluSquared) {
        const Floats<N> positive = gate < 0.0f ? fill<N>(0.0f) : gate;
        return (kGate == Gate::kRelu ? positive : positive * positive) * up;
    } else {
        return activate<N, (int)kGate>(gate) * up;
    }
}

template <int N, Gate kGate>
INLINE void apply_all(const GateForm& form, float* gate, const float* up, int64_t size) {
    int64_t i = 0;
    for (; i + N <= size; i += N)
        write<N>(gate + i, gated<N, kGate>(read<N>(gate + i), read<N>(up + i), form));
    if (i < size)
        write_some<N>(gate + i,
                      gated<N, kGate>(read_some<N>(gate + i, size - i),
                                      read_some<N>(up + i, size - i), form),
                      size - i);
}

template <int N>
INLINE void apply_gate_lanes(const GateForm& form, float* gate, const float* up, int64_t size) {
    switch (form.gate) {
        case Gate::kSilu: return apply_all<N, Gate::kSilu>(form, gate, up, size);
        case Gate::kGeluTanh: return apply_all<N, Gate::kGeluTanh>(form, gate, up, size);
        case Gate::kGelu: return apply_all<N, Gate::kGelu>(form, gate, up, size);
        case Gate::kRelu: return apply_all<N, Gate::kRelu>(form, gate, up, size);
        case Gate::kReluSquared: return apply_all<N, Gate::kReluSquared>(form, gate, up, size);
        case Gate::kClamped: return apply_all<N, Gate::kClamped>(form, gate, up, size);
    }
}

}  // namespace

DEFINE_FOR_WIDTHS(apply_gate, (const GateForm& form, float* gate, const float* up, int64_t size),
                  (form, gate, up, size))

}  // namespace hetero::experts
