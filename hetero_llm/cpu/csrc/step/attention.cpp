// Attention of a step as tasks: cuts tokens and contexts into tasks, runs them, and joins the
// results of cut contexts. See attention.h.

#include "attention.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "arena.h"
#include "attention_parts.h"
#include "matmul.h"

namespace hetero {

namespace {

constexpr int64_t kTasksPerThread = 2;
constexpr int64_t kShortest = 256;  // tokens of a piece of a cut context, at least
// The most lanes for which products along the dimension are faster than the kernel for many lanes.
constexpr int64_t kFewLanes = 8, kFewLanesAmx = 4;

// Queries of one sequence that are attended together, for every KV head; pieces: parts of their
// context first .. last, which become tasks of their own.
struct QueryTile {
    int64_t sequence, step_token, query, queries, first, last, pieces;
};

// Partial results of one task in pieces: [pieces][lanes][stride] floats from `partial`.
struct Join {
    int64_t step_token, kv_head, partial, pieces, lanes;
};

}  // namespace

struct AttentionPlan {
    int threads;
    Work work;
    Isa isa;
    Kernel few, many;
    int64_t scratch_bytes, stride, lanes_joined, heads_together, few_lanes;
    std::vector<QueryTile> tiles;
    std::vector<Task> tasks;
    std::vector<Join> joins;
    Buffer<char> scratch;   // [threads][scratch_bytes]
    Buffer<float> partial;  // of tasks whose context is cut
    alignas(64) std::atomic<int64_t> next;
};

namespace {

int64_t tokens_of(const QueryTile& tile) { return tile.last - tile.first; }

// What one KV head of a tile costs, in arbitrary units: reading a token, and each lane's products.
int64_t cost_of(const AttentionPlan& plan, const QueryTile& tile) {
    return tokens_of(tile) * (4 + tile.queries * plan.work.group);
}

void make_tiles(AttentionPlan* plan, const AttentionTokens& tokens, int64_t most_lanes) {
    const int64_t group = plan->work.group, window = plan->work.window;
    plan->tiles.clear();
    int64_t step_token = 0;
    for (int64_t s = 0; s < tokens.sequences; ++s) {
        const int64_t start = tokens.num_computed[s], count = tokens.num_scheduled[s];
        // Nodes of a tree share their context: the fewer passes over it the better.
        const int64_t most_queries = most(1, (tokens.is_tree[s] ? kMaxTile : most_lanes) / group);
        const int64_t parts = (count + most_queries - 1) / most_queries;
        // Even tiles, but of whole vectors where the group allows it.
        const int64_t unit = kLanes % group == 0 ? kLanes / group : 1;
        const int64_t even = least(most_queries, round_up((count + parts - 1) / parts, unit));
        for (int64_t query = 0; query < count; query += even) {
            const int64_t size = least(even, count - query);
            const int64_t position = tokens.is_tree[s] ? tokens.bases[s] : start + query;
            const int64_t last = start + (tokens.is_tree[s] ? count : query + size);
            const int64_t first = most(0, position - window + 1);
            plan->tiles.push_back({s, step_token + query, query, size, first, last, 1});
        }
        step_token += count;
    }
}

// The time of all tasks, in units of cost, when threads take one after the other.
int64_t makespan(const AttentionPlan& plan, std::vector<int64_t>& busy) {
    busy.assign(plan.threads, 0);
    for (const QueryTile& tile : plan.tiles)
        for (int64_t head = 0; head < plan.work.kv_heads; ++head)
            *std::min_element(busy.begin(), busy.end()) += cost_of(plan, tile);
    return *std::max_element(busy.begin(), busy.end());
}

// Cuts the contexts of the largest tasks where threads would otherwise wait for one another.
void cut_contexts(AttentionPlan* plan) {
    const int64_t heads = plan->work.kv_heads, threads = plan->threads;
    int64_t total = 0, largest = 0;
    for (QueryTile& tile : plan->tiles) {
        total += cost_of(*plan, tile) * heads;
        largest = most(largest, cost_of(*plan, tile));
    }
    const int64_t share = total / threads, count = (int64_t)plan->tiles.size() * heads;
    if (threads == 1 || largest * 4 <= share) return;
    std::vector<int64_t> busy;
    // With many tasks and one that is large, the largest alone says what cutting gains.
    const int64_t time = count <= 4 * threads ? makespan(*plan, busy) : largest;
    if (time * 4 <= share * 5) return;
    const int64_t limit = most(1, share / kTasksPerThread);
    for (QueryTile& tile : plan->tiles) {
        const int64_t wanted = (cost_of(*plan, tile) + limit - 1) / limit;
        tile.pieces = most(1, least(wanted, tokens_of(tile) / kShortest));
    }
}

// KV heads of a task of a single query: as many as leave threads enough tasks and fit the scratch.
int64_t heads_together(const AttentionPlan& plan) {
    const int64_t tasks = (int64_t)plan.tiles.size() * plan.work.kv_heads;
    const int64_t spare = tasks / (kTasksPerThread * plan.threads);
    return most(1, least(least(spare, plan.work.kv_heads), kMaxTile / plan.work.group));
}

void add_tasks(AttentionPlan* plan, const AttentionTokens& tokens, const QueryTile& tile,
               int64_t* partial) {
    const int64_t s = tile.sequence, lanes = tile.queries * plan->work.group;
    const int64_t length = round_up((tokens_of(tile) + tile.pieces - 1) / tile.pieces, kTokens);
    // By the whole sequence, so that results do not depend on how tiles are cut.
    const bool few = !plan->many || tokens.num_scheduled[s] * plan->work.group <= plan->few_lanes;
    const Kernel kernel = few ? plan->few : plan->many;
    const uint64_t* ancestors =
        tokens.is_tree[s] ? tokens.ancestors + tile.step_token - tile.query : nullptr;
    const int64_t base = tokens.is_tree[s] ? tokens.bases[s] : tokens.num_computed[s];
    const int32_t* block_table = tokens.block_tables + tokens.request_slots[s] * tokens.columns;
    Task task{block_table, ancestors, tokens.num_computed[s], base, tile.query, 0, lanes, 0,
              tile.first, tile.last, tile.step_token, -1, kernel, 1};
    const int64_t heads = plan->work.kv_heads;
    if (tile.pieces == 1) {
        const int64_t together = few && tile.queries == 1 ? plan->heads_together : 1;
        for (; task.kv_head < heads; task.kv_head += task.kv_heads) {
            task.kv_heads = least(together, heads - task.kv_head);
            plan->tasks.push_back(task);
        }
        return;
    }
    for (; task.kv_head < heads; ++task.kv_head) {
        Join join{tile.step_token, task.kv_head, *partial, 0, lanes};
        task.first = tile.first;
        while (task.first < tile.last) {
            const int64_t end = (task.first / kTokens) * kTokens + length;
            task.last = least(end, tile.last);
            task.partial = *partial;
            plan->tasks.push_back(task);
            *partial += lanes * plan->stride;
            ++join.pieces;
            task.first = task.last;
        }
        plan->joins.push_back(join);
        plan->lanes_joined += lanes;
    }
}

}  // namespace

AttentionPlan* new_attention_plan(int threads) {
    AttentionPlan* plan = new AttentionPlan();
    plan->threads = threads;
    const int64_t many = most(tiles_scratch(), many_lanes_scratch());
    plan->scratch_bytes = round_up(most(few_lanes_scratch(), many), 4096);
    plan->scratch.reserve(plan->scratch_bytes * threads);
    return plan;
}

void free_attention_plan(AttentionPlan* plan) { delete plan; }

void plan_attention(AttentionPlan* plan, const CacheShape& cache, const AttentionTokens& tokens,
                    int64_t heads, int64_t window, float scale, Isa isa) {
    const int64_t all = window > 0 ? least(window, kAllTokens) : kAllTokens;
    plan->work = {cache.data, cache.block_size, 2 * cache.layers, cache.kv_heads,
                  heads / cache.kv_heads, cache.dim, all, 0, scale * kLog2e, nullptr, 0};
    plan->isa = isa;
    plan->few = few_lanes_kernel(cache.is_bf16, cache.dim, isa);
    plan->many = tiles_kernel(cache.is_bf16, cache.dim, isa);
    plan->few_lanes = plan->many ? kFewLanesAmx : kFewLanes;
    if (!plan->many) plan->many = many_lanes_kernel(cache.is_bf16, cache.dim, isa);
    plan->stride = round_up(cache.dim + 2, kLanes);
    // Smaller tiles of a chunk before cut contexts: they need no joining.
    const int64_t enough = kTasksPerThread * plan->threads;
    for (int64_t lanes = kMaxTile; lanes >= kLanes; lanes = lanes == kMaxTile ? 48 : lanes / 3) {
        make_tiles(plan, tokens, lanes);
        if ((int64_t)plan->tiles.size() * cache.kv_heads >= enough) break;
    }
    // Large tasks first, so that the last ones to end are small.
    std::stable_sort(plan->tiles.begin(), plan->tiles.end(),
                     [plan](const QueryTile& a, const QueryTile& b) {
                         return cost_of(*plan, a) > cost_of(*plan, b);
                     });
    cut_contexts(plan);
    plan->heads_together = heads_together(*plan);
    plan->tasks.clear();
    plan->joins.clear();
    plan->lanes_joined = 0;
    int64_t partial = 0;
    for (const QueryTile& tile : plan->tiles) add_tasks(plan, tokens, tile, &partial);
    plan->partial.reserve(partial);
}

bool needs_merge(const AttentionPlan* plan) { return !plan->joins.empty(); }

void begin_layer(AttentionPlan* plan) { plan->next.store(0, std::memory_order_relaxed); }

void attend(AttentionPlan* plan, int64_t layer, const void* q, int64_t q_stride, float* out,
            int64_t out_stride, int thread) {
    Work work = plan->work;
    work.piece_offset = 2 * layer;
    work.q = q;
    work.q_stride = q_stride;
    void* scratch = plan->scratch + thread * plan->scratch_bytes;
    const int64_t count = (int64_t)plan->tasks.size();
    for (;;) {
        const int64_t i = plan->next.fetch_add(1, std::memory_order_relaxed);
        if (i >= count) return;
        const Task& task = plan->tasks[i];
        Results to;
        if (task.partial < 0)
            to = {out + task.step_token * out_stride + task.kv_head * work.group * work.dim,
                  out_stride, work.dim, false};
        else
            to = {plan->partial + task.partial, work.group * plan->stride,
                  plan->stride, true};
        task.kernel(work, task, to, scratch);
    }
}

void merge(AttentionPlan* plan, float* out, int64_t out_stride, int thread) {
    const Work& work = plan->work;
    const int64_t first = plan->lanes_joined * thread / plan->threads;
    const int64_t last = plan->lanes_joined * (thread + 1) / plan->threads;
    int64_t begin = 0;
    for (const Join& j : plan->joins) {
        for (int64_t lane = most(first - begin, 0); lane < least(last - begin, j.lanes); ++lane) {
            const int64_t token = j.step_token + lane / work.group;
            const int64_t head = j.kv_head * work.group + lane % work.group;
            const float* partial = plan->partial + j.partial;
            join(partial + lane * plan->stride, j.pieces, j.lanes * plan->stride, work.dim,
                 out + token * out_stride + head * work.dim, plan->isa);
        }
        begin += j.lanes;
    }
}

}  // namespace hetero

