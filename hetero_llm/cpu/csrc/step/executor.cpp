// The whole step of a Llama-shaped decoder in one parallel region: C ABI in executor.h.
//
// Threads share a phase by outputs (strips of the weight matrix), so each part of the weights is
// read once; between phases there is a barrier. Most of a phase is divided evenly, the rest in
// units that the next free thread takes: cores that a virtual machine grants are not equally fast.
// On several NUMA nodes each node's threads are a pool that has the outputs whose weights it
// packed, so weights are read from the node's own memory; results are the same to the bit, as every
// output is one thread's.
// A thread's outputs leave registers for a small tile and go from there to where the next phase
// reads them: rotated into queries and the KV cache, added to the residual, gated. The residual is
// float; inputs of a product are rounded to its weights' format.
//
// A token is one row of every product. With few rows every thread norms and rounds a product's
// input for itself, which is cheaper than a barrier; many rows are divided among the threads.

#include "executor.h"

#include <algorithm>
#include <cmath>
#include <new>

#include "phases.h"

namespace hetero {
namespace {

constexpr int64_t kSpin = 2000;  // microseconds between steps before threads sleep
// The most samples whose candidates the caller merges alone, which takes less time than a barrier.
constexpr int64_t kMergedAlone = 2;

// Modes of a sample, see executor.h.
enum : uint8_t { kGreedy = 0, kNoisySample = 1, kNone = 2, kCandidates = 3 };

// -- queries, keys, values ------------------------------------------------------------------------

// kind: 0 K, 1 V.
void* cache_place(const Run& r, int64_t layer, int64_t token, int64_t kind, int64_t head) {
    const CacheShape& c = r.e.cache;
    const int64_t slot = r.step.slot_mapping[token];
    const int64_t at = ((slot / c.block_size * c.layers + layer) * 2 + kind) * c.block_size +
                       slot % c.block_size;
    return (char*)c.data + (at * c.kv_heads + head) * c.dim * (c.is_bf16 ? 2 : 4);
}

void put(const Run& r, const float* from, void* to) {
    if (r.e.cache.is_bf16)
        narrow(from, r.m.dim, (uint16_t*)to, r.isa);
    else
        std::memcpy(to, from, r.m.dim * 4);
}

// One head of one token as the product left it: adds the bias, norms and rotates it, and stores it.
void place_head(const Run& r, const Layer& layer, int64_t index, int64_t token, int64_t head,
                float* values) {
    const HeteroModel& m = r.m;
    add(values, layer.qkv_bias + head * m.dim, m.dim, r.isa);
    const bool query = head < m.heads, key = !query && head < m.heads + m.kv_heads;
    const int64_t bytes = m.dim * (r.e.cache.is_bf16 ? 2 : 4);
    if (m.qk_norm && (query || key))
        rms_norm(values, query ? layer.q_norm : layer.k_norm, (float)m.eps, m.dim, values, r.isa);
    if (query || key)
        rotate(values, r.e.rotary.data() + r.step.positions[token] * m.rotary_dim, m.rotary_dim,
               r.isa);
    if (query)
        put(r, values, r.e.queries + (token * m.heads + head) * bytes);
    else if (key)
        put(r, values, cache_place(r, index, token, 0, head - m.heads));
    else
        put(r, values, cache_place(r, index, token, 1, head - m.heads - m.kv_heads));
}

// Threads share whole heads, or pairs of heads where a head is not a whole number of strips.
void project_heads(const Run& r, const Layer& layer, int64_t index, const Rows& in, int thread) {
    const int64_t heads = r.e.model.all_heads(), dim = r.m.dim;
    const int64_t together = dim % kStrip ? 2 : 1, width = together * dim;
    const int64_t units = (heads + together - 1) / together;
    const int64_t strips = width / kStrip, phase = kPhases * index + kQkvProduct;
    const int64_t block = row_block(r, r.tokens, units), blocks = (r.tokens + block - 1) / block;
    float* tile = tile_of(r, thread);
    const auto project = [&](int64_t unit, int64_t row) {
        const int64_t count = least(r.tokens - row, block);
        const Rows rows = from_row(in, row, layer.qkv.format);
        multiply_to_tile(r, layer.qkv, rows, count, unit * strips, strips, tile, width);
        expand_tile(r, index, kQkvProduct, {tile, width, row, count, unit * strips, strips});
        for (int64_t i = 0; i < count; ++i)
            for (int64_t h = 0; h < together && unit * together + h < heads; ++h)
                place_head(r, layer, index, row + i, unit * together + h,
                           tile + i * width + h * dim);
    };
    share_units(r, phase, units * blocks, thread, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) project(i / blocks, i % blocks * block);
    });
}

