// The whole step of a Llama-shaped decoder in one parallel region: C ABI in executor.h.
//
// Threads share a phase by outputs (strips of the weight matrix), so each part of the weights is
// read once; between phases there is a barrier. Most of a phase is divided evenly, the rest in
// units that the next free thread takes: cores that a virtual machine grants are not equally fast.
// A thread's outputs leave registers for a small tile and go from there to where the next phase
// reads them: rotated into queries and the KV cache, added to the residual, gated. The residual is
// float; inputs of a product are rounded to its weights' format.
//
// A token is one row of every product. With few rows every thread norms and rounds a product's
// input for itself, which is cheaper than a barrier; many rows are divided among the threads.

#include "executor.h"

#include <atomic>
#include <cmath>
#include <new>

#include "adapters.h"
#include "attention.h"
#include "candidates.h"
#include "model.h"
#include "rows.h"
#include "team.h"

namespace hetero {
namespace {

constexpr int64_t kRowBlock = 512;         // rows whose outputs a thread holds at a time
constexpr int64_t kLeastRowBlock = 64;     // rows for which a panel of weights is worth fetching
constexpr int64_t kPrivateElements = 4096; // at most, for every thread to prepare them itself
constexpr int64_t kPrivateRows = kPrivateElements / kDepth;
constexpr int64_t kPrivateBytes = kPrivateElements * 4;  // of float; int8 with its scales has fewer
constexpr int64_t kSpin = 2000;            // microseconds between steps before threads sleep
constexpr int64_t kPerPanel = kPanel / kStrip;
// With more rows than kFewRows, kPanelsTogether panels use a block of inputs while a cache has it.
constexpr int64_t kFewRows = 32, kPanelsTogether = 4;
// The most samples whose candidates the caller merges alone, which takes less time than a barrier.
constexpr int64_t kMergedAlone = 2;

// Modes of a sample, see executor.h.
enum : uint8_t { kGreedy = 0, kNoisySample = 1, kNone = 2, kCandidates = 3 };

struct Best {
    float score;
    int64_t token;
};

// Units of a phase, behind the evenly divided ones, that threads have taken. Two phases in a row
// use different ones.
struct alignas(128) Rest {
    std::atomic<int64_t> taken{0};
};

struct Executor {
    Model model;
    Isa isa;
    CacheShape cache;
    std::vector<float> rotary;            // [positions][rotary_dim]
    std::vector<int64_t> windows;         // different ones
    std::vector<int> window_of;           // layer -> index into them
    std::vector<AttentionPlan*> plans;    // one for each window
    Team* team = nullptr;
    Buffer x, attended, gate, queries, shared, shared_scales, privates, private_scales, tiles, best,
        found, final_rows;
    Adapters adapters;
    Rest rests[2];
    int64_t widest_row = 0;               // bytes of a prepared row of any product