// For tests and benches.
extern "C" {

void* hetero_attention_new(int64_t threads) { return hetero::new_attention_plan((int)threads); }

void hetero_attention_free(hetero::AttentionPlan* plan) { hetero::free_attention_plan(plan); }

// sizes: is_bf16, layers, block size, KV heads, dim, sequences, tokens, columns, heads, window,
// isa.
void hetero_attention_plan(hetero::AttentionPlan* plan, void* cache, const int64_t* sizes,
                           const int32_t* request_slots, const int32_t* num_computed,
                           const int32_t* num_scheduled, const int32_t* bases,
                           const uint8_t* is_tree, const uint64_t* ancestors,
                           const int32_t* block_tables, const float* scale) {
    const hetero::CacheShape shape{cache, sizes[0] != 0, sizes[1], sizes[2], sizes[3], sizes[4]};
    const hetero::AttentionTokens tokens{sizes[5], sizes[6], request_slots, num_computed,
                                         num_scheduled, bases, is_tree, ancestors, block_tables,
                                         sizes[7]};
    hetero::plan_attention(plan, shape, tokens, sizes[8], sizes[9], *scale,
                           (hetero::Isa)sizes[10]);
}

int64_t hetero_attention_needs_merge(const hetero::AttentionPlan* plan) {
    return hetero::needs_merge(plan);
}

void hetero_attention_begin_layer(hetero::AttentionPlan* plan) { hetero::begin_layer(plan); }

void hetero_attention_attend(hetero::AttentionPlan* plan, int64_t layer, const void* q,
                             int64_t q_stride, float* out, int64_t out_stride, int64_t thread) {
    hetero::attend(plan, layer, q, q_stride, out, out_stride, (int)thread);
    hetero::release_tiles();
}

void hetero_attention_merge(hetero::AttentionPlan* plan, float* out, int64_t out_stride,
                            int64_t thread) {
    hetero::merge(plan, out, out_stride, (int)thread);
}

}  // extern "C"
