// Lays out the weights in the arena and packs them: see model.h.

#include "model.h"

#include "rows.h"

namespace hetero {
namespace {

enum Which : int64_t {
    kEmbedding, kFinalNorm, kHead, kNorm, kQkv, kQkvBias, kOut, kOutBias, kSecondNorm, kGateUp,
    kDown, kQNorm, kKNorm
};

bool take_matrix(Arena& arena, Matrix& matrix, Format format, int64_t outputs, int64_t depth) {
    matrix = {format, outputs, depth, round_up(outputs, kPanel), round_up(depth, kDepth),
              arena.take(packed_bytes(format, outputs, depth)), nullptr, nullptr};
    if (format == Format::kInt8) {
        matrix.scales = (float*)arena.take(matrix.padded_outputs * 4);
        matrix.sums = (int32_t*)arena.take(matrix.padded_outputs * 4);
        if (!matrix.sums) return false;
    }
    return matrix.data != nullptr;
}

int64_t matrix_bytes(Format format, int64_t outputs, int64_t depth) {
    const int64_t more = format == Format::kInt8 ? 8 * round_up(outputs, kPanel) : 0;
    return packed_bytes(format, outputs, depth) + more + 2 * kLine;
}

// Outputs of the interleaved gate and up: whole strips of each, the last ones padded.
int64_t interleaved(const HeteroModel& s) { return 2 * round_up(s.inner, kStrip); }

float* take_floats(Arena& arena, int64_t count) { return (float*)arena.take(count * 4); }

bool take_layer(Model& model, Layer& layer) {
    const HeteroModel& s = model.sizes;
    Arena& arena = model.arena;
    const int64_t qkv = model.all_heads() * s.dim;
    layer.norm = take_floats(arena, s.hidden);
    layer.qkv_bias = take_floats(arena, round_up(qkv, kPanel));
    layer.q_norm = take_floats(arena, s.dim);
    layer.k_norm = take_floats(arena, s.dim);
    bool done = take_matrix(arena, layer.qkv, model.format, qkv, s.hidden);
    layer.out_bias = take_floats(arena, round_up(s.hidden, kPanel));
    done &= take_matrix(arena, layer.out, model.format, s.hidden, s.heads * s.dim);
    layer.second_norm = take_floats(arena, s.hidden);
    done &= take_matrix(arena, layer.gate_up, model.format, interleaved(s), s.hidden);
    layer.down_bias = take_floats(arena, round_up(s.hidden, kPanel));
    done &= take_matrix(arena, layer.down, model.format, s.hidden, s.inner);
    return done && layer.second_norm;
}

void copy_vector(const void* data, int64_t count, bool is_bf16, const float* to) {
    if (is_bf16)
        widen((const uint16_t*)data, count, const_cast<float*>(to), kBase);
    else
        std::memcpy(const_cast<float*>(to), data, count * 4);
}

struct Source {
    const void* data;
    int64_t rows, columns;
    bool is_bf16;
    int64_t part, parts;
};

bool set_vector(const Source& from, int64_t count, const float* to) {
    if (from.rows * from.columns != count) return false;
    if (from.part == 0) copy_vector(from.data, count, from.is_bf16, to);
    return true;
}

bool set_matrix(const Source& from, Matrix& to) {
    if (from.rows != to.outputs || from.columns != to.depth) return false;
    const int64_t panels = to.padded_outputs / kPanel;
    const int64_t first = panels * from.part / from.parts * kPanel;
    const int64_t last = panels * (from.part + 1) / from.parts * kPanel;
    const int64_t end = last < from.rows ? last : from.rows;
    if (first < end) pack(to, from.data, from.is_bf16, from.columns, first, end, first);
    return true;
}

bool set_gate_up(const Source& from, int64_t inner, Matrix& to) {
    if (from.rows != 2 * inner || from.columns != to.depth) return false;
    const int64_t strips = round_up(inner, kStrip) / kStrip;
    const int64_t last = strips * (from.part + 1) / from.parts;
    for (int64_t s = strips * from.part / from.parts; s < last; ++s) {
        const int64_t first = s * kStrip, end = first + kStrip < inner ? first + kStrip : inner;
        pack(to, from.data, from.is_bf16, from.columns, first, end, 2 * first);
        pack(to, from.data, from.is_bf16, from.columns, inner + first, inner + end,
             2 * first + kStrip);
    }
    return true;
}

bool set_embedding(Model& model, const Source& from) {
    const HeteroModel& s = model.sizes;
    if (from.rows != s.vocab || from.columns != s.hidden) return false;
    if (!model.embedding) return true;  // tied: the head has it
    const int64_t bytes = s.hidden * (from.is_bf16 ? 2 : 4);
    const int64_t first = s.vocab * from.part / from.parts;
    const int64_t last = s.vocab * (from.part + 1) / from.parts;
    model.embedding_is_bf16 = from.is_bf16;
    std::memcpy((char*)model.embedding + first * bytes, (const char*)from.data + first * bytes,
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
    for (int64_t k = 0; k < head.depth; ++k) {
        const uint32_t bits = (uint32_t)from[(k / 2 * kPanel + column) * 2 + k % 2] << 16;
        std::memcpy(out + k, &bits, 4);
    }
}

}  // namespace

bool reserve_model(Model& model, const HeteroModel& sizes) {
    model.sizes = sizes;
    model.format = (Format)sizes.weight_format;
    const HeteroModel& s = sizes;
    const int64_t qkv = model.all_heads() * s.dim;
    // Quantized rows of a head are no embedding.
    const bool keeps_rows = !s.tied_head || model.format == Format::kInt8;
    const int64_t vectors = 4 * (4 * s.hidden + round_up(qkv, kPanel) + 2 * s.dim + 2 * kPanel);
    const int64_t layer = matrix_bytes(model.format, qkv, s.hidden) +
                          matrix_bytes(model.format, s.hidden, s.heads * s.dim) +
                          matrix_bytes(model.format, interleaved(s), s.hidden) +
                          matrix_bytes(model.format, s.hidden, s.inner) + vectors + 8 * kLine;
    const int64_t embedding = keeps_rows ? s.vocab * s.hidden * 4 : 0;  // pages unused cost nothing
    if (!model.arena.reserve(embedding + s.layers * layer + s.hidden * 4 + 2 * kLine +
                             matrix_bytes(model.format, s.vocab, s.hidden)))
        return false;
    model.layers.resize(s.layers);
    for (Layer& each : model.layers)
        if (!take_layer(model, each)) return false;
    model.final_norm = take_floats(model.arena, s.hidden);
    if (!take_matrix(model.arena, model.head, model.format, s.vocab, s.hidden)) return false;
    model.embedding = keeps_rows ? model.arena.take(embedding) : nullptr;
    return !keeps_rows || model.embedding;
}

bool set_weight(Model& model, int64_t layer, int64_t which, const void* data, int64_t rows,
                int64_t columns, bool is_bf16, int64_t part, int64_t parts) {
    const Source from{data, rows, columns, is_bf16, part, parts};
    const HeteroModel& s = model.sizes;
    if (which == kEmbedding) return set_embedding(model, from);
    if (which == kFinalNorm) return set_vector(from, s.hidden, model.final_norm);
    if (which == kHead) return set_matrix(from, model.head);
    if (layer < 0 || layer >= s.layers) return false;
    Layer& to = model.layers[layer];
    switch (which) {
        case kNorm: return set_vector(from, s.hidden, to.norm);
        case kQkv: return set_matrix(from, to.qkv);
        case kQkvBias: return set_vector(from, model.all_heads() * s.dim, to.qkv_bias);
        case kOut: return set_matrix(from, to.out);
        case kOutBias: return set_vector(from, s.hidden, to.out_bias);
        case kSecondNorm: return set_vector(from, s.hidden, to.second_norm);
        case kGateUp: return set_gate_up(from, s.inner, to.gate_up);
        case kDown: return set_matrix(from, to.down);
        case kQNorm: return set_vector(from, s.dim, to.q_norm);
        case kKNorm: return set_vector(from, s.dim, to.k_norm);
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