// -- one layer ------------------------------------------------------------------------------------

// x += a product with `matrix` + bias.
void add_product(const Run& r, int64_t index, Product product, const Matrix& matrix,
                 const float* bias, const Rows& in, int thread) {
    const int64_t hidden = r.m.hidden;
    const auto add_tile = [&](int64_t row, int64_t rows, int64_t strip, int64_t count, float* tile,
                              int64_t stride) {
        const int64_t first = strip * kStrip;
        const int64_t size = least(count * kStrip, hidden - first);
        expand_tile(r, index, product, {tile, stride, row, rows, strip, count});
        add_block(r.e.x + row * hidden + first, hidden, {tile, stride, rows, size}, bias + first,
                  r.isa);
    };
    share_product(r, kPhases * index + product, matrix, in, r.tokens, strips_of(hidden), 1, thread,
                  add_tile);
}

// gate = act(gate) * up; strips of both take turns in the weights.
void gate_product(const Run& r, const Layer& layer, int64_t index, const Rows& in, int thread) {
    const GateRows to{r.e.gate, layer.down.padded_depth, layer.inner,
                      layer.down.format == Format::kBf16};
    const auto gate_tile = [&](int64_t row, int64_t rows, int64_t strip, int64_t count,
                               float* tile, int64_t stride) {
        expand_tile(r, index, kGateUpProduct, {tile, stride, row, rows, strip, count});
        store_gates(r, to, row, rows, strip, count, tile, stride);
    };
    share_product(r, kPhases * index + kGateUpProduct, layer.gate_up, in, r.tokens,
                  strips_of(layer.gate_up.outputs), 2, thread, gate_tile);
}

// The output of `gate_product` as the next product's input. With few rows every thread makes a
// copy, which is faster than fetching pieces of it in the middle of a product.
Rows gated_rows(const Run& r, const Matrix& matrix, int thread) {
    const int64_t stride = matrix.padded_depth;
    if (matrix.format != Format::kBf16 && matrix.format != Format::kFloat)
        return prepare(r, (const float*)(char*)r.e.gate, stride, r.tokens, matrix.depth, nullptr,
                       matrix, thread);
    if (r.tokens * stride > kPrivateElements) return {r.e.gate, stride, nullptr};
    const int64_t bytes = element_bytes(matrix.format);
    char* own = r.e.privates + thread * kPrivateBytes;
    std::memcpy(own, r.e.gate, r.tokens * stride * bytes);
    return {own, stride, nullptr};
}

// The gated MLP of every token.
void run_mlp(const Run& r, const Layer& layer, int64_t index, int thread) {
    const int64_t hidden = r.m.hidden;
    const Rows in =
        prepare(r, r.e.x, hidden, r.tokens, hidden, layer.second_norm, layer.gate_up, thread);
    shrink_inputs(r, index, kGateUpProduct, layer.gate_up, in,
                  {r.e.x, false, hidden, hidden, layer.second_norm}, thread);
    gate_product(r, layer, index, in, thread);
    r.e.team->barrier(thread);
    const Rows inner = gated_rows(r, layer.down, thread);
    shrink_inputs(r, index, kDownProduct, layer.down, inner,
                  {r.e.gate, layer.down.format == Format::kBf16, layer.down.padded_depth,
                   layer.inner, nullptr},
                  thread);
    add_product(r, index, kDownProduct, layer.down, layer.down_bias, inner, thread);
}

