// What the phases of a step share: the executor, the buffers of a step, and how threads divide a
// product. See executor.cpp.

#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "adapters.h"
#include "attention.h"
#include "candidates.h"
#include "mixture.h"
#include "model.h"
#include "numbers.h"
#include "rows.h"
#include "team.h"

namespace hetero {

constexpr int64_t kRowBlock = 512;         // rows whose outputs a thread holds at a time
constexpr int64_t kLeastRowBlock = 64;     // rows for which a panel of weights is worth fetching
constexpr int64_t kPrivateElements = 4096; // at most, for every thread to prepare them itself
constexpr int64_t kPrivateRows = kPrivateElements / kDepth;
constexpr int64_t kPrivateBytes = kPrivateElements * 4;  // of float; int8 with its scales has fewer
constexpr int64_t kPerPanel = kPanel / kStrip;
// With more rows than kFewRows, kPanelsTogether panels use a block of inputs while a cache has it.
constexpr int64_t kFewRows = 32, kPanelsTogether = 4;

struct Best {
    float score;
    int64_t token;
};

// Units of a phase, behind the evenly divided ones, that threads have taken. Two phases in a row
// use different ones.
struct alignas(128) Rest {
    std::atomic<int64_t> taken{0};
};

// Threads [first, last) of one NUMA node.
struct Pool {
    int first, last;
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
    Buffer<float> x;                      // [tokens][hidden], the residual
    Buffer<float> attended;               // [tokens][heads * dim]
    Buffer<char> gate;                    // [tokens][padded inner], float or as products take it
    Buffer<char> queries;                 // [tokens][heads * dim], as the cache
    Buffer<char> shared, privates;        // products' inputs
    Buffer<float> shared_scales, private_scales;
    Buffer<float> tiles;                  // [threads][tile_size]
    Buffer<float> final_rows;             // [samples][hidden]
    Buffer<Best> best;                    // [threads][samples]
    Buffer<Candidates> found;             // [threads][samples]
    Adapters adapters;
    Mixture mixture;
    std::vector<int> nodes;               // of each thread its pool, ascending from 0
    std::vector<Pool> pools;              // of the team as it is
    std::vector<int> pool_of;             // of each thread
    std::unique_ptr<Rest[]> rests;        // [2][pools]
    int64_t widest_row = 0;               // bytes of a prepared row of any product

    ~Executor() {
        delete team;
        for (AttentionPlan* plan : plans) free_attention_plan(plan);
    }
};

// One step.
struct Run {
    Executor& e;
    const HeteroModel& m;
    const HeteroStep& step;
    Isa isa;
    int threads;
    int64_t tokens, head_width;            // heads * dim
    int64_t shared_stride;                 // elements of a row in `shared`
    int64_t tile_size;                     // floats of a thread's tile
    int64_t panels;                        // of a tile
    Candidates* found = nullptr;           // null if no candidates are wanted
    Adapters* adapters = nullptr;          // null if no token of the step has one
    Mixture* mixture = nullptr;            // null if no layer has experts
};

constexpr int64_t kPhases = 4;  // of a layer, that share units: qkv to down

inline int64_t share(int64_t count, int thread, int threads) { return count * thread / threads; }

inline float* tile_of(const Run& r, int thread) { return r.e.tiles + thread * r.tile_size; }

// Prepares rows of `size` floats for a product; norm: weights of an RMS norm before it, or null.
// All threads call it; unless every thread prepares a copy of its own, it contains a barrier.
// Returns the rows that the calling thread has to use.
inline Rows prepare(const Run& r, const float* from, int64_t from_stride, int64_t rows,
                    int64_t size, const float* norm, const Matrix& matrix, int thread) {
    const bool mine = rows * matrix.padded_depth <= kPrivateElements;
    char* to = mine ? r.e.privates + thread * kPrivateBytes : r.e.shared;
    float* scales = mine ? r.e.private_scales + thread * kPrivateRows : r.e.shared_scales;
    const int64_t stride = row_stride(matrix), bytes = row_bytes(matrix);
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

inline Rows from_row(const Rows& rows, int64_t first, Format format) {
    return {(const char*)rows.data + first * rows.stride * element_bytes(format), rows.stride,
            rows.scales + first};
}

// `multiply` with the first strip's outputs at the begin of `tile`.
inline void multiply_to_tile(const Run& r, const Matrix& matrix, const Rows& in, int64_t rows,
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
        const int64_t count = least(rows.last - row, kRowBlock);
        const Rows block = from_row(in, row, matrix.format);
        for (int64_t strip = first; strip < last;) {
            const int64_t strips = least((strip / kPerPanel + together) * kPerPanel, last) - strip;
            if (wanted(row, count, strip, strips)) {
                multiply_to_tile(r, matrix, block, count, strip, strips, tile, stride);
                done(row, count, strip, strips, tile, stride);
            }
            strip += strips;
        }
    }
}

// Divides `count` units among the threads, which call body(first, last): each pool has a share, of
// which its threads take three quarters in even shares, then the others one by one; a thread whose
// pool has none left helps the next pool. Weights are where the threads of these shares have packed
// them: see `set_weight`. The caller has a barrier before and after each phase.
template <typename Body>
void share_units(const Run& r, int64_t phase, int64_t count, int thread, Body body) {
    if (r.threads == 1) {
        body(0, count);
        return;
    }
    const std::vector<Pool>& pools = r.e.pools;
    const int num_pools = (int)pools.size(), mine = r.e.pool_of[thread];
    Rest* next = r.e.rests.get() + (phase + 1) % 2 * num_pools;
    Rest* rests = r.e.rests.get() + phase % 2 * num_pools;
    for (int i = 0; thread == 0 && i < num_pools; ++i)
        next[i].taken.store(0, std::memory_order_relaxed);
    for (int i = 0; i < num_pools; ++i) {
        const int which = (mine + i) % num_pools;
        const Pool pool = pools[which];
        const int size = pool.last - pool.first;
        const int64_t begin = share(count, pool.first, r.threads);
        const int64_t end = share(count, pool.last, r.threads);
        const int64_t own = (end - begin) * 3 / 4 / size, even = begin + own * size;
        const int64_t at = begin + (thread - pool.first) * own;
        if (i == 0 && own) body(at, at + own);
        for (;;) {
            const int64_t unit =
                even + rests[which].taken.fetch_add(1, std::memory_order_relaxed);
            if (unit >= end) break;
            body(unit, unit + 1);
        }
    }
}

// Rows of a unit of work: fewer than a tile holds if there are too few panels to share evenly.
inline int64_t row_block(const Run& r, int64_t rows, int64_t panels) {
    int64_t block = kRowBlock;
    while (block > kLeastRowBlock && panels * ((rows + block - 1) / block) < 4 * r.threads)
        block /= 2;
    return block;
}

// Cuts units [first, last), `blocks` neighbours of which are one part of the outputs for different
// rows, into body(first part, last part, blocks of rows).
template <typename Body>
void split_units(Range units, int64_t blocks, Body body) {
    for (int64_t first = units.first; first < units.last;) {
        const int64_t at = first / blocks, from = first % blocks, left = units.last - first;
        const int64_t whole = from ? 0 : left / blocks, some = least(left, blocks - from);
        if (whole) body(at, at + whole, Range{0, blocks});
        else body(at, at + 1, Range{from, from + some});
        first += whole ? whole * blocks : some;
    }
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
        const Range own{some.first * block, least(some.last * block, rows)};
        product(r, matrix, in, own, first * unit, least(last * unit, strips), tile_of(r, thread),
                done, wanted);
    };
    share_units(r, phase, units * blocks, thread, [&](int64_t first, int64_t last) {
        split_units({first, last}, blocks, multiply_units);
    });
}