    ~Executor() {
        delete team;
        for (AttentionPlan* plan : plans) free_attention_plan(plan);
    }
};

// One step: sizes, and where its buffers begin.
struct Run {
    Executor& e;
    const HeteroModel& m;
    const HeteroStep& step;
    Isa isa;
    int threads;
    int64_t tokens, head_width, gate_width;  // heads * dim; inner, in whole strips
    int64_t shared_stride, gate_stride;    // elements of a row in `shared` and `gate`
    int64_t tile_size;                     // floats of a thread's tile
    int64_t panels;                        // of a tile
    float* x = nullptr;                    // [tokens][hidden], the residual
    float* attended = nullptr;             // [tokens][head_width]
    char* gate = nullptr;                  // [tokens][gate_stride], float or as products take it
    char* queries = nullptr;               // [tokens][head_width], as the cache
    char *shared = nullptr, *privates = nullptr;  // products' inputs
    float *shared_scales = nullptr, *private_scales = nullptr;
    float* tiles = nullptr;
    float* final_rows = nullptr;           // [samples][hidden]
    Best* best = nullptr;                  // [threads][samples]
    Candidates* found = nullptr;           // [threads][samples], null if no candidates are wanted
    Adapters* adapters = nullptr;          // null if no token of the step has one
};

inline int64_t share(int64_t count, int thread, int threads) { return count * thread / threads; }

float* tile_of(const Run& r, int thread) { return r.tiles + thread * r.tile_size; }

// Prepares rows of `size` floats for a product; norm: weights of an RMS norm before it, or null.
// All threads call it; unless every thread prepares a copy of its own, it contains a barrier.
// Returns the rows that the calling thread has to use.
Rows prepare(const Run& r, const float* from, int64_t from_stride, int64_t rows, int64_t size,
             const float* norm, const Matrix& matrix, int thread) {
    const bool mine = rows * matrix.padded_depth <= kPrivateElements;
    char* to = mine ? r.privates + thread * kPrivateBytes : r.shared;
    float* scales = mine ? r.private_scales + thread * kPrivateRows : r.shared_scales;
    const int64_t stride = row_stride(matrix), bytes = stride * element_bytes(matrix.format);
    const int64_t first = mine ? 0 : share(rows, thread, r.threads);
    const int64_t last = mine ? rows : share(rows, thread + 1, r.threads);
    float* normed = tile_of(r, thread);
    for (int64_t row = first; row < last; ++row) {
        const float* values = from + row * from_stride;
        if (norm) {
            rms_norm(values, norm, (float)r.m.eps, size, normed, r.isa);
            values = normed;
        }
        prepare_row(matrix, values, to + row * bytes, scales + row, r.isa);
    }
    if (!mine) r.e.team->barrier(thread);
    return {to, stride, scales};
}

Rows from_row(const Rows& rows, int64_t first, Format format) {
    return {(const char*)rows.data + first * rows.stride * element_bytes(format), rows.stride,
            rows.scales + first};
}

// `multiply` with the first strip's outputs at the begin of `tile`.
void multiply_to_tile(const Run& r, const Matrix& matrix, const Rows& in, int64_t rows,
                      int64_t strip, int64_t strips, float* tile, int64_t stride) {
    multiply(matrix, in, rows, strip, strips, tile - strip * kStrip, stride, r.isa);
}

struct Range {
    int64_t first, last;
};

// Whether a tile of a product is wanted: `product` asks before it computes one.
struct Always {
    bool operator()(int64_t, int64_t, int64_t, int64_t) const { return true; }
};

// Strips of a product over some rows, a tile of panels at a time, each followed by
// done(row, rows, strip, strips, tile, stride); those without wanted(row, rows, strip, strips) are
// left out.
template <typename Done, typename Wanted>
void product(const Run& r, const Matrix& matrix, const Rows& in, Range rows, int64_t first,
             int64_t last, float* tile, Done done, Wanted wanted) {
    const int64_t together = rows.last - rows.first > kFewRows ? r.panels : 1;
    const int64_t stride = together * kPanel;
    for (int64_t row = rows.first; row < rows.last; row += kRowBlock) {
        const int64_t count = rows.last - row < kRowBlock ? rows.last - row : kRowBlock;
        const Rows block = from_row(in, row, matrix.format);
        for (int64_t strip = first; strip < last;) {
            const int64_t end = (strip / kPerPanel + together) * kPerPanel;
            const int64_t strips = (end < last ? end : last) - strip;
            if (wanted(row, count, strip, strips)) {
                multiply_to_tile(r, matrix, block, count, strip, strips, tile, stride);
                done(row, count, strip, strips, tile, stride);
            }
            strip += strips;
        }
    }
}

// Divides `count` units among the threads, which call body(first, last): three quarters in even
// shares, then the others one by one. The caller has a barrier before and after each phase.
template <typename Body>
void share_units(const Run& r, int64_t phase, int64_t count, int thread, Body body) {
    if (r.threads == 1) {
        body(0, count);
        return;
    }
    Rest* rests = r.e.rests;
    if (thread == 0) rests[(phase + 1) % 2].taken.store(0, std::memory_order_relaxed);
    const int64_t own = count * 3 / 4 / r.threads, even = own * r.threads;
    if (own) body(thread * own, (thread + 1) * own);
    for (;;) {
        const int64_t unit =
            even + rests[phase % 2].taken.fetch_add(1, std::memory_order_relaxed);
        if (unit >= count) return;
        body(unit, unit + 1);
    }
}

// Rows of a unit of work: fewer than a tile holds if there are too few panels to share evenly.
int64_t row_block(const Run& r, int64_t rows, int64_t panels) {
    int64_t block = kRowBlock;
    while (block > kLeastRowBlock && panels * ((rows + block - 1) / block) < 4 * r.threads)
        block /= 2;
    return block;
}

// A product shared by the threads, in units of a panel and a block of rows, or of `finest` strips
// if both panels and rows are few.
template <typename Done, typename Wanted = Always>
void share_product(const Run& r, int64_t phase, const Matrix& matrix, const Rows& in, int64_t rows,
                   int64_t strips, int64_t finest, int thread, Done done, Wanted wanted = {}) {
    const bool few = rows <= kFewRows && strips < 4 * kPerPanel * r.threads;
    const int64_t unit = few ? finest : kPerPanel, units = (strips + unit - 1) / unit;
    const int64_t block = row_block(r, rows, units), blocks = (rows + block - 1) / block;
    const auto multiply_units = [&](int64_t first, int64_t last, Range some) {
        const int64_t end = last * unit < strips ? last * unit : strips;
        const Range own{some.first * block, some.last * block < rows ? some.last * block : rows};
        product(r, matrix, in, own, first * unit, end, tile_of(r, thread), done, wanted);
    };
    share_units(r, phase, units * blocks, thread, [&](int64_t first, int64_t last) {
        while (first < last) {
            const int64_t at = first / blocks, from = first % blocks, left = last - first;
            const int64_t whole = from ? 0 : left / blocks;
            const int64_t some = left < blocks - from ? left : blocks - from;
            if (whole) multiply_units(at, at + whole, {0, blocks});
            else multiply_units(at, at + 1, {from, from + some});
            first += whole ? whole * blocks : some;
        }
    });
}

// -- adapters -------------------------------------------------------------------------------------

// What a product's inputs are prepared from; norm as of `prepare`.
struct Inputs {
    const void* data;
    bool is_bf16;
    int64_t stride, size;
    const float* norm;
};

// The inputs of the tokens that have adapters, in the adapters' format. Contains a barrier.
AdapterRows prepare_adapted(const Run& r, const Inputs& from, int thread) {
    Adapters& s = *r.adapters;
    const int64_t padded = round_up(from.size, kDepth), bytes = padded * element_bytes(s.format);
    const Matrix like{s.format, 0, from.size, 0, padded, nullptr, nullptr, nullptr, {}};
    const int64_t count = s.order.size(), last = share(count, thread + 1, r.threads);
    float* values = tile_of(r, thread);
    for (int64_t i = share(count, thread, r.threads); i < last; ++i) {
        const int64_t at = s.order[i] * from.stride;
        const float* row = (const float*)from.data + at;
        if (from.is_bf16) {
            widen((const uint16_t*)from.data + at, from.size, values, r.isa);
            row = values;
        }
        if (from.norm) {
            rms_norm(row, from.norm, (float)r.m.eps, from.size, values, r.isa);
            row = values;
        }
        prepare_row(like, row, s.rows + i * bytes, nullptr, r.isa);
    }
    r.e.team->barrier(thread);
    return {s.rows, padded, true};
}

// The shrink of a product whose prepared inputs are `in`: `expand_tile` may follow. All threads
// call it; it contains barriers if a token of the step has an adapter of the product.
void shrink_inputs(const Run& r, int64_t layer, Product product, const Matrix& matrix,
                   const Rows& in, const Inputs& from, int thread) {
    if (!r.adapters || !adapts(*r.adapters, layer, product)) return;
    const AdapterRows rows = matrix.format == r.adapters->format
                                 ? AdapterRows{in.data, in.stride, false}
                                 : prepare_adapted(r, from, thread);
    const bool split = shrink(*r.adapters, layer, product, rows, thread, r.threads, r.isa);
    r.e.team->barrier(thread);
    if (!split) return;
    add_sums(*r.adapters, layer, product, thread, r.threads, r.isa);
    r.e.team->barrier(thread);
}

void expand_tile(const Run& r, int64_t layer, Product product, const AdaptedTile& tile) {
    if (r.adapters) expand(*r.adapters, layer, product, tile, r.isa);
}

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

constexpr int64_t kPhases = kProducts;  // that share a layer's products

// One head of one token as the product left it: adds the bias, norms and rotates it, and stores it.
void place_head(const Run& r, const Layer& layer, int64_t index, int64_t token, int64_t head,
                float* values) {
    const HeteroModel& m = r.m;
    add(values, layer.qkv_bias + head * m.dim, m.dim, r.isa);
    const bool query = head < m.heads, key = !query && head < m.heads + m.kv_heads;
    if (m.qk_norm && (query || key))
        rms_norm(values, query ? layer.q_norm : layer.k_norm, (float)m.eps, m.dim, values, r.isa);
    if (query || key)
        rotate(values, r.e.rotary.data() + r.step.positions[token] * m.rotary_dim, m.rotary_dim,
               r.isa);
    if (query)
        put(r, values, r.queries + (token * m.heads + head) * m.dim * (r.e.cache.is_bf16 ? 2 : 4));
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
    const int64_t block = row_block(r, r.tokens, units), blocks = (r.tokens + block - 1) / block;
    float* tile = tile_of(r, thread);
    const auto project = [&](int64_t unit, int64_t row) {
        const int64_t count = r.tokens - row < block ? r.tokens - row : block;
        const Rows rows = from_row(in, row, layer.qkv.format);
        multiply_to_tile(r, layer.qkv, rows, count, unit * width / kStrip, width / kStrip, tile,
                         width);
        expand_tile(r, index, kQkvProduct, {tile, width, row, count, unit * width / kStrip, width / kStrip});
        for (int64_t i = 0; i < count; ++i)
            for (int64_t h = 0; h < together && unit * together + h < heads; ++h)
                place_head(r, layer, index, row + i, unit * together + h,
                           tile + i * width + h * dim);
    };
    share_units(r, kPhases * index + kQkvProduct, units * blocks, thread, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) project(i / blocks, i % blocks * block);
    });
}