void run_layer(const Run& r, int64_t index, int thread) {
    const Layer& layer = r.e.model.layers[index];
    Team& team = *r.e.team;
    AttentionPlan* plan = r.e.plans[r.e.window_of[index]];
    const HeteroModel& m = r.m;
    if (thread == 0) begin_layer(plan);  // the last layer's attention has ended on all threads
    const Rows in = prepare(r, r.e.x, m.hidden, r.tokens, m.hidden, layer.norm, layer.qkv, thread);
    shrink_inputs(r, index, kQkvProduct, layer.qkv, in,
                  {r.e.x, false, m.hidden, m.hidden, layer.norm}, thread);
    project_heads(r, layer, index, in, thread);
    team.barrier(thread);
    attend(plan, index, r.e.queries, r.head_width, r.e.attended, r.head_width, thread);
    team.barrier(thread);
    if (needs_merge(plan)) {
        merge(plan, r.e.attended, r.head_width, thread);
        team.barrier(thread);
    }
    const Rows heads =
        prepare(r, r.e.attended, r.head_width, r.tokens, r.head_width, nullptr, layer.out, thread);
    shrink_inputs(r, index, kOutProduct, layer.out, heads,
                  {r.e.attended, false, r.head_width, r.head_width, nullptr}, thread);
    add_product(r, index, kOutProduct, layer.out, layer.out_bias, heads, thread);
    team.barrier(thread);
    if (layer.experts.empty()) run_mlp(r, layer, index, thread);
    else run_mixture(r, layer, index, thread);
    team.barrier(thread);
}

// -- begin and end --------------------------------------------------------------------------------

void embed_tokens(const Run& r, int thread) {
    const int64_t last = share(r.tokens, thread + 1, r.threads);
    for (int64_t token = share(r.tokens, thread, r.threads); token < last; ++token)
        embed(r.e.model, r.step.token_ids[token], r.e.x + token * r.m.hidden, r.isa);
}

// The final norm of all tokens, if the caller wants them, and copies of those that samples follow,
// as the head's input.
void finish_tokens(const Run& r, int thread) {
    const int64_t hidden = r.m.hidden;
    if (r.step.hidden) {
        const int64_t last = share(r.tokens, thread + 1, r.threads);
        for (int64_t token = share(r.tokens, thread, r.threads); token < last; ++token)
            rms_norm(r.e.x + token * hidden, r.e.model.final_norm, (float)r.m.eps, hidden,
                     r.step.hidden + token * hidden, r.isa);
    }
    const int64_t last = share(r.step.num_samples, thread + 1, r.threads);
    for (int64_t i = share(r.step.num_samples, thread, r.threads); i < last; ++i)
        std::memcpy(r.e.final_rows + i * hidden, r.e.x + r.step.sampled_after[i] * hidden,
                    hidden * 4);
}

// The token mask of a sample, null if it has none.
const uint32_t* mask_of(const HeteroStep& s, int64_t sample) {
    if (!s.mask_rows || s.mask_rows[sample] < 0) return nullptr;
    return s.masks + s.mask_rows[sample] * s.mask_words;
}

// Whether the scores of tokens first .. first + size - 1 change what is sampled for `rows` samples.
bool head_wanted(const HeteroStep& s, int64_t row, int64_t rows, int64_t first, int64_t size) {
    if (s.logits || !s.mask_rows) return true;
    for (int64_t i = row; i < row + rows; ++i) {
        const uint32_t* mask = mask_of(s, i);
        if (!mask || allows_any(mask, first, size)) return true;
    }
    return false;
}