// Where the gates of some tokens go, the inputs of a down product: [rows][stride] of bf16 or float,
// padding zero.
struct GateRows {
    char* data;
    int64_t stride, inner;  // elements
    bool is_bf16;
};

// gate = act(gate) * up of a tile, in which strips of both take turns; overwrites the tile.
inline void store_gates(const Run& r, const GateRows& to, int64_t row, int64_t rows, int64_t strip,
                        int64_t strips, float* tile, int64_t tile_stride) {
    const int64_t size = strips / 2 * kStrip, first = strip / 2 * kStrip, end = first + size;
    const int64_t bytes = to.is_bf16 ? 2 : 4, padding = end >= to.inner ? to.stride - end : 0;
    // In place: a pair's result lies before what is still to be read.
    gated({tile, tile_stride, rows, size}, (int)r.m.activation, tile, tile_stride, r.isa);
    char* at = to.data + (row * to.stride + first) * bytes;
    for (int64_t i = 0; i < rows; ++i, at += to.stride * bytes) {
        if (to.is_bf16) narrow(tile + i * tile_stride, size, (uint16_t*)at, r.isa);
        else std::memcpy(at, tile + i * tile_stride, size * 4);
        std::memset(at + size * bytes, 0, padding * bytes);
    }
}

// -- adapters -------------------------------------------------------------------------------------

// What a product's inputs are prepared from; norm as of `prepare`.
struct Inputs {
    const void* data;
    bool is_bf16;
    int64_t stride, size;
    const float* norm;
};

// Prepares a row of `from` for the adapters, at the place `row` of `to`, whose rows are
// round_up(from.size, kDepth) elements apart. values: scratch of from.size floats.
inline void prepare_adapted_row(const Run& r, const Inputs& from, int64_t index, char* to,
                                int64_t row, float* values) {
    const Format format = r.adapters->format;
    const int64_t padded = round_up(from.size, kDepth), at = index * from.stride;
    const Matrix like{format, 0, from.size, 0, padded, nullptr, nullptr, nullptr, {}};
    const float* given = values;
    if (from.is_bf16) widen((const uint16_t*)from.data + at, from.size, values, r.isa);
    else given = (const float*)from.data + at;
    if (from.norm) {
        rms_norm(given, from.norm, (float)r.m.eps, from.size, values, r.isa);
        given = values;
    }
    prepare_row(like, given, to + row * padded * element_bytes(format), nullptr, r.isa);
}

// The inputs of the tokens that have adapters, in the adapters' format. Contains a barrier.
inline AdapterRows prepare_adapted(const Run& r, const Inputs& from, int thread) {
    Adapters& s = *r.adapters;
    const int64_t count = s.order.size(), last = share(count, thread + 1, r.threads);
    for (int64_t i = share(count, thread, r.threads); i < last; ++i)
        prepare_adapted_row(r, from, s.order[i], s.rows, i, tile_of(r, thread));
    r.e.team->barrier(thread);
    return {s.rows, round_up(from.size, kDepth), true};
}

// The shrink of a product whose prepared inputs are `in`: `expand_tile` may follow. All threads
// call it; it contains barriers if a token of the step has an adapter of the product.
inline void shrink_inputs(const Run& r, int64_t layer, Product product, const Matrix& matrix,
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

inline void expand_tile(const Run& r, int64_t layer, Product product, const AdaptedTile& tile) {
    if (r.adapters) expand(*r.adapters, layer, product, tile, r.isa);
}

}  // namespace hetero
