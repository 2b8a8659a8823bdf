// The phases of a mixture of experts, see mixture.h.

#include "mixture.h"

#include <algorithm>
#include <cmath>

#include "phases.h"

namespace hetero {
namespace {

// Router logits of a step (tokens * experts) up to which every thread chooses the experts of all
// tokens itself. Above it the threads share the tokens, and a barrier follows, which takes longer
// than choosing for so few.
constexpr int64_t kPrivateScores = 512;

bool routes_alone(const Run& r) { return r.tokens * r.m.experts <= kPrivateScores; }

// Whether a row prepared for one matrix serves the other one; both take the same values.
bool same_rows(const Matrix& a, const Matrix& b) {
    if (a.format != b.format) return false;
    const bool scaled = a.groups.zeros == Zeros::kOffsets;
    return !has_groups(a.format) || (a.groups.size == b.groups.size &&
                                     scaled == (b.groups.zeros == Zeros::kOffsets));
}

const Matrix* matrix_of(const Layer& layer, int input) {
    if (input == kRouterInput) return &layer.router;
    if (input == kExpertInput) return &layer.experts[0].gate_up;
    return layer.inner ? &layer.gate_up : nullptr;
}

// Which of the inputs holds the rows of `input`.
int holder(const Layer& layer, int input) {
    int first = 0;
    while (first < input && !same_rows(*matrix_of(layer, first), *matrix_of(layer, input))) ++first;
    return first;
}

Rows tokens_as(const Run& r, const Layer& layer, int input) {
    const int from = holder(layer, input);
    return {r.mixture->inputs[from], row_stride(*matrix_of(layer, input)),
            r.mixture->input_scales[from]};
}

// Norms the calling thread's share of the tokens and prepares them for all products.
void prepare_tokens(const Run& r, const Layer& layer, int thread) {
    const int64_t hidden = r.m.hidden, last = share(r.tokens, thread + 1, r.threads);
    float* normed = tile_of(r, thread);
    for (int64_t t = share(r.tokens, thread, r.threads); t < last; ++t) {
        rms_norm(r.e.x + t * hidden, layer.second_norm, (float)r.m.eps, hidden, normed, r.isa);
        for (int input = 0; input < kMixtureInputs; ++input) {
            const Matrix* matrix = matrix_of(layer, input);
            if (!matrix || holder(layer, input) != input) continue;
            prepare_row(*matrix, normed, r.mixture->inputs[input] + t * row_bytes(*matrix),
                        r.mixture->input_scales[input] + t, r.isa);
        }
    }
}

// The router's logits, by strips and blocks of tokens.
void score_experts(const Run& r, const Layer& layer, int64_t index, int thread) {
    const Mixture& m = *r.mixture;
    const Matrix& router = layer.router;
    const Rows in = tokens_as(r, layer, kRouterInput);
    const int64_t strips = strips_of(router.outputs);
    const int64_t blocks = (r.tokens + kLeastRowBlock - 1) / kLeastRowBlock;
    const int64_t last = share(strips * blocks, thread + 1, r.threads);
    for (int64_t i = share(strips * blocks, thread, r.threads); i < last; ++i) {
        const int64_t row = i / strips * kLeastRowBlock;
        const int64_t rows = std::min(kLeastRowBlock, r.tokens - row);
        const int64_t strip = i % strips;
        float* to = m.logits + row * m.logit_stride;
        multiply(router, from_row(in, row, router.format), rows, strip, 1, to, m.logit_stride,
                 r.isa);
        expand_tile(r, index, kRouterProduct,
                    {to + strip * kStrip, m.logit_stride, row, rows, strip, 1});
    }
}

// What adapters add to the shared expert's gate. All threads call it; it contains barriers if one
// does.
void adapt_shared_gate(const Run& r, const Layer& layer, int64_t index, const Inputs& from,
                       int thread) {
    if (!r.adapters || !adapts(*r.adapters, index, kSharedGateProduct)) return;
    const Mixture& m = *r.mixture;
    shrink_inputs(r, index, kSharedGateProduct, layer.router, tokens_as(r, layer, kRouterInput),
                  from, thread);
    const int64_t last = share(r.tokens, thread + 1, r.threads);
    for (int64_t t = share(r.tokens, thread, r.threads); t < last; ++t) {
        float sums[kStrip] = {};
        expand_tile(r, index, kSharedGateProduct, {sums, kStrip, t, 1, 0, 1});
        m.logits[t * m.logit_stride + r.m.experts] += sums[0];
    }
    r.e.team->barrier(thread);
}

// Experts of tokens [first, last).
void choose(const Run& r, int64_t first, int64_t last, int32_t* ids, float* weights) {
    const int64_t k = r.m.experts_per_token;
    for (int64_t t = first; t < last; ++t)
        route(r.mixture->logits + t * r.mixture->logit_stride, r.m.experts, k,
              r.m.renormalize != 0, ids + t * k, weights + t * k);
}

// Tokens by expert, each thread for itself: of expert e, tokens[starts[e]] .. [starts[e + 1] - 1],
// in ascending order. The shared expert's, all of them, come last.
struct Order {
    int32_t *starts, *tokens;
    float* weights;
};

Order order_tokens(const Run& r, const Layer& layer, const int32_t* ids, const float* id_weights,
                   int thread) {
    Mixture& m = *r.mixture;
    const int64_t experts = r.m.experts, k = r.m.experts_per_token, pairs = r.tokens * k;
    int32_t* starts = m.order + thread * m.order_size;
    const Order to{starts, starts + experts + 2, m.order_weights + thread * m.order_size};
    std::fill(starts, starts + experts + 2, 0);
    for (int64_t i = 0; i < pairs; ++i) ++starts[ids[i] + 2];
    for (int64_t e = 2; e < experts + 2; ++e) starts[e] += starts[e - 1];
    // starts[e + 1] is where expert e's next token goes; in the end, where the next expert begins.
    for (int64_t i = 0; i < pairs; ++i) {
        const int64_t at = starts[ids[i] + 1]++;
        to.tokens[at] = (int32_t)(i / k);
        to.weights[at] = id_weights[i];
    }
    for (int64_t t = 0; layer.inner && t < r.tokens; ++t) {
        const float gate = m.logits[t * m.logit_stride + experts];
        to.tokens[pairs + t] = (int32_t)t;
        to.weights[pairs + t] = 1.0f / (1.0f + std::exp(-gate));
    }
    return to;
}

// Chooses experts and lists the parts of those that have tokens. Contains a barrier unless every
// thread chooses for itself.
std::vector<ExpertPart>& list_parts(const Run& r, const Layer& layer, int thread) {
    Mixture& m = *r.mixture;
    const int64_t k = r.m.experts_per_token, pairs = r.tokens * k;
    const bool alone = routes_alone(r);
    int32_t* ids = m.ids + (alone ? thread * pairs : 0);
    float* weights = m.id_weights + (alone ? thread * pairs : 0);
    if (alone) {
        choose(r, 0, r.tokens, ids, weights);
    } else {
        choose(r, share(r.tokens, thread, r.threads), share(r.tokens, thread + 1, r.threads), ids,
               weights);
        r.e.team->barrier(thread);
    }
    const Order order = order_tokens(r, layer, ids, weights, thread);
    std::vector<ExpertPart>& parts = m.parts[thread];
    parts.clear();
    const int64_t stride = round_up(r.m.expert_inner, kDepth);
    for (int64_t e = 0; e < r.m.experts; ++e) {
        const int64_t first = order.starts[e], rows = order.starts[e + 1] - first;
        const Expert& own = layer.experts[e];
        if (rows)
            parts.push_back({&own.gate_up, &own.down, order.tokens + first, order.weights + first,
                             rows, {}, {}, m.gates + first * stride * 4, stride, e, first});
    }
    if (layer.inner)
        parts.push_back({&layer.gate_up, &layer.down, order.tokens + pairs, order.weights + pairs,
                         r.tokens, {}, {}, r.e.gate, round_up(layer.inner, kDepth), -1, pairs});
    return parts;
}

// Brings each expert's inputs together. A single token's serve all experts as they are; else it
// contains a barrier.
void gather_inputs(const Run& r, const Layer& layer, std::vector<ExpertPart>& parts, int thread) {
    Mixture& m = *r.mixture;
    const Matrix& like = layer.experts[0].gate_up;
    const Rows from = tokens_as(r, layer, kExpertInput);
    const int64_t bytes = row_bytes(like), pairs = r.tokens * r.m.experts_per_token;
    const int32_t* tokens = parts[0].tokens;
    int64_t at = 0;
    for (ExpertPart& part : parts) {
        if (part.gate_up == &layer.gate_up) part.in = tokens_as(r, layer, kSharedInput);
        else if (r.tokens == 1) part.in = from;
        else part.in = {m.pairs + at * bytes, from.stride, m.pair_scales + at};
        at += part.rows;
    }
    if (r.tokens == 1) return;
    const int64_t last = share(pairs, thread + 1, r.threads);
    for (int64_t i = share(pairs, thread, r.threads); i < last; ++i) {
        std::memcpy(m.pairs + i * bytes, (const char*)from.data + tokens[i] * bytes, bytes);
        if (like.format == Format::kInt8) m.pair_scales[i] = from.scales[tokens[i]];
    }
    r.e.team->barrier(thread);
}

ExpertProduct expert_product(const Run& r, int64_t index, const ExpertPart& part, bool down) {
    return {index * r.m.experts + part.expert, down, part.tokens, part.first};
}

// Rows of a run of an expert's pairs in the adapters' format, from the calling thread's scratch.
AdapterRows prepare_pairs(const Run& r, const Layer& layer, const ExpertPart& part, bool down,
                          int64_t begin, int64_t count, int thread) {
    Adapters& s = *r.adapters;
    const int64_t hidden = r.m.hidden;
    const Inputs gates{part.gates, part.down->format == Format::kBf16, part.gate_stride,
                       part.down->depth, nullptr};
    const Inputs from = down ? gates : Inputs{r.e.x, false, hidden, hidden, layer.second_norm};
    char* to = s.pair_rows + thread * kPairsTogether * r.shared_stride * element_bytes(s.format);
    for (int64_t i = 0; i < count; ++i)
        prepare_adapted_row(r, from, down ? begin + i : part.tokens[begin + i], to, i,
                            tile_of(r, thread));
    return {to, round_up(from.size, kDepth), true};
}

// The shrink of all experts' gate and up, or down, whose inputs are ready. All threads call it; it
// ends with a barrier if a token's adapter names experts.
void shrink_experts(const Run& r, const Layer& layer, int64_t index, bool down,
                    const std::vector<ExpertPart>& parts, int thread) {
    if (!r.adapters || !r.adapters->of_experts) return;
    Adapters& s = *r.adapters;
    const int64_t pairs = r.tokens * r.m.experts_per_token;
    const int64_t from = share(pairs, thread, r.threads), to = share(pairs, thread + 1, r.threads);
    for (const ExpertPart& part : parts) {
        if (part.expert < 0) continue;
        const ExpertProduct product = expert_product(r, index, part, down);
        const Matrix& matrix = down ? *part.down : *part.gate_up;
        const Rows& in = down ? part.inner : part.in;
        const int64_t last = std::min(to - part.first, part.rows);
        for (int64_t i = std::max(from - part.first, (int64_t)0), count; i < last; i += count) {
            count = std::min(run_of_pairs(s, product, i, last), kPairsTogether);
            if (!adapts_pair(s, product, i)) continue;
            AdapterRows rows{(const char*)in.data + i * in.stride * element_bytes(s.format),
                             in.stride, true};
            if (matrix.format != s.format)
                rows = prepare_pairs(r, layer, part, down, i, count, thread);
            shrink_pairs(s, product, i, i + count, rows.data, rows.stride, thread, r.isa);
        }
    }
    r.e.team->barrier(thread);
}

void expand_experts(const Run& r, int64_t index, const ExpertPart& part, bool down,
                    const AdaptedTile& tile) {
    if (r.adapters && r.adapters->of_experts)
        expand_pairs(*r.adapters, expert_product(r, index, part, down), tile, r.isa);
}

// gate = act(gate) * up of all parts, in units of a panel (or of a pair of strips, if there are
// few) and a block of an expert's tokens.
void gate_experts(const Run& r, const Layer& layer, int64_t index,
                  const std::vector<ExpertPart>& parts, int thread) {
    int64_t strips = 0, rows = 0;
    for (const ExpertPart& part : parts) {
        strips += strips_of(part.gate_up->outputs);
        rows += part.rows;
    }
    const int64_t unit = strips < 4 * kPerPanel * r.threads ? 2 : kPerPanel;
    const auto units_of = [&](const ExpertPart& part) {  // of a block of tokens
        return (strips_of(part.gate_up->outputs) + unit - 1) / unit;
    };
    const auto count_units = [&](int64_t block) {
        int64_t count = 0;
        for (const ExpertPart& part : parts)
            count += units_of(part) * ((part.rows + block - 1) / block);
        return count;
    };
    // Half of the mean, so that an expert with many tokens has more units than others.
    int64_t block = kRowBlock;
    while (block > kLeastRowBlock && (2 * block * (int64_t)parts.size() > rows ||
                                      count_units(block) < 4 * r.threads))
        block /= 2;
    const int64_t count = count_units(block);
    share_units(r, kPhases * index + kGateUpProduct, count, thread,
                [&](int64_t first, int64_t last) {
        int64_t before = 0;
        for (const ExpertPart& part : parts) {
            const int64_t blocks = (part.rows + block - 1) / block, units = units_of(part) * blocks;
            const Range own{std::max(first - before, (int64_t)0), std::min(last - before, units)};
            before += units;
            const GateRows to{part.gates, part.gate_stride, part.down->depth,
                              part.down->format == Format::kBf16};
            split_units(own, blocks, [&](int64_t from, int64_t end, Range some) {
                const Range block_rows{some.first * block, std::min(some.last * block, part.rows)};
                product(
                    r, *part.gate_up, part.in, block_rows, from * unit,
                    std::min(end * unit, strips_of(part.gate_up->outputs)), tile_of(r, thread),
                    [&](int64_t row, int64_t height, int64_t strip, int64_t width, float* tile,
                        int64_t stride) {
                        const AdaptedTile own{tile, stride, row, height, strip, width};
                        if (part.expert < 0) expand_tile(r, index, kGateUpProduct, own);
                        else expand_experts(r, index, part, false, own);
                        store_gates(r, to, row, height, strip, width, tile, stride);
                    },
                    Always{});
            });
        }
    });
}

// The gates as inputs of down. Integers are quantized first: then it contains a barrier.
void prepare_gates(const Run& r, const Layer& layer, std::vector<ExpertPart>& parts, int thread) {
    Mixture& m = *r.mixture;
    int64_t all = 0;
    const auto quantizes = [](const ExpertPart& part) {
        return part.down->format != Format::kBf16 && part.down->format != Format::kFloat;
    };
    for (ExpertPart& part : parts) {
        part.inner = {part.gates, part.gate_stride, m.pair_scales};
        if (quantizes(part)) all += part.rows;
    }
    if (!all) return;
    // Shares of all rows together: an expert may have one.
    const int64_t first = share(all, thread, r.threads), last = share(all, thread + 1, r.threads);
    int64_t at = 0;
    for (ExpertPart& part : parts) {
        if (!quantizes(part)) continue;
        const Matrix& down = *part.down;
        const bool is_shared = part.down == &layer.down;
        char* to = is_shared ? r.e.shared : m.pairs + at * row_bytes(down);
        float* scales = is_shared ? r.e.shared_scales : m.pair_scales + at;
        const int64_t end = std::min(last - at, part.rows);
        for (int64_t i = std::max(first - at, (int64_t)0); i < end; ++i)
            prepare_row(down, (const float*)part.gates + i * part.gate_stride,
                        to + i * row_bytes(down), scales + i, r.isa);
        part.inner = {to, row_stride(down), scales};
        at += part.rows;
    }
    r.e.team->barrier(thread);
}

// x += weight * down, of all experts in their order. A thread adds all that goes to its columns.
void add_experts(const Run& r, const Layer& layer, int64_t index,
                 const std::vector<ExpertPart>& parts, int thread) {
    const int64_t hidden = r.m.hidden, strips = strips_of(hidden);
    const int64_t finest = r.tokens <= kFewRows ? 1 : 2;
    const int64_t unit = strips < 4 * kPerPanel * r.threads ? finest : kPerPanel;
    share_units(r, kPhases * index + kDownProduct, (strips + unit - 1) / unit, thread,
                [&](int64_t first, int64_t last) {
        for (const ExpertPart& part : parts)
            product(r, *part.down, part.inner, {0, part.rows}, first * unit,
                    std::min(last * unit, strips), tile_of(r, thread),
                    [&](int64_t row, int64_t rows, int64_t strip, int64_t count, float* tile,
                        int64_t stride) {
                        const AdaptedTile own{tile, stride, row, rows, strip, count};
                        if (part.expert < 0) expand_tile(r, index, kDownProduct, own);
                        else expand_experts(r, index, part, true, own);
                        const int64_t column = strip * kStrip;
                        const int64_t size = std::min(count * kStrip, hidden - column);
                        for (int64_t i = row; i < row + rows; ++i, tile += stride)
                            add_scaled(r.e.x + part.tokens[i] * hidden + column, tile,
                                       part.weights[i], size, r.isa);
                    },
                    Always{});
    });
}

}  // namespace

void route(const float* logits, int64_t experts, int64_t k, bool renormalize, int32_t* ids,
           float* weights) {
    float best = logits[0], sum = 0, chosen = 0;
    for (int64_t e = 0; e < experts; ++e) {
        best = logits[e] > best ? logits[e] : best;
        int64_t at = e < k ? e : k;  // its place among the best so far
        while (at > 0 && logits[e] > logits[ids[at - 1]]) --at;
        if (at == k) continue;
        for (int64_t i = e < k ? e : k - 1; i > at; --i) ids[i] = ids[i - 1];
        ids[at] = (int32_t)e;
    }
    for (int64_t e = 0; e < experts; ++e) sum += std::exp(logits[e] - best);
    for (int64_t i = 0; i < k; ++i) {
        weights[i] = std::exp(logits[ids[i]] - best) / sum;
        chosen += weights[i];
    }
    for (int64_t i = 0; renormalize && i < k; ++i) weights[i] /= chosen;
}

void reserve_mixture(Mixture& m, const Run& r) {
    const int64_t pairs = r.tokens * r.m.experts_per_token, row = r.e.widest_row;
    for (int i = 0; i < kMixtureInputs; ++i) {
        m.inputs[i].reserve(r.tokens * row);
        m.input_scales[i].reserve(r.tokens);
    }
    m.logit_stride = round_up(r.m.experts + 1, kStrip);
    m.logits.reserve(r.tokens * m.logit_stride);
    const int64_t copies = routes_alone(r) ? r.threads : 1;
    m.ids.reserve(copies * pairs);
    m.id_weights.reserve(copies * pairs);
    m.order_size = round_up(r.m.experts + 2 + pairs + r.tokens, kLine);
    m.order.reserve(r.threads * m.order_size);
    m.order_weights.reserve(r.threads * m.order_size);
    m.pairs.reserve(pairs * row);
    m.pair_scales.reserve(pairs);
    m.gates.reserve(pairs * round_up(r.m.expert_inner, kDepth) * 4);
    m.parts.resize(r.threads);
}

void run_mixture(const Run& r, const Layer& layer, int64_t index, int thread) {
    if (r.tokens == 0) return;
    Team& team = *r.e.team;
    const int64_t hidden = r.m.hidden;
    const Inputs normed{r.e.x, false, hidden, hidden, layer.second_norm};
    prepare_tokens(r, layer, thread);
    team.barrier(thread);
    shrink_inputs(r, index, kRouterProduct, layer.router, tokens_as(r, layer, kRouterInput), normed,
                  thread);
    score_experts(r, layer, index, thread);
    team.barrier(thread);
    adapt_shared_gate(r, layer, index, normed, thread);
    std::vector<ExpertPart>& parts = list_parts(r, layer, thread);
    gather_inputs(r, layer, parts, thread);
    if (layer.inner)
        shrink_inputs(r, index, kGateUpProduct, layer.gate_up, tokens_as(r, layer, kSharedInput),
                      normed, thread);
    shrink_experts(r, layer, index, false, parts, thread);
    gate_experts(r, layer, index, parts, thread);
    team.barrier(thread);
    prepare_gates(r, layer, parts, thread);
    shrink_experts(r, layer, index, true, parts, thread);
    if (layer.inner) {
        const Inputs gates{r.e.gate, layer.down.format == Format::kBf16, layer.down.padded_depth,
                           layer.inner, nullptr};
        shrink_inputs(r, index, kDownProduct, layer.down, parts.back().inner, gates, thread);
    }
    add_experts(r, layer, index, parts, thread);
}

}  // namespace hetero

// For tests.
extern "C" {

void hetero_mixture_route(const float* logits, int64_t rows, int64_t experts, int64_t k,
                          int64_t renormalize, int32_t* ids, float* weights) {
    for (int64_t r = 0; r < rows; ++r)
        hetero::route(logits + r * experts, experts, k, renormalize != 0, ids + r * k,
                      weights + r * k);
}

}  // extern "C"