// -- one layer ------------------------------------------------------------------------------------

// x += a product with `matrix` + bias.
void add_product(const Run& r, int64_t index, Product product, const Matrix& matrix,
                 const float* bias, const Rows& in, int thread) {
    const int64_t strips = round_up(r.m.hidden, kStrip) / kStrip, hidden = r.m.hidden;
    const auto add_tile = [&](int64_t row, int64_t rows, int64_t strip, int64_t count, float* tile,
                              int64_t stride) {
        const int64_t first = strip * kStrip;
        const int64_t left = hidden - first, width = count * kStrip;
        const int64_t size = width < left ? width : left;
        expand_tile(r, index, product, {tile, stride, row, rows, strip, count});
        add_block(r.x + row * hidden + first, hidden, {tile, stride, rows, size}, bias + first,
                  r.isa);
    };
    share_product(r, kPhases * index + product, matrix, in, r.tokens, strips, 1, thread, add_tile);
}

// gate = act(gate) * up; strips of both take turns in the weights.
void gate_product(const Run& r, const Layer& layer, int64_t index, const Rows& in, int thread) {
    const int64_t bytes = layer.down.format == Format::kBf16 ? 2 : 4;
    const auto gate_tile = [&](int64_t row, int64_t rows, int64_t strip, int64_t count,
                               float* tile, int64_t stride) {
        const int64_t size = count / 2 * kStrip, first = strip / 2 * kStrip;
        expand_tile(r, index, kGateUpProduct, {tile, stride, row, rows, strip, count});
        // In place: a pair's result lies before what is still to be read.
        gated({tile, stride, rows, size}, (int)r.m.activation, tile, stride, r.isa);
        char* to = r.gate + (row * r.gate_stride + first) * bytes;
        for (int64_t i = 0; i < rows; ++i, to += r.gate_stride * bytes) {
            if (bytes == 2) narrow(tile + i * stride, size, (uint16_t*)to, r.isa);
            else std::memcpy(to, tile + i * stride, size * 4);
        }
    };
    share_product(r, kPhases * index + kGateUpProduct, layer.gate_up, in, r.tokens,
                  2 * (r.gate_width / kStrip), 2, thread, gate_tile);
}