// `scores` may be overwritten.
void pick(const Run& r, int64_t sample, float* scores, int64_t size, int64_t first, Best& best,
          Candidates* found) {
    const HeteroStep& s = r.step;
    const uint8_t mode = s.modes[sample];
    if (mode == kNone) return;
    if (const uint32_t* mask = mask_of(s, sample)) {
        if (!allows_any(mask, first, size)) return;
        forbid(scores, size, first, mask, r.isa);
    }
    if (mode == kGreedy) {
        pick_greedy(scores, size, first, &best.score, &best.token, r.isa);
        return;
    }
    const Noise noise{s.temperatures[sample], s.seeds[sample], (uint32_t)s.sample_positions[sample],
                      (uint32_t)s.sample_indices[sample]};
    if (mode == kNoisySample)
        pick_noisy(scores, size, first, noise, &best.score, &best.token, r.isa);
    else
        add_candidates(scores, size, first, noise.temperature > 0 ? &noise : nullptr,
                       s.num_candidates, *found, r.isa);
}

void run_head(const Run& r, int thread) {
    const HeteroStep& s = r.step;
    const int64_t vocab = r.m.vocab;
    Best* best = r.e.best + thread * s.num_samples;
    for (int64_t i = 0; i < s.num_samples; ++i) best[i] = {-INFINITY, -1};
    Candidates* found = r.found ? r.found + thread * s.num_samples : nullptr;
    for (int64_t i = 0; found && i < s.num_samples; ++i) begin_candidates(found[i]);
    const Rows in = prepare(r, r.e.final_rows, r.m.hidden, s.num_samples, r.m.hidden,
                            r.e.model.final_norm, r.e.model.head, thread);
    const auto tokens_of = [&](int64_t strip, int64_t count) {
        return least(count * kStrip, vocab - strip * kStrip);
    };
    const auto pick_tile = [&](int64_t row, int64_t rows, int64_t strip, int64_t count,
                               float* tile, int64_t stride) {
        const int64_t first = strip * kStrip, size = tokens_of(strip, count);
        for (int64_t i = 0; i < rows; ++i) {
            float* scores = tile + i * stride;
            if (s.logits) std::memcpy(s.logits + (row + i) * vocab + first, scores, size * 4);
            pick(r, row + i, scores, size, first, best[row + i], found ? found + row + i : nullptr);
        }
    };
    const auto wanted = [&](int64_t row, int64_t rows, int64_t strip, int64_t count) {
        return head_wanted(s, row, rows, strip * kStrip, tokens_of(strip, count));
    };
    share_product(r, kPhases * r.m.layers, r.e.model.head, in, s.num_samples, strips_of(vocab),
                  1, thread, pick_tile, wanted);
}

// The best of all threads; of equal scores the lowest token.
void choose_tokens(const Run& r) {
    for (int64_t i = 0; i < r.step.num_samples; ++i) {
        if (r.step.modes[i] != kGreedy && r.step.modes[i] != kNoisySample) continue;
        Best chosen = r.e.best[i];
        for (int t = 1; t < r.threads; ++t) {
            const Best& other = r.e.best[t * r.step.num_samples + i];
            if (other.token >= 0 &&
                (chosen.token < 0 || other.score > chosen.score ||
                 (other.score == chosen.score && other.token < chosen.token)))
                chosen = other;
        }
        r.step.sampled[i] = chosen.token < 0 ? 0 : chosen.token;  // its mask allows no token
    }
}

void merge_found(const Run& r, int64_t first, int64_t last) {
    const HeteroStep& s = r.step;
    for (int64_t i = first; i < last; ++i)
        if (s.modes[i] == kCandidates)
            merge_candidates(r.found + i, r.threads, s.num_samples, s.num_candidates,
                             s.candidates + i * s.num_candidates,
                             s.log_probs + i * s.num_candidates);
}

void run_thread(const Run& r, int thread) {
    embed_tokens(r, thread);
    r.e.team->barrier(thread);
    for (int64_t layer = 0; layer < r.m.layers; ++layer) run_layer(r, layer, thread);
    finish_tokens(r, thread);
    if (r.step.num_samples) {
        r.e.team->barrier(thread);
        run_head(r, thread);
    }
    if (r.found && r.step.num_samples > kMergedAlone) {
        r.e.team->barrier(thread);
        merge_found(r, share(r.step.num_samples, thread, r.threads),
                    share(r.step.num_samples, thread + 1, r.threads));
    }
    release_tiles();
}

