// What experts have between their two products.

#pragma once

#include <cstdint>

#include "../step/isa.h"

namespace hetero::experts {

// As `models.layers.Activation` names them; kClamped: (up + 1) * gate * sigmoid(alpha * gate), with
// gates of at most `limit` and ups within it on both sides.
enum class Gate : int64_t { kSilu, kGeluTanh, kGelu, kRelu, kReluSquared, kClamped };

struct GateForm {
    Gate gate;
    double alpha, limit;  // of kClamped
};

// gate[i] = activation(gate[i]) * up[i] for `size` values; NaN stays NaN.
void apply_gate(const GateForm& form, float* gate, const float* up, int64_t size, Isa isa);

}  // namespace hetero::experts