// The output of `gate_product` as the next product's input. With few rows every thread makes a
// copy, which is faster than fetching pieces of it in the middle of a product.
Rows gated_rows(const Run& r, const Matrix& matrix, int thread) {
    if (matrix.format != Format::kBf16 && matrix.format != Format::kFloat)
        return prepare(r, (const float*)r.gate, r.gate_stride, r.tokens, r.m.inner, nullptr, matrix,
                       thread);
    if (r.tokens * r.gate_stride > kPrivateElements) return {r.gate, r.gate_stride, nullptr};
    const int64_t bytes = element_bytes(matrix.format);
    char* own = r.privates + thread * kPrivateBytes;
    std::memcpy(own, r.gate, r.tokens * r.gate_stride * bytes);
    return {own, r.gate_stride, nullptr};
}

void run_layer(const Run& r, int64_t index, int thread) {
    const Layer& layer = r.e.model.layers[index];
    Team& team = *r.e.team;
    AttentionPlan* plan = r.e.plans[r.e.window_of[index]];
    const HeteroModel& m = r.m;
    if (thread == 0) begin_layer(plan);  // the last layer's attention has ended on all threads
    const Rows in = prepare(r, r.x, m.hidden, r.tokens, m.hidden, layer.norm, layer.qkv, thread);
    shrink_inputs(r, index, kQkvProduct, layer.qkv, in,
                  {r.x, false, m.hidden, m.hidden, layer.norm}, thread);
    project_heads(r, layer, index, in, thread);
    team.barrier(thread);
    attend(plan, index, r.queries, r.head_width, r.attended, r.head_width, thread);
    team.barrier(thread);
    if (needs_merge(plan)) {
        merge(plan, r.attended, r.head_width, thread);
        team.barrier(thread);
    }
    const Rows heads =
        prepare(r, r.attended, r.head_width, r.tokens, r.head_width, nullptr, layer.out, thread);
    shrink_inputs(r, index, kOutProduct, layer.out, heads,
                  {r.attended, false, r.head_width, r.head_width, nullptr}, thread);
    add_product(r, index, kOutProduct, layer.out, layer.out_bias, heads, thread);
    team.barrier(thread);
    const Rows second =
        prepare(r, r.x, m.hidden, r.tokens, m.hidden, layer.second_norm, layer.gate_up, thread);
    shrink_inputs(r, index, kGateUpProduct, layer.gate_up, second,
                  {r.x, false, m.hidden, m.hidden, layer.second_norm}, thread);
    gate_product(r, layer, index, second, thread);
    team.barrier(thread);
    const Rows inner = gated_rows(r, layer.down, thread);
    shrink_inputs(r, index, kDownProduct, layer.down, inner,
                  {r.gate, layer.down.format == Format::kBf16, r.gate_stride, m.inner, nullptr},
                  thread);
    add_product(r, index, kDownProduct, layer.down, layer.down_bias, inner, thread);
    team.barrier(thread);
}