// Attention plans and pools of the team's threads, which are fewer than asked for if the system
// refused some.
void arrange_threads(Executor& e) {
    e.team->revive();
    const int threads = e.team->size();
    if ((int)e.pool_of.size() == threads) return;
    e.plans.resize(e.windows.size());
    for (AttentionPlan*& plan : e.plans) {
        free_attention_plan(plan);
        plan = new_attention_plan(threads);
    }
    e.pool_of.assign(e.nodes.begin(), e.nodes.begin() + threads);
    e.pools.clear();
    for (int i = 0; i < threads; ++i) {
        if (i == 0 || e.pool_of[i] != e.pool_of[i - 1]) e.pools.push_back({i, i});
        ++e.pools.back().last;
        e.pool_of[i] = (int)e.pools.size() - 1;
    }
    e.rests.reset(new Rest[2 * e.pools.size()]);
}

Run make_run(Executor& e, const HeteroStep& step) {
    const HeteroModel& m = e.model.sizes;
    const int64_t head_width = m.heads * m.dim;
    Run r{e, m, step, e.isa, e.team->size(), step.num_tokens, head_width, 0, 0, 1};
    const int64_t inner = e.model.widest_inner();
    r.shared_stride = round_up(most(inner, most(m.hidden, head_width)), kDepth);
    const int64_t samples = step.num_samples, threads = r.threads, rows = most(r.tokens, samples);
    if (rows > kFewRows) r.panels = kPanelsTogether;
    const int64_t across = most(2 * m.dim, r.panels * kPanel);
    // At least a normed row.
    r.tile_size = most(round_up(least(rows, kRowBlock) * across, kPanel), r.shared_stride);
    const int64_t chosen = e.model.sizes.experts ? e.model.sizes.experts_per_token : 0;
    if (plan_adapters(e.adapters, step, r.threads, r.shared_stride, chosen))
        r.adapters = &e.adapters;
    e.x.reserve(r.tokens * m.hidden);
    e.attended.reserve(r.tokens * head_width);
    e.gate.reserve(r.tokens * round_up(inner, kDepth) * 4);
    e.queries.reserve(r.tokens * head_width * (e.cache.is_bf16 ? 2 : 4));
    e.shared.reserve(rows * e.widest_row);
    e.shared_scales.reserve(rows);
    e.privates.reserve(threads * kPrivateBytes);
    e.private_scales.reserve(threads * kPrivateRows);
    e.tiles.reserve(threads * r.tile_size);
    e.best.reserve(threads * samples);
    if (step.num_candidates) r.found = e.found.reserve(threads * samples);
    e.final_rows.reserve(samples * m.hidden);
    if (m.experts) {
        r.mixture = &e.mixture;
        reserve_mixture(e.mixture, r);
    }
    return r;
}

void plan_step(Executor& e, const HeteroStep& s) {
    const AttentionTokens tokens{s.num_sequences, s.num_tokens,    s.request_slots, s.num_computed,
                                 s.num_scheduled, s.bases,         s.is_tree,       s.ancestors,
                                 s.block_tables,  s.columns};
    for (size_t i = 0; i < e.plans.size(); ++i)
        plan_attention(e.plans[i], e.cache, tokens, e.model.sizes.heads, e.windows[i],
                       (float)e.model.sizes.attention_scale, e.isa);
}

int64_t widest_row(const Model& model) {
    int64_t widest = 0;
    const auto see = [&](const Matrix& matrix) { widest = most(widest, row_bytes(matrix)); };
    see(model.head);
    for (const Layer& layer : model.layers) {
        for (const Matrix* each : {&layer.qkv, &layer.out}) see(*each);
        if (layer.inner)
            for (const Matrix* each : {&layer.gate_up, &layer.down}) see(*each);
        if (layer.experts.empty()) continue;
        // All experts of a layer have the same form.
        const Expert& expert = layer.experts[0];
        for (const Matrix* each : {&layer.router, &expert.gate_up, &expert.down}) see(*each);
    }
    return widest;
}

