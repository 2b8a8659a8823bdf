// The phases of an exchange, see exchange.h.

#include "exchange.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "../step/rows.h"

namespace hetero::experts {
namespace {

// Rows of weights of a task; a strip of outputs is a cache line of y at least.
constexpr int64_t kMostStrip = 64, kLeastGates = 8, kLeastOutputs = 16;
constexpr int64_t kTasksPerThread = 16;              // that strips are made small for
constexpr int64_t kTokensAtOnce = 64;                // of an expert: their results stay in L1
constexpr int64_t kChunk = 1024;                     // elements that a task prepares
constexpr int64_t kLittle = 1 << 20;    // bytes of weights that are read in some 10 us
constexpr int64_t kMostPolled = 1 << 18;  // bytes of y that a device may read again and again
constexpr int64_t kWholes = 256;                     // parts of all experts that a request counts by

std::vector<int32_t> places(int64_t depth, const Layout& layout) {
    std::vector<int32_t> found(depth);
    for (int64_t k = 0; k < depth; ++k) found[k] = (int32_t)layout.place(k);
    return found;
}

// In a block of tokens, without the token's own column.
std::vector<int32_t> tile_places(const Form& form) {
    std::vector<int32_t> found(form.depth);
    for (int64_t k = 0; k < form.depth; ++k) {
        const int64_t place = tile_place(tile_order(form.kind), k);
        found[k] = (int32_t)(place / 2 * 2 * kTileTokens + place % 2);
    }
    return found;
}

// Strips as large as leave each thread several tasks, `least` rows at least.
int64_t strip_for(int64_t rows, int64_t parts, int threads, int64_t least) {
    int64_t strip = kMostStrip;
    while (strip > least && parts * ((rows + strip - 1) / strip) < kTasksPerThread * threads)
        strip /= 2;
    return strip;
}

int64_t claim(Counter& counter) { return counter.next.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

// Of one thread.
struct Exchange::Scratch {
    alignas(64) float gate[kTokensAtOnce * kMostStrip];
    alignas(64) float up[kTokensAtOnce * kMostStrip];
    const void* x[kTokensAtOnce];
};

Exchange::Exchange(const Setting& setting, int threads)
    : s_(setting),
      threads_(threads),
      bf16_rows_(takes_bf16(setting.gate_up.kind, setting.input, setting.isa) &&
                 takes_bf16(setting.down.kind, setting.input, setting.isa)),
      reads_mailbox_(bf16_rows_ && dot_layout(setting.gate_up.kind, bf16_rows_, setting.isa).order ==
                                       setting.order),
      tile_tokens_(setting.isa == kAmx && bf16_rows_ && fits_tiles(setting.gate_up) &&
                           fits_tiles(setting.down)
                       ? setting.tile_tokens
                       : 0),
      mail_stride_(padded(setting.hidden) * bytes_of(setting.input)),
      input_stride_(padded(setting.hidden) * (bf16_rows_ ? 2 : 4)),
      inner_stride_(padded(setting.inner) * (bf16_rows_ ? 2 : 4)),
      mail_place_(places(setting.hidden, {setting.order, 0})),
      input_place_(places(setting.hidden,
                          dot_layout(setting.gate_up.kind, bf16_rows_, setting.isa))),
      inner_place_(places(setting.inner,
                          dot_layout(setting.down.kind, bf16_rows_, setting.isa))),
      input_tile_place_(tile_places(setting.gate_up)),
      inner_tile_place_(tile_places(setting.down)),
      inner_(setting.inner),
      down_(setting.down),
      starts_(setting.experts + 2),
      tokens_(setting.max_tokens * setting.experts_per_token),
      weights_(setting.max_tokens * setting.experts_per_token),
      pair_block_(setting.max_tokens * setting.experts_per_token),
      pair_column_(setting.max_tokens * setting.experts_per_token),
      scratch_(new Scratch[threads]) {}

Exchange::~Exchange() = default;

Matrix Exchange::matrix_at(const int64_t* at, const Form& form) const {
    const int64_t zeros = form.zeros == Zeros::kPoints ? at[2] : at[3];
    return {(const char*)__atomic_load_n(at, __ATOMIC_RELAXED), (const char*)at[1],
            (const char*)zeros, (const float*)at[4], (const char*)at[5]};
}

// Every number in y becomes one that no exchange has within the next 2^30.
void Exchange::forget_numbers(int32_t number) {
    const uint64_t other = (uint64_t)((uint32_t)number ^ 0x80000000u) << 32;
    for (int64_t i = 0; i < s_.max_tokens * s_.hidden; ++i) {
        const uint32_t sum = (uint32_t)__atomic_load_n(s_.y + i, __ATOMIC_RELAXED);
        __atomic_store_n(s_.y + i, other | sum, __ATOMIC_RELAXED);
    }
}

void Exchange::say_coming() { __atomic_store_n(s_.answer + kComing, number_, __ATOMIC_RELAXED); }

Refusal Exchange::open(const Request& request) {
    const auto [number, layer, tokens, linked, whole] = request;
    parts_.clear();
    if (layer < 0 || layer >= s_.layers) return Refusal::kLayer;
    if (tokens < 0 || tokens > s_.max_tokens) return Refusal::kTokens;
    // Behind a multiple of kRowDepth no kernel reads what an earlier request left in a row.
    if (linked < 0 || linked >= s_.inner || (linked > 0 && (s_.inner - linked) % kRowDepth != 0))
        return Refusal::kLinked;
    if (whole < 0 || whole >= kWholes || (whole > 0 && linked > 0)) return Refusal::kLinked;
    number_ = number;
    inner_ = s_.inner - linked;
    down_.depth = inner_;
    const int64_t k = s_.experts_per_token;
    // The sums below index by what this pass has checked, so it keeps its own copy: a device that
    // writes meanwhile can make results wrong, but no write go astray.
    std::fill(starts_.begin(), starts_.end(), 0);
    wanted_.clear();
    std::vector<int32_t>& ids = pair_block_;  // free until blocks are placed
    for (int64_t t = 0; t < tokens; ++t) {
        bool is_wanted = false;
        for (int64_t i = t * k; i < (t + 1) * k; ++i) {
            const int32_t id = s_.ids[i];
            ids[i] = id;
            if (id < 0) continue;
            if (id >= s_.experts) return Refusal::kExpert;
            ++starts_[id + 2];
            is_wanted = true;
        }
        if (is_wanted) wanted_.push_back((int32_t)t);
    }
    for (int64_t e = 2; e < s_.experts + 2; ++e) starts_[e] += starts_[e - 1];
    pairs_ = starts_[s_.experts + 1];
    // starts_[e + 1] is where expert e's next token goes; in the end, where the next expert begins.
    for (int64_t i = 0; i < tokens * k; ++i) {
        if (ids[i] < 0) continue;
        const int32_t at = starts_[ids[i] + 1]++;
        tokens_[at] = (int32_t)(i / k);
        weights_[at] = s_.weights[i];
    }
    int64_t different = 0;
    for (int64_t e = 0; e < s_.experts; ++e) different += starts_[e + 1] > starts_[e];
    const int64_t own = different - different * whole / kWholes;
    int64_t block = 0;
    dots_serve_ = false;
    packed_pairs_.clear();
    for (int64_t e = 0; e < s_.experts; ++e) {
        const int64_t first = starts_[e], rows = starts_[e + 1] - first;
        if (rows == 0) continue;
        if ((int64_t)parts_.size() == own) break;
        const int64_t* at = s_.addresses + (layer * s_.experts + e) * 2 * kAddresses;
        Part part{matrix_at(at, s_.gate_up), matrix_at(at + kAddresses, s_.down), first, rows, -1};
        if (!part.gate_up.data || !part.down.data) {
            parts_.clear();
            return Refusal::kNotHeld;
        }
        if (tile_tokens_ > 0 && rows >= tile_tokens_) {
            part.block = block;
            for (int64_t r = 0; r < rows; ++r) {
                packed_pairs_.push_back(first + r);
                pair_block_[first + r] = (int32_t)(block + r / kTileTokens);
                pair_column_[first + r] = (int32_t)(r % kTileTokens);
            }
            block += (rows + kTileTokens - 1) / kTileTokens;
        } else {
            dots_serve_ = true;
        }
        parts_.push_back(part);
    }
    if (parts_.empty()) return Refusal::kNone;
    if (const uint32_t period = (uint32_t)number >> 30; period != period_) {
        forget_numbers(number);
        period_ = period;
    }
    sums_.reserve(s_.max_tokens * s_.hidden);
    if (dots_serve_) {
        inner_rows_.reserve(pairs_ * inner_stride_);
        if (!reads_mailbox_) input_rows_.reserve(s_.max_tokens * input_stride_);
    }
    if (block > 0) {
        input_blocks_.reserve(block * tile_block_size(s_.hidden));
        inner_blocks_.reserve(block * tile_block_size(s_.inner));
    }
    plan_tasks();
    return Refusal::kNone;
}

void Exchange::plan_tasks() {
    const int64_t chunks = (s_.hidden + kChunk - 1) / kChunk;
    prepared_ = dots_serve_ && !reads_mailbox_ ? (int64_t)wanted_.size() : 0;
    inputs_ = (prepared_ + (int64_t)packed_pairs_.size()) * chunks;
    const int64_t parts = (int64_t)parts_.size();
    const int64_t least = packed_pairs_.empty() ? kLeastGates : kTileRows;
    gate_strip_ = strip_for(inner_, parts, threads_, least);
    gate_strips_ = (inner_ + gate_strip_ - 1) / gate_strip_;
    // The longest tasks first, so that threads end together.
    by_rows_.resize(parts_.size());
    std::iota(by_rows_.begin(), by_rows_.end(), 0);
    std::stable_sort(by_rows_.begin(), by_rows_.end(),
                     [&](int32_t a, int32_t b) { return parts_[a].rows > parts_[b].rows; });
    output_strip_ = strip_for(s_.hidden, 1, threads_, kLeastOutputs);
    output_strips_ = (s_.hidden + output_strip_ - 1) / output_strip_;
    const int64_t bytes = s_.gate_up.rows * s_.gate_up.stride() + s_.down.rows * s_.down.stride();
    is_little_ = parts * bytes <= kLittle;
    is_polled_ = (int64_t)wanted_.size() * s_.hidden * (int64_t)sizeof(*s_.y) <= kMostPolled;
    for (Counter* counter : {&prepare_next_, &gate_next_, &output_next_})
        counter->next.store(2 * threads_, std::memory_order_relaxed);
}

// Calls compute(task, ahead) for this thread's share of the tasks; `ahead`: its next one, whose first
// rows may be prefetched, or one past all. The first two of a thread are its own, so that threads do
// not wait for each other at the counter; later tasks go to the thread that claims them first.
template <typename F>
void Exchange::share(Counter& counter, int64_t tasks, int thread, F compute) {
    for (int64_t task = thread, ahead = thread + threads_; task < tasks;) {
        compute(task, ahead);
        task = ahead;
        if (task < tasks) ahead = claim(counter);
    }
}

// A chunk of a token's input, in the order that dots or tiles take.
void Exchange::prepare_input(int64_t task) {
    const int64_t chunks = (s_.hidden + kChunk - 1) / kChunk;
    const int64_t which = task / chunks, begin = task % chunks * kChunk;
    const int64_t end = std::min(begin + kChunk, s_.hidden);
    const bool for_dots = which < prepared_;
    const int64_t pair = for_dots ? 0 : packed_pairs_[which - prepared_];
    const int64_t token = for_dots ? wanted_[which] : tokens_[pair];
    const char* row = s_.x + token * mail_stride_;
    const uint16_t* halves = (const uint16_t*)row;
    if (!for_dots) {
        uint16_t* to = input_blocks_ + pair_block_[pair] * tile_block_size(s_.hidden) +
                       pair_column_[pair] * 2;
        for (int64_t k = begin; k < end; ++k) to[input_tile_place_[k]] = halves[mail_place_[k]];
        return;
    }
    char* to = input_rows_ + token * input_stride_;
    if (bf16_rows_) {
        for (int64_t k = begin; k < end; ++k)
            ((uint16_t*)to)[input_place_[k]] = halves[mail_place_[k]];
        return;
    }
    for (int64_t k = begin; k < end; ++k)
        ((float*)to)[input_place_[k]] = number_at(s_.input, row, mail_place_[k]);
}

// The first weights that a task reads.
const char* Exchange::strip_of(int64_t task, bool gates) const {
    if (gates) {
        if (task >= (int64_t)parts_.size() * gate_strips_) return nullptr;
        return parts_[by_rows_[task / gate_strips_]].gate_up.data +
               task % gate_strips_ * gate_strip_ * s_.gate_up.stride();
    }
    if (task >= output_strips_) return nullptr;
    return parts_[0].down.data + task * output_strip_ * down_.stride();
}

void Exchange::compute_gates(int64_t task, int64_t ahead, Scratch& scratch) {
    const Part& part = parts_[by_rows_[task / gate_strips_]];
    const int64_t first = task % gate_strips_ * gate_strip_;
    const int64_t count = std::min(gate_strip_, inner_ - first);
    const char* next = strip_of(ahead, true);
    if (part.block < 0) gates_by_dots(part, first, count, next, scratch);
    else gates_by_tiles(part, first, count, next, scratch);
}

void Exchange::gates_by_dots(const Part& part, int64_t first, int64_t count, const char* next,
                             Scratch& scratch) {
    const char* bias = part.gate_up.bias;
    for (int64_t r = 0; r < part.rows; r += kTokensAtOnce) {
        const int64_t tokens = std::min(kTokensAtOnce, part.rows - r);
        for (int64_t i = 0; i < tokens; ++i) {
            const int64_t token = tokens_[part.first + r + i];
            scratch.x[i] = reads_mailbox_ ? s_.x + token * mail_stride_
                                          : input_rows_ + token * input_stride_;
        }
        const char* up = part.gate_up.data + (s_.inner + first) * s_.gate_up.stride();
        const bool is_last = r + tokens == part.rows;
        const char* again = part.gate_up.data + first * s_.gate_up.stride();
        dot_rows({&s_.gate_up, part.gate_up, first, count, scratch.x, tokens, scratch.gate, count,
                  up, bf16_rows_, s_.isa});
        dot_rows({&s_.gate_up, part.gate_up, s_.inner + first, count, scratch.x, tokens,
                  scratch.up, count, is_last ? next : again, bf16_rows_, s_.isa});
        if (bias)
            for (int64_t t = 0; t < tokens; ++t)
                for (int64_t i = 0; i < count; ++i) {
                    scratch.gate[t * count + i] += number_at(s_.input, bias, first + i);
                    scratch.up[t * count + i] += number_at(s_.input, bias, s_.inner + first + i);
                }
        apply_gate(s_.gate, scratch.gate, scratch.up, tokens * count, s_.isa);
        for (int64_t t = 0; t < tokens; ++t) {
            char* to = inner_row(part.first + r + t);
            const float* from = scratch.gate + t * count;
            const int32_t* place = inner_place_.data() + first;
            if (bf16_rows_)
                for (int64_t i = 0; i < count; ++i)
                    ((uint16_t*)to)[place[i]] = float_to_bf16(from[i]);
            else
                for (int64_t i = 0; i < count; ++i)
                    ((float*)to)[place[i]] = s_.input == Number::kBf16
                                                 ? bf16_to_float(float_to_bf16(from[i]))
                                                 : from[i];
        }
    }
}

void Exchange::gates_by_tiles(const Part& part, int64_t first, int64_t count, const char* next,
                              Scratch& scratch) {
    const char* bias = part.gate_up.bias;
    const int64_t blocks = (part.rows + kTileTokens - 1) / kTileTokens;
    const int64_t stride = s_.gate_up.stride();
    for (int64_t b = 0; b < blocks; b += kMostTileBlocks) {
        const int64_t some = std::min(kMostTileBlocks, blocks - b), width = some * kTileTokens;
        const int64_t tokens = std::min(width, part.rows - b * kTileTokens);
        const uint16_t* x = input_blocks_ + (part.block + b) * tile_block_size(s_.hidden);
        uint16_t* to = inner_blocks_ + (part.block + b) * tile_block_size(s_.inner);
        const char* own = part.gate_up.data;
        for (int64_t i = 0; i < count; i += kTileRows) {
            const int64_t rows = std::min(kTileRows, count - i);
            const int64_t gate = first + i, up = s_.inner + gate;
            const char* more = i + kTileRows < count ? own + (gate + kTileRows) * stride
                               : b + some < blocks   ? own + first * stride
                                                     : next;
            tile_rows({&s_.gate_up, part.gate_up, gate, rows, x, some, scratch.gate,
                       own + up * stride});
            tile_rows({&s_.gate_up, part.gate_up, up, rows, x, some, scratch.up, more});
            for (int64_t j = 0; bias && j < rows; ++j)
                for (int64_t t = 0; t < width; ++t) {
                    scratch.gate[j * width + t] += number_at(s_.input, bias, gate + j);
                    scratch.up[j * width + t] += number_at(s_.input, bias, up + j);
                }
            apply_gate(s_.gate, scratch.gate, scratch.up, rows * width, s_.isa);
            for (int64_t j = 0; j < rows; ++j) {
                const int32_t place = inner_tile_place_[gate + j];
                for (int64_t t = 0; t < tokens; ++t)
                    to[t / kTileTokens * tile_block_size(s_.inner) + place +
                       t % kTileTokens * 2] = float_to_bf16(scratch.gate[j * width + t]);
            }
        }
    }
}

// Adds a strip of one pair's outputs to its token's sums.
void Exchange::add_output(const Part& part, int64_t row, int64_t first, int64_t count,
                          const float* values) {
    const int64_t pair = part.first + row;
    float* own = sums_ + tokens_[pair] * s_.hidden + first;
    const float weight = weights_[pair];
    if (!part.down.bias) {
        add_scaled(own, values, weight, count, s_.isa);
        return;
    }
    float sums[kMostStrip];
    for (int64_t i = 0; i < count; ++i)
        sums[i] = values[i] + number_at(s_.input, part.down.bias, first + i);
    add_scaled(own, sums, weight, count, s_.isa);
}

void Exchange::outputs_by_dots(const Part& part, int64_t first, int64_t count, const char* next,
                               Scratch& scratch) {
    for (int64_t r = 0; r < part.rows; r += kTokensAtOnce) {
        const int64_t tokens = std::min(kTokensAtOnce, part.rows - r);
        for (int64_t i = 0; i < tokens; ++i) scratch.x[i] = inner_row(part.first + r + i);
        const bool is_last = r + tokens == part.rows;
        const char* again = part.down.data + first * down_.stride();
        dot_rows({&down_, part.down, first, count, scratch.x, tokens, scratch.gate, count,
                  is_last ? next : again, bf16_rows_, s_.isa});
        for (int64_t t = 0; t < tokens; ++t)
            add_output(part, r + t, first, count, scratch.gate + t * count);
    }
}

void Exchange::outputs_by_tiles(const Part& part, int64_t first, int64_t count, const char* next,
                                Scratch& scratch) {
    const int64_t blocks = (part.rows + kTileTokens - 1) / kTileTokens;
    const int64_t stride = down_.stride();
    for (int64_t b = 0; b < blocks; b += kMostTileBlocks) {
        const int64_t some = std::min(kMostTileBlocks, blocks - b), width = some * kTileTokens;
        const int64_t tokens = std::min(width, part.rows - b * kTileTokens);
        const uint16_t* x = inner_blocks_ + (part.block + b) * tile_block_size(s_.inner);
        for (int64_t i = 0; i < count; i += kTileRows) {
            const int64_t rows = std::min(kTileRows, count - i);
            const char* own = part.down.data + first * stride;
            const char* more = i + kTileRows < count ? own + (i + kTileRows) * stride
                               : b + some < blocks   ? own
                                                     : next;
            tile_rows({&down_, part.down, first + i, rows, x, some, scratch.gate, more});
            for (int64_t t = 0; t < tokens; ++t) {
                float column[kTileRows];
                for (int64_t j = 0; j < rows; ++j) column[j] = scratch.gate[j * width + t];
                add_output(part, b * kTileTokens + t, first + i, rows, column);
            }
        }
    }
}

void Exchange::add_outputs(int64_t task, int64_t ahead, Scratch& scratch) {
    const int64_t first = task * output_strip_;
    const int64_t count = std::min(output_strip_, s_.hidden - first);
    for (int32_t token : wanted_)
        std::memset(sums_ + token * s_.hidden + first, 0, count * sizeof(float));
    for (size_t p = 0; p < parts_.size(); ++p) {
        const char* next = p + 1 < parts_.size()
                               ? parts_[p + 1].down.data + first * down_.stride()
                               : strip_of(ahead, false);
        if (parts_[p].block < 0) outputs_by_dots(parts_[p], first, count, next, scratch);
        else outputs_by_tiles(parts_[p], first, count, next, scratch);
    }
    write_outputs(first, count);
}

// Strips of sums with their number. Each store is of 8 bytes and a release: the device reads a sum
// and its number at once, and writes over x when it has read them all.
void Exchange::write_outputs(int64_t first, int64_t count) {
    const uint64_t number = (uint64_t)(uint32_t)number_ << 32;
    for (int64_t token : wanted_) {
        const int64_t at = token * s_.hidden + first;
        for (int64_t i = at; i < at + count; ++i)
            __atomic_store_n(s_.y + i, number | bit_cast<uint32_t>(sums_[i]), __ATOMIC_RELEASE);
    }
}

void Exchange::work(Team& team, int thread) {
    if (thread == 0 && is_little_ && is_polled_) say_coming();
    if (inputs_ > 0) {
        share(prepare_next_, inputs_, thread, [&](int64_t task, int64_t) { prepare_input(task); });
        team.barrier(thread);
    }
    Scratch& scratch = scratch_[thread];
    share(gate_next_, (int64_t)parts_.size() * gate_strips_, thread,
          [&](int64_t task, int64_t ahead) { compute_gates(task, ahead, scratch); });
    team.barrier(thread);
    share(output_next_, output_strips_, thread, [&](int64_t task, int64_t ahead) {
        if (thread == 0 && is_polled_ && ahead >= output_strips_) say_coming();
        add_outputs(task, ahead, scratch);
    });
    release_expert_tiles();
}

}  // namespace hetero::experts
