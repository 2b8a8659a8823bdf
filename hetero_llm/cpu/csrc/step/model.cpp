// Lays out the weights in the arena and packs them: see model.h.

#include "model.h"

#include "rows.h"

namespace hetero {
namespace {

enum Which : int64_t {
    kEmbedding, kFinalNorm, kHead, kNorm, kQkv, kQkvBias, kOut, kOutBias, kSecondNorm, kGateUp,
    kDown, kQNorm, kKNorm, kRouter, kSharedGate, kExpertGateUp, kExpertDown
};

// Of a layer: qkv, output, gate and up, down, router, the experts' gate and up, their down.
constexpr int64_t kLayerForms = 7;

void take_matrix(Arena& arena, Matrix& matrix, const Form& form, int64_t outputs, int64_t depth) {
    matrix = {form.format, outputs, depth, round_up(outputs, kPanel), round_up(depth, kDepth),
              arena.take<char>(packed_bytes(form, outputs, depth)), nullptr, nullptr, form.groups};
    if (form.format != Format::kInt8) return;
    matrix.scales = arena.take<float>(matrix.padded_outputs);
    matrix.sums = arena.take<int32_t>(matrix.padded_outputs);
}

// Outputs of the interleaved gate and up: whole strips of each, the last ones padded.
int64_t interleaved(int64_t inner) { return 2 * round_up(inner, kStrip); }

bool is_sparse(const HeteroModel& s, int64_t layer) { return s.sparse && s.sparse[layer]; }

// Of a layer's `gate_up` and `down`.
int64_t inner_of(const HeteroModel& s, int64_t layer) {
    return is_sparse(s, layer) ? s.shared_inner : s.inner;
}

int64_t router_outputs(const HeteroModel& s) { return s.experts + (s.shared_inner ? 1 : 0); }

void take_experts(Model& model, Layer& layer, const Form* forms) {
    const HeteroModel& s = model.sizes;
    Arena& arena = model.arena;
    take_matrix(arena, layer.router, forms[4], router_outputs(s), s.hidden);
    layer.experts.resize(s.experts);
    // Gate and up of all experts, then down of all: a step reads them in this order.
    for (Expert& expert : layer.experts)
        take_matrix(arena, expert.gate_up, forms[5], interleaved(s.expert_inner), s.hidden);
    for (Expert& expert : layer.experts)
        take_matrix(arena, expert.down, forms[6], s.hidden, s.expert_inner);
}

// forms: kLayerForms.
void take_layer(Model& model, int64_t index, const Form* forms) {
    const HeteroModel& s = model.sizes;
    Layer& layer = model.layers[index];
    Arena& arena = model.arena;
    const int64_t qkv = model.all_heads() * s.dim;
    layer.inner = inner_of(s, index);
    layer.norm = arena.take<float>(s.hidden);
    layer.qkv_bias = arena.take<float>(round_up(qkv, kPanel));
    layer.q_norm = arena.take<float>(s.dim);
    layer.k_norm = arena.take<float>(s.dim);
    take_matrix(arena, layer.qkv, forms[0], qkv, s.hidden);
    layer.out_bias = arena.take<float>(round_up(s.hidden, kPanel));
    take_matrix(arena, layer.out, forms[1], s.hidden, s.heads * s.dim);
    layer.second_norm = arena.take<float>(s.hidden);
    if (is_sparse(s, index)) take_experts(model, layer, forms);
    layer.down_bias = arena.take<float>(round_up(s.hidden, kPanel));
    if (layer.inner) {
        take_matrix(arena, layer.gate_up, forms[2], interleaved(layer.inner), s.hidden);
        take_matrix(arena, layer.down, forms[3], s.hidden, layer.inner);
    }
}

void take_model(Model& model, const Form* forms) {
    const HeteroModel& s = model.sizes;
    for (int64_t i = 0; i < s.layers; ++i) take_layer(model, i, forms + kLayerForms * i);
    model.final_norm = model.arena.take<float>(s.hidden);
    const Form& head = forms[kLayerForms * s.layers];
    take_matrix(model.arena, model.head, head, s.vocab, s.hidden);
    // Quantized rows of a head are no embedding.
    const bool is_quantized = head.format == Format::kInt8 || has_groups(head.format);
    if (!s.tied_head || is_quantized) model.embedding = model.arena.take<float>(s.vocab * s.hidden);
}

struct Source {
    const GivenWeight& weight;
    int64_t part, parts;
};

// Packs rows [first, last) of a weight to the places of outputs from `to`.
void pack_rows(const Source& from, int64_t first, int64_t last, int64_t to, Matrix& matrix) {
    const GivenWeight& weight = from.weight;
    if (weight.quantized) pack_quantized(matrix, *weight.quantized, first, last, to);
    else pack(matrix, weight.data, weight.is_bf16, weight.columns, first, last, to);
}

bool fits(const Source& from, int64_t rows, const Matrix& to) {
    const bool keeps = from.weight.quantized != nullptr;
    const bool format_fits = keeps ? to.format == Format::kInt8 || has_groups(to.format)
                                   : to.format != Format::kInt8Groups;
    return format_fits && from.weight.rows == rows && from.weight.columns == to.depth;
}

bool set_vector(const Source& from, int64_t count, const float* to) {
    const GivenWeight& weight = from.weight;
    if (weight.quantized || weight.rows * weight.columns != count) return false;
    if (from.part != 0) return true;
    float* values = const_cast<float*>(to);
    if (weight.is_bf16) widen((const uint16_t*)weight.data, count, values, kBase);
    else std::memcpy(values, weight.data, count * 4);
    return true;
}

bool set_matrix(const Source& from, Matrix& to) {
    if (!fits(from, to.outputs, to)) return false;
    const int64_t panels = to.padded_outputs / kPanel;
    const int64_t first = panels * from.part / from.parts * kPanel;
    const int64_t end = least(panels * (from.part + 1) / from.parts * kPanel, to.outputs);
    if (first < end) pack_rows(from, first, end, first, to);
    return true;
}

bool set_gate_up(const Source& from, int64_t inner, Matrix& to) {
    if (!fits(from, 2 * inner, to)) return false;
    const int64_t strips = strips_of(inner);
    const int64_t last = strips * (from.part + 1) / from.parts;
    for (int64_t s = strips * from.part / from.parts; s < last; ++s) {
        const int64_t first = s * kStrip, end = least(first + kStrip, inner);
        pack_rows(from, first, end, 2 * first, to);
        pack_rows(from, inner + first, inner + end, 2 * first + kStrip, to);
    }
    return true;
}

// The first `rows` outputs of the router from `to` on.
bool set_router(const Source& from, int64_t rows, int64_t to, Matrix& router) {
    if (!fits(from, rows, router) || from.weight.quantized) return false;
    if (from.part == 0) pack_rows(from, 0, rows, to, router);
    return true;
}

bool set_embedding(Model& model, const Source& from) {
    const HeteroModel& s = model.sizes;
    const GivenWeight& weight = from.weight;
    if (weight.quantized || weight.rows != s.vocab || weight.columns != s.hidden) return false;
    if (!model.embedding) return true;  // tied: the head has it
    const int64_t bytes = s.hidden * (weight.is_bf16 ? 2 : 4);
    const int64_t first = s.vocab * from.part / from.parts;
    const int64_t last = s.vocab * (from.part + 1) / from.parts;
    model.embedding_is_bf16 = weight.is_bf16;
    std::memcpy((char*)model.embedding + first * bytes, (const char*)weight.data + first * bytes,
                (last - first) * bytes);
    return true;
}

// Row `token` out of the packed head: 4 bytes of each step of a panel.
void embed_from_head(const Matrix& head, int64_t token, float* out) {
    const int64_t panel = token / kPanel, column = token % kPanel;
    if (head.format == Format::kFloat) {
        const float* from = (const float*)head.data + panel * kPanel * head.padded_depth + column;
        for (int64_t k = 0; k < head.depth; ++k) out[k] = from[k * kPanel];
        return;
    }
    const uint16_t* from = (const uint16_t*)head.data + panel * kPanel * head.padded_depth;
    for (int64_t k = 0; k < head.depth; ++k)
        out[k] = bf16_to_float(from[(k / 2 * kPanel + column) * 2 + k % 2]);
}

}  // namespace

bool reserve_model(Model& model, const HeteroModel& sizes, const Form* forms) {
    model.sizes = sizes;
    model.layers.resize(sizes.layers);
    take_model(model, forms);  // counts
    if (!model.arena.reserve()) return false;
    take_model(model, forms);
    model.sizes.sparse = nullptr;  // the caller's
    return true;
}

bool set_weight(Model& model, const WeightPlace& place, const GivenWeight& weight, int64_t part,
                int64_t parts) {
    const Source from{weight, part, parts};
    const HeteroModel& s = model.sizes;
    if (place.which == kEmbedding) return set_embedding(model, from);
    if (place.which == kFinalNorm) return set_vector(from, s.hidden, model.final_norm);
    if (place.which == kHead) return set_matrix(from, model.head);
    if (place.layer < 0 || place.layer >= s.layers) return false;
    Layer& to = model.layers[place.layer];
    const bool has_mlp = to.inner > 0, has_experts = !to.experts.empty();
    switch (place.which) {
        case kNorm: return set_vector(from, s.hidden, to.norm);
        case kQkv: return set_matrix(from, to.qkv);
        case kQkvBias: return set_vector(from, model.all_heads() * s.dim, to.qkv_bias);
        case kOut: return set_matrix(from, to.out);
        case kOutBias: return set_vector(from, s.hidden, to.out_bias);
        case kSecondNorm: return set_vector(from, s.hidden, to.second_norm);
        case kGateUp: return has_mlp && set_gate_up(from, to.inner, to.gate_up);
        case kDown: return has_mlp && set_matrix(from, to.down);
        case kQNorm: return set_vector(from, s.dim, to.q_norm);
        case kKNorm: return set_vector(from, s.dim, to.k_norm);
        case kRouter: return has_experts && set_router(from, s.experts, 0, to.router);
        case kSharedGate:
            return has_experts && has_mlp && set_router(from, 1, s.experts, to.router);
        default: break;
    }
    if (place.expert < 0 || place.expert >= (int64_t)to.experts.size()) return false;
    Expert& expert = to.experts[place.expert];
    switch (place.which) {
        case kExpertGateUp: return set_gate_up(from, s.expert_inner, expert.gate_up);
        case kExpertDown: return set_matrix(from, expert.down);
        default: return false;
    }
}

void embed(const Model& model, int64_t token, float* out, Isa isa) {
    const int64_t hidden = model.sizes.hidden;
    if (!model.embedding)
        embed_from_head(model.head, token, out);
    else if (model.embedding_is_bf16)
        widen((const uint16_t*)model.embedding + token * hidden, hidden, out, isa);
    else
        std::memcpy(out, (const float*)model.embedding + token * hidden, hidden * 4);
}

}  // namespace hetero