// -- begin and end --------------------------------------------------------------------------------

void embed_tokens(const Run& r, int thread) {
    const int64_t last = share(r.tokens, thread + 1, r.threads);
    for (int64_t token = share(r.tokens, thread, r.threads); token < last; ++token)
        embed(r.e.model, r.step.token_ids[token], r.x + token * r.m.hidden, r.isa);
}

// The final norm of all tokens, if the caller wants them, and copies of those that samples follow,
// as the head's input.
void finish_tokens(const Run& r, int thread) {
    const int64_t hidden = r.m.hidden;
    if (r.step.hidden) {
        const int64_t last = share(r.tokens, thread + 1, r.threads);
        for (int64_t token = share(r.tokens, thread, r.threads); token < last; ++token)
            rms_norm(r.x + token * hidden, r.e.model.final_norm, (float)r.m.eps, hidden,
                     r.step.hidden + token * hidden, r.isa);
    }
    const int64_t last = share(r.step.num_samples, thread + 1, r.threads);
    for (int64_t i = share(r.step.num_samples, thread, r.threads); i < last; ++i)
        std::memcpy(r.final_rows + i * hidden, r.x + r.step.sampled_after[i] * hidden, hidden * 4);
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
    const int64_t vocab = r.m.vocab, strips = round_up(vocab, kStrip) / kStrip;
    Best* best = r.best + thread * s.num_samples;
    for (int64_t i = 0; i < s.num_samples; ++i) best[i] = {-INFINITY, -1};
    Candidates* found = r.found ? r.found + thread * s.num_samples : nullptr;
    for (int64_t i = 0; found && i < s.num_samples; ++i) begin_candidates(found[i]);
    const Rows in = prepare(r, r.final_rows, r.m.hidden, s.num_samples, r.m.hidden,
                            r.e.model.final_norm, r.e.model.head, thread);
    const auto tokens_of = [&](int64_t strip, int64_t count) {
        const int64_t left = vocab - strip * kStrip, width = count * kStrip;
        return width < left ? width : left;
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
    share_product(r, kPhases * r.m.layers, r.e.model.head, in, s.num_samples, strips, 1, thread,
                  pick_tile, wanted);
}

// The best of all threads; of equal scores the lowest token.
void choose_tokens(const Run& r) {
    for (int64_t i = 0; i < r.step.num_samples; ++i) {
        if (r.step.modes[i] != kGreedy && r.step.modes[i] != kNoisySample) continue;
        Best chosen = r.best[i];
        for (int t = 1; t < r.threads; ++t) {
            const Best& other = r.best[t * r.step.num_samples + i];
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

void run_thread(void* context, int thread) {
    const Run& r = *(const Run*)context;
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

Run make_run(Executor& e, const HeteroStep& step) {
    const HeteroModel& m = e.model.sizes;
    const int64_t head_width = m.heads * m.dim;
    Run r{e, m, step, e.isa, e.team->size(), step.num_tokens, head_width,
          round_up(m.inner, kStrip), 0, round_up(m.inner, kDepth), 0, 1};
    const int64_t wide = m.hidden > head_width ? m.hidden : head_width;
    r.shared_stride = round_up(m.inner > wide ? m.inner : wide, kDepth);
    const int64_t samples = step.num_samples, threads = r.threads;
    const int64_t most = r.tokens > samples ? r.tokens : samples;
    if (most > kFewRows) r.panels = kPanelsTogether;
    const int64_t across = 2 * m.dim > r.panels * kPanel ? 2 * m.dim : r.panels * kPanel;
    r.tile_size = round_up((most < kRowBlock ? most : kRowBlock) * across, kPanel);
    if (r.tile_size < r.shared_stride) r.tile_size = r.shared_stride;  // a normed row
    if (plan_adapters(e.adapters, step, r.threads, r.shared_stride))
        r.adapters = &e.adapters;
    r.x = e.x.of<float>(r.tokens * m.hidden);
    r.attended = e.attended.of<float>(r.tokens * head_width);
    r.gate = e.gate.of<char>(r.tokens * r.gate_stride * 4);
    r.queries = e.queries.of<char>(r.tokens * head_width * (e.cache.is_bf16 ? 2 : 4));
    r.shared = e.shared.of<char>(most * e.widest_row);
    r.shared_scales = e.shared_scales.of<float>(most);
    r.privates = e.privates.of<char>(threads * kPrivateBytes);
    r.private_scales = e.private_scales.of<float>(threads * kPrivateRows);
    r.tiles = e.tiles.of<float>(threads * r.tile_size);
    r.best = e.best.of<Best>(threads * samples);
    if (step.num_candidates) r.found = e.found.of<Candidates>(threads * samples);
    r.final_rows = e.final_rows.of<float>(samples * m.hidden);
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

struct Setting {
    Executor* e;
    int64_t layer, which;
    GivenWeight weight;
    bool fits;
};

void set_part(void* context, int thread) {
    Setting& s = *(Setting*)context;
    const bool fits =
        set_weight(s.e->model, s.layer, s.which, s.weight, thread, s.e->team->size());
    if (thread == 0) s.fits = fits;
}

int64_t widest_row(const Model& model) {
    int64_t widest = 0;
    const auto see = [&](const Matrix& matrix) {
        const int64_t bytes = row_stride(matrix) * element_bytes(matrix.format);
        widest = bytes > widest ? bytes : widest;
    };
    see(model.head);
    for (const Layer& layer : model.layers)
        for (const Matrix* each : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down}) see(*each);
    return widest;
}

struct Filling {
    Executor* e;
    int64_t slot;
    const HeteroAdapter* adapter;
};

void pack_part(void* context, int thread) {
    const Filling& f = *(const Filling*)context;
    pack_slot(f.e->adapters, f.e->model.sizes, f.slot, *f.adapter, thread, f.e->team->size());
}

int64_t set(void* executor, int64_t layer, int64_t which, const GivenWeight& weight) {
    Setting setting{(Executor*)executor, layer, which, weight, false};
    setting.e->team->run(set_part, &setting);
    return setting.fits ? 0 : -1;
}

}  // namespace
}  // namespace hetero

extern "C" {

void* hetero_executor_new(const HeteroModel* model, const HeteroForm* forms, void* cache,
                          int64_t block_size, const int64_t* windows, const float* rotary,
                          int64_t threads, const int32_t* cpus, int64_t isa) {
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
        size_t index = 0;
        while (index < e->windows.size() && e->windows[index] != windows[layer]) ++index;
        if (index == e->windows.size()) {
            e->windows.push_back(windows[layer]);
            e->plans.push_back(new_attention_plan((int)threads));
        }
        e->window_of.push_back((int)index);
    }
    e->team = new Team((int)threads, cpus, kSpin);
    return e;
}

void hetero_executor_free(void* executor) { delete (hetero::Executor*)executor; }

int64_t hetero_executor_slept(void* executor) {
    return ((hetero::Executor*)executor)->team->slept_ns();
}

int64_t hetero_executor_set(void* executor, int64_t layer, int64_t which, const void* data,
                            int64_t rows, int64_t columns, int64_t dtype) {
    return hetero::set(executor, layer, which, {data, rows, columns, dtype == 0, nullptr});
}

int64_t hetero_executor_set_quantized(void* executor, int64_t layer, int64_t which,
                                      const HeteroQuantized* weight) {
    const hetero::Quantized from{weight->data, weight->scales, weight->points, weight->offsets};
    return hetero::set(executor, layer, which,
                       {nullptr, weight->rows, weight->columns, false, &from});
}

void hetero_executor_make_slots(void* executor, int64_t slots, int64_t dtype) {
    using namespace hetero;
    make_slots(((Executor*)executor)->adapters, slots, dtype == 0 ? Format::kBf16 : Format::kFloat);
}

int64_t hetero_executor_fill_slot(void* executor, int64_t slot, const HeteroAdapter* adapter) {
    using namespace hetero;
    Executor& e = *(Executor*)executor;
    const int64_t failed = lay_out_slot(e.adapters, e.model.sizes, slot, *adapter, e.isa);
    if (failed) return failed;
    Filling filling{&e, slot, adapter};
    e.team->run(pack_part, &filling);
    return 0;
}

void hetero_executor_step(void* executor, const HeteroStep* step) {
    using namespace hetero;
    Executor& e = *(Executor*)executor;
    plan_step(e, *step);
    for (Rest& rest : e.rests) rest.taken.store(0, std::memory_order_relaxed);
    Run run = make_run(e, *step);
    e.team->run(run_thread, &run);
    choose_tokens(run);
    if (run.found && step->num_samples <= kMergedAlone) merge_found(run, 0, step->num_samples);
}

}  // extern "C"