int64_t set(Executor& e, const WeightPlace& place, const GivenWeight& weight) {
    bool fits = false;
    e.team->run([&](int thread) {
        const bool part_fits = set_weight(e.model, place, weight, thread, e.team->size());
        if (thread == 0) fits = part_fits;
    });
    return fits ? 0 : -1;
}

}  // namespace
}  // namespace hetero

extern "C" {

HeteroExecutor* hetero_executor_new(const HeteroModel* model, const hetero::Form* forms,
                                    void* cache, int64_t block_size, const int64_t* windows,
                                    const float* rotary, int64_t threads, const int32_t* cpus,
                                    const int32_t* pools, int64_t isa) {
    using namespace hetero;
    Executor* e = new (std::nothrow) Executor;
    if (!e) return nullptr;
    if (!reserve_model(e->model, *model, forms)) {
        delete e;
        return nullptr;
    }
    e->widest_row = widest_row(e->model);
    e->isa = isa < 0 ? best_isa() : (Isa)isa;
    e->cache = {cache, model->cache_is_bf16 != 0, model->layers, block_size, model->kv_heads,
                model->dim};
    e->rotary.assign(rotary, rotary + model->max_positions * model->rotary_dim);
    for (int64_t layer = 0; layer < model->layers; ++layer) {
        const auto found = std::find(e->windows.begin(), e->windows.end(), windows[layer]);
        e->window_of.push_back((int)(found - e->windows.begin()));
        if (found == e->windows.end()) e->windows.push_back(windows[layer]);
    }
    e->nodes.assign((size_t)threads, 0);
    if (pools) e->nodes.assign(pools, pools + threads);
    e->team = new Team((int)threads, cpus, kSpin);
    return e;
}

void hetero_executor_free(HeteroExecutor* executor) { delete executor; }

int64_t hetero_executor_slept(HeteroExecutor* executor) { return executor->team->slept_ns(); }

int64_t hetero_executor_set(HeteroExecutor* executor, int64_t layer, int64_t which,
                            int64_t expert, const void* data, int64_t rows, int64_t columns,
                            int64_t dtype) {
    return hetero::set(*executor, {layer, which, expert},
                       {data, rows, columns, dtype == 0, nullptr});
}

int64_t hetero_executor_set_quantized(HeteroExecutor* executor, int64_t layer, int64_t which,
                                      int64_t expert, const HeteroQuantized* weight) {
    return hetero::set(*executor, {layer, which, expert},
                       {nullptr, weight->rows, weight->columns, false, &weight->tensors});
}

void hetero_executor_make_slots(HeteroExecutor* executor, int64_t slots, int64_t dtype) {
    using hetero::Format;
    make_slots(executor->adapters, slots, dtype == 0 ? Format::kBf16 : Format::kFloat);
}

int64_t hetero_executor_fill_slot(HeteroExecutor* executor, int64_t slot,
                                  const HeteroAdapter* adapter) {
    HeteroExecutor& e = *executor;
    const int64_t failed = lay_out_slot(e.adapters, e.model, slot, *adapter, e.isa);
    if (failed) return failed;
    e.team->run([&](int thread) {
        pack_slot(e.adapters, e.model, slot, *adapter, thread, e.team->size());
    });
    return 0;
}

void hetero_executor_step(HeteroExecutor* executor, const HeteroStep* step) {
    using namespace hetero;
    Executor& e = *executor;
    arrange_threads(e);
    plan_step(e, *step);
    Run run = make_run(e, *step);
    for (size_t i = 0; i < 2 * e.pools.size(); ++i)
        e.rests[i].taken.store(0, std::memory_order_relaxed);
    e.team->run([&run](int thread) { run_thread(run, thread); });
    choose_tokens(run);
    if (run.found && step->num_samples <= kMergedAlone) merge_found(run, 0, step->num_samples);
}

}  // extern "C"
