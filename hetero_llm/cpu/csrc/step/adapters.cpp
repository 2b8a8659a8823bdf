// Slots of LoRA adapters and their products: see adapters.h.

#include "adapters.h"

#include <algorithm>
#include <cstring>

#include "rows.h"

namespace hetero {
namespace {

constexpr int64_t kShrinkDepth = 1024;  // columns of a block of A
constexpr int64_t kRowsTogether = 64;   // tokens whose sums a thread holds at a time
static_assert(kPairsTogether <= kRowsTogether, "the scratch of a thread has the sums of a run");
constexpr int64_t kMostRanks = 512;     // of a part
constexpr int64_t kStripBytes = 64;     // of a strip in each step of a panel
constexpr int64_t kPerPanel = kPanel / kStrip;

// -- slots ----------------------------------------------------------------------------------------

int64_t bytes_of(const Matrix& m) {
    return m.padded_outputs * m.padded_depth * element_bytes(m.format);
}

Matrix matrix_of(Format format, int64_t outputs, int64_t depth, int64_t padded_depth) {
    return {format, outputs, depth, round_up(outputs, kPanel), padded_depth,
            nullptr, nullptr, nullptr, {}};
}

struct Shape {
    int64_t outputs, depth;
};

// Without outputs where the layer does not have the product.
Shape shape_of(const Model& model, int64_t index, int64_t product, int64_t expert) {
    const HeteroModel& s = model.sizes;
    if (expert >= 0) {
        if (expert >= (int64_t)model.layers[index].experts.size()) return {0, 0};
        if (product == kGateUpProduct) return {2 * s.expert_inner, s.hidden};
        return {product == kDownProduct ? s.hidden : 0, s.expert_inner};
    }
    const Layer& layer = model.layers[index];
    const bool sparse = !layer.experts.empty();
    switch (product) {
        case kQkvProduct: return {(s.heads + 2 * s.kv_heads) * s.dim, s.hidden};
        case kOutProduct: return {s.hidden, s.heads * s.dim};
        case kGateUpProduct: return {2 * layer.inner, s.hidden};
        case kDownProduct: return {layer.inner ? s.hidden : 0, layer.inner};
        case kRouterProduct: return {sparse ? s.experts : 0, s.hidden};
        default: return {sparse && layer.inner ? 1 : 0, s.hidden};
    }
}

bool fits(const HeteroAdapterProduct& from, const HeteroAdapterPart* parts, Shape shape) {
    if (from.ranks < 1 || from.columns != shape.depth || from.num_parts < 1) return false;
    const int64_t inner = shape.outputs / 2;
    int64_t row = 0;
    for (int64_t i = 0; i < from.num_parts; ++i) {
        const HeteroAdapterPart& p = parts[i];
        if (p.rank < 1 || p.rank > kMostRanks || p.first_rank < 0 ||
            p.first_rank + p.rank > from.ranks)
            return false;
        if (p.rows < 1 || p.first_row < row || p.first_row + p.rows > shape.outputs) return false;
        row = p.first_row + p.rows;
        if (from.product == kGateUpProduct && p.rows != inner && p.rows != shape.outputs)
            return false;
    }
    return true;
}

ShrinkBlock block_of(Format format, int64_t ranks, int64_t columns, Isa isa) {
    const int64_t strips = strips_of(ranks), padded = round_up(columns, kDepth);
    const int64_t folds = isa == kAmx || strips > 2 ? 1 : kPerPanel / strips;
    const int64_t depth = padded / folds;
    return {matrix_of(format, folds * strips * kStrip, depth, depth), folds};
}

// Where a slot has one of the products that it is given.
AdapterProduct& place_in(std::vector<AdapterProduct>& products,
                         std::vector<AdapterProduct>& experts, const Model& model,
                         const HeteroAdapterProduct& from) {
    if (from.expert < 0) return products[from.layer * kProducts + from.product];
    const int64_t number = from.layer * model.sizes.experts + from.expert;
    return experts[2 * number + (from.product == kDownProduct)];
}

// Lays out one product without memory.
AdapterProduct lay_out(const HeteroAdapterProduct& from, const HeteroAdapterPart* parts,
                       Shape shape, Format format, Isa isa) {
    AdapterProduct to;
    to.ranks = from.ranks;
    for (int64_t k = 0; k < from.columns; k += kShrinkDepth)
        to.blocks.push_back(
            block_of(format, from.ranks, std::min(kShrinkDepth, from.columns - k), isa));
    const bool paired = from.product == kGateUpProduct;
    const int64_t step = strip_depth(format, isa);
    int64_t deepest = 0;
    for (int64_t i = 0; i < from.num_parts; ++i) {
        const HeteroAdapterPart& p = parts[i];
        const int64_t depth = round_up(p.rank, step);
        deepest = std::max(deepest, depth);
        to.shrunk.push_back({p.first_rank, to.width, matrix_of(format, 0, p.rank, depth)});
        if (!paired) {
            const int64_t end = p.first_row + p.rows, panel = p.first_row / kPanel * kPanel;
            to.parts.push_back({p.first_row / kStrip, strips_of(end), to.width, to.width,
                                matrix_of(format, end - panel, p.rank, depth)});
        }
        to.width += depth;
    }
    if (paired) {
        const int64_t strips = 2 * strips_of(shape.outputs / 2), last = to.shrunk.back().at;
        to.parts.push_back(
            {0, strips, 0, last, matrix_of(format, strips * kStrip, deepest, deepest)});
        to.width = last + deepest;
    }
    return to;
}

// In the order of its use.
void take_memory(AdapterProduct& product, Arena& arena) {
    for (ShrinkBlock& block : product.blocks) block.a.data = arena.take<char>(bytes_of(block.a));
    product.scales = arena.take<float>(product.ranks);
    for (AdapterPart& part : product.parts) part.b.data = arena.take<char>(bytes_of(part.b));
}

void pack_a(const AdapterProduct& to, const HeteroAdapterProduct& from, bool is_bf16) {
    const int64_t width = strips_of(from.ranks) * kStrip;
    int64_t begin = 0;
    for (const ShrinkBlock& block : to.blocks) {
        const int64_t end = std::min(begin + kShrinkDepth, from.columns);
        for (int64_t fold = 0; fold < block.folds; ++fold) {
            const int64_t first = begin + fold * block.a.depth;
            if (first >= end) break;
            Matrix piece = block.a;
            piece.depth = std::min(piece.depth, end - first);
            pack(piece, (const char*)from.a + first * element_bytes(piece.format), is_bf16,
                 from.columns, 0, from.ranks, fold * width);
        }
        begin = end;
    }
}

// Rows of gate, up or both to their strips.
void pack_pair(const AdapterPart& to, const HeteroAdapterPart& from, int64_t inner, bool is_bf16) {
    Matrix b = to.b;
    b.depth = from.rank;
    for (int64_t row = 0, more; row < from.rows; row += more) {
        const int64_t output = from.first_row + row, up = output >= inner;
        const int64_t within = output - up * inner;
        more = std::min(kStrip, inner - within);
        pack(b, from.b, is_bf16, from.rank, row, row + more, (2 * (within / kStrip) + up) * kStrip);
    }
}

// -- products -------------------------------------------------------------------------------------

const AdapterProduct* product_of(const AdapterGroup& group, int64_t layer, Product product) {
    const AdapterProduct& found = group.slot->products[layer * kProducts + product];
    return found.ranks ? &found : nullptr;
}

int64_t blocks_of(int64_t rows) { return (rows + kRowsTogether - 1) / kRowsTogether; }

// Scratch of a thread: gathered inputs, sums of two blocks of columns.
struct Scratch {
    float *gathered, *sums, *more;
};

Scratch scratch_of(const Adapters& s, int thread) {
    Scratch found;
    found.gathered = s.scratch + thread * s.scratch_size;
    found.sums = found.gathered + kRowsTogether * kShrinkDepth;
    found.more = found.sums + kRowsTogether * s.sums_width;
    return found;
}

char* shrunk_row(const Adapters& s, int64_t i) {
    return s.shrunk + i * s.width * element_bytes(s.format);
}

char* pair_row(const Adapters& s, int64_t pair) {
    return s.pairs + pair * s.width * element_bytes(s.format);
}

// What the adapter of an expert's pair adds to its product; null: nothing.
const AdapterProduct* product_of_pair(const Adapters& s, const ExpertProduct& product, int64_t i) {
    const AdapterSlot* slot = s.slot_of[product.tokens[i]];
    if (!slot || slot->experts.empty()) return nullptr;
    const AdapterProduct& found = slot->experts[2 * product.number + product.down];
    return found.ranks ? &found : nullptr;
}

// Block `index` of the columns of tokens order[first .. last).
Rows rows_of(const Adapters& s, const AdapterRows& in, int64_t first, int64_t last, int64_t index,
             int64_t columns, float* gathered) {
    const int64_t bytes = element_bytes(s.format);
    const char* data = (const char*)in.data + index * kShrinkDepth * bytes;
    const int64_t begin = in.sorted ? first : s.order[first];
    const int64_t end = in.sorted ? last : s.order[last - 1] + 1;
    if (end - begin == last - first) return {data + begin * in.stride * bytes, in.stride, nullptr};
    const int64_t size = columns * bytes;
    for (int64_t i = first; i < last; ++i)
        std::memcpy((char*)gathered + (i - first) * size, data + s.order[i] * in.stride * bytes,
                    size);
    return {gathered, columns, nullptr};
}

// Sums [tokens][ranks] of one block of columns; rows are sums_width apart.
void shrink_block(const Adapters& s, const AdapterProduct& p, const AdapterRows& in, int64_t first,
                  int64_t last, int64_t index, float* gathered, float* sums, Isa isa) {
    const ShrinkBlock& block = p.blocks[index];
    const int64_t depth = block.a.padded_depth, strips = strips_of(p.ranks);
    const int64_t all = block.folds * strips, width = strips * kStrip;
    const Rows rows = rows_of(s, in, first, last, index, block.folds * depth, gathered);
    StripProduct product{};
    product.format = s.format;
    product.depth = depth;
    product.x = rows.data;
    product.x_stride = rows.stride;
    product.rows = last - first;
    product.out_stride = s.sums_width;
    for (int64_t strip = 0; strip < all; strip += kPerPanel) {
        product.panel =
            (const char*)block.a.data + strip * kStrip * depth * element_bytes(s.format);
        product.strips = std::min(kPerPanel, all - strip);
        for (int64_t i = 0; i < product.strips; ++i)
            product.offsets[i] = (strip + i) / strips * depth;
        product.out = sums + strip * kStrip;
        multiply_strips(product, isa);
    }
    for (int64_t i = 0; i < product.rows && block.folds > 1; ++i, sums += s.sums_width)
        for (int64_t fold = 1; fold < block.folds; ++fold)
            add(sums, sums + fold * width, width, isa);
}

// Scales a row's sums and rounds them to the format of B.
void place_shrunk(const Adapters& s, const AdapterProduct& p, float* sums, char* to, Isa isa) {
    for (int64_t rank = 0; rank < p.ranks; ++rank) sums[rank] *= p.scales[rank];
    for (const ShrunkPart& part : p.shrunk)
        prepare_row(part.like, sums + part.first_rank, to + part.at * element_bytes(s.format),
                    nullptr, isa);
}

// The whole shrink of tokens order[first .. last), or of rows, by the calling thread. The result of
// token i goes to place(i).
template <typename Place>
void shrink_tokens(const Adapters& s, const AdapterProduct& p, const AdapterRows& in, int64_t first,
                   int64_t last, int thread, Isa isa, Place place) {
    const Scratch own = scratch_of(s, thread);
    for (size_t b = 0; b < p.blocks.size(); ++b) {
        shrink_block(s, p, in, first, last, b, own.gathered, b ? own.more : own.sums, isa);
        for (int64_t i = 0; b && i < last - first; ++i)
            add(own.sums + i * s.sums_width, own.more + i * s.sums_width, p.ranks, isa);
    }
    for (int64_t i = first; i < last; ++i)
        place_shrunk(s, p, own.sums + (i - first) * s.sums_width, place(i), isa);
}

// Calls body(product, first, last, block) for this thread's share of the step's units of work: some
// tokens of a group and, if `split`, one block of columns, else -1 for all.
template <typename Body>
void for_units(const Adapters& s, int64_t layer, Product product, bool split, int thread,
               int threads, Body body) {
    int64_t units = 0, unit = 0;
    for (const AdapterGroup& group : s.groups)
        if (const AdapterProduct* p = product_of(group, layer, product))
            units += blocks_of(group.last - group.first) * (split ? p->blocks.size() : 1);
    const int64_t begin = units * thread / threads, end = units * (thread + 1) / threads;
    for (const AdapterGroup& group : s.groups) {
        const AdapterProduct* p = product_of(group, layer, product);
        if (!p) continue;
        const int64_t blocks = split ? p->blocks.size() : 1;
        for (int64_t first = group.first; first < group.last; first += kRowsTogether) {
            const int64_t last = std::min(first + kRowsTogether, group.last);
            for (int64_t block = 0; block < blocks; ++block, ++unit)
                if (begin <= unit && unit < end) body(*p, first, last, split ? block : -1);
        }
    }
}

// Whether there are too few tokens for all threads, so that they share the columns, too.
bool shares_columns(const Adapters& s, int64_t layer, Product product, int threads) {
    int64_t units = 0, blocks = 0;
    for (const AdapterGroup& group : s.groups)
        if (const AdapterProduct* p = product_of(group, layer, product)) {
            units += blocks_of(group.last - group.first);
            blocks = p->blocks.size();
        }
    return blocks > 1 && units < threads;
}

// Rows of a tile that have one adapter, `rows` of them from the tile's row `row` on, and their
// shrunk rows; places: see StripProduct.
struct AdaptedRun {
    const char* shrunk;
    int64_t row, rows;
    const int32_t* places;
};

// Adds one part to a run of rows of a tile.
void expand_part(const Adapters& s, const AdapterPart& part, const AdaptedRun& run,
                 const AdaptedTile& tile, Isa isa) {
    const int64_t begin = std::max(part.first, tile.first);
    const int64_t end = std::min(part.last, tile.first + tile.strips);
    if (begin >= end) return;
    const int64_t depth = part.b.padded_depth;
    const int64_t panel_bytes = depth * kPanel * element_bytes(s.format);
    StripProduct product{};
    product.format = s.format;
    product.depth = depth;
    product.x_stride = s.width;
    product.out_stride = tile.stride;
    product.add = true;
    product.x = run.shrunk;
    product.rows = run.rows;
    product.places = run.places;
    for (int64_t strip = begin, next; strip < end; strip = next) {
        next = std::min(end, (strip / kPerPanel + 1) * kPerPanel);
        product.panel = (const char*)part.b.data +
                        (strip / kPerPanel - part.first / kPerPanel) * panel_bytes +
                        strip % kPerPanel * kStripBytes;
        product.strips = next - strip;
        for (int64_t i = 0; i < product.strips; ++i)
            product.offsets[i] = (strip + i) % 2 ? part.odd : part.even;
        product.out = tile.data + (run.row - tile.row) * tile.stride +
                      (strip - tile.first) * kStrip;
        multiply_strips(product, isa);
    }
}

}  // namespace

void make_slots(Adapters& adapters, int64_t count, Format format) {
    adapters.format = format;
    adapters.slots.resize(count);
    adapters.counts.resize(count + 1);
}

int64_t lay_out_slot(Adapters& adapters, const Model& model, int64_t slot,
                     const HeteroAdapter& adapter, Isa isa) {
    if (slot < 0 || slot >= (int64_t)adapters.slots.size()) return -1;
    AdapterSlot& to = adapters.slots[slot];
    to.products.clear();
    to.experts.clear();
    std::vector<AdapterProduct> products(model.sizes.layers * kProducts), experts;
    const HeteroAdapterPart* parts = adapter.parts;
    for (int64_t i = 0; i < adapter.num_products; ++i) {
        const HeteroAdapterProduct& from = adapter.products[i];
        if (from.layer < 0 || from.layer >= model.sizes.layers || from.product < 0 ||
            from.product >= kProducts)
            return -1;
        const Shape shape = shape_of(model, from.layer, from.product, from.expert);
        if (!shape.outputs) return -1;
        if (from.expert >= 0 && experts.empty())
            experts.resize(2 * model.sizes.layers * model.sizes.experts);
        AdapterProduct& product = place_in(products, experts, model, from);
        if (product.ranks || !fits(from, parts, shape)) return -1;
        product = lay_out(from, parts, shape, adapters.format, isa);
        parts += from.num_parts;
    }
    to.memory = std::make_unique<Arena>();  // zeros, which padding has to be
    const auto take_all = [&] {
        for (AdapterProduct& product : products) take_memory(product, *to.memory);
        for (AdapterProduct& product : experts) take_memory(product, *to.memory);
    };
    take_all();  // counts
    if (!to.memory->reserve()) return -2;
    take_all();
    to.products = std::move(products);
    to.experts = std::move(experts);
    return 0;
}

void pack_slot(Adapters& adapters, const Model& model, int64_t slot,
               const HeteroAdapter& adapter, int64_t part, int64_t parts) {
    const bool is_bf16 = adapters.format == Format::kBf16;
    const HeteroAdapterPart* given = adapter.parts;
    for (int64_t i = 0; i < adapter.num_products; given += adapter.products[i].num_parts, ++i) {
        if (i % parts != part) continue;
        const HeteroAdapterProduct& from = adapter.products[i];
        AdapterSlot& own = adapters.slots[slot];
        AdapterProduct& to = place_in(own.products, own.experts, model, from);
        const HeteroModel& sizes = model.sizes;
        const int64_t inner = from.expert < 0 ? model.layers[from.layer].inner : sizes.expert_inner;
        pack_a(to, from, is_bf16);
        std::memcpy(to.scales, from.scales, from.ranks * 4);
        for (int64_t p = 0; p < from.num_parts; ++p) {
            if (from.product == kGateUpProduct)
                pack_pair(to.parts[0], given[p], inner, is_bf16);
            else
                pack(to.parts[p].b, given[p].b, is_bf16, given[p].rank, 0, given[p].rows,
                     given[p].first_row % kPanel);
        }
    }
}

bool plan_adapters(Adapters& s, const HeteroStep& step, int threads, int64_t padded_inputs,
                   int64_t experts_per_token) {
    s.groups.clear();
    if (!step.adapter_slots) return false;
    std::fill(s.counts.begin(), s.counts.end(), 0);
    int64_t total = 0;
    for (int64_t i = 0; i < step.num_sequences; ++i)
        if (step.adapter_slots[i] >= 0) {
            s.counts[step.adapter_slots[i] + 1] += step.num_scheduled[i];
            total += step.num_scheduled[i];
        }
    if (!total) return false;
    int64_t depth_blocks = 0;
    s.of_experts = false;
    s.sums_width = s.width = 0;
    for (size_t i = 0; i < s.slots.size(); ++i) {
        const int64_t first = s.counts[i], last = first + s.counts[i + 1];
        s.counts[i + 1] = last;
        if (first == last) continue;
        s.groups.push_back({&s.slots[i], first, last});
        for (const auto* products : {&s.slots[i].products, &s.slots[i].experts})
            for (const AdapterProduct& p : *products) {
                s.sums_width = std::max(s.sums_width, round_up(p.ranks, kPanel));
                s.width = std::max(s.width, p.width);
                depth_blocks = std::max(depth_blocks, (int64_t)p.blocks.size());
            }
        s.of_experts |= !s.slots[i].experts.empty();
    }
    s.order.resize(total);
    int64_t token = 0;
    for (int64_t i = 0; i < step.num_sequences; token += step.num_scheduled[i], ++i)
        if (step.adapter_slots[i] >= 0)
            for (int64_t k = 0; k < step.num_scheduled[i]; ++k)
                s.order[s.counts[step.adapter_slots[i]]++] = (int32_t)(token + k);
    const int64_t bytes = element_bytes(s.format);
    s.width = round_up(s.width * bytes, kLine) / bytes;
    s.scratch_size = kRowsTogether * (kShrinkDepth + 2 * s.sums_width);
    s.scratch.reserve(threads * s.scratch_size);
    s.rows.reserve(total * padded_inputs * bytes);
    s.shrunk.reserve(total * s.width * bytes);
    s.sums.reserve(depth_blocks * total * s.sums_width);
    if (!s.of_experts) return true;
    s.slot_of.assign(token, nullptr);
    for (const AdapterGroup& group : s.groups)
        for (int64_t i = group.first; i < group.last; ++i) s.slot_of[s.order[i]] = group.slot;
    s.pairs.reserve(token * experts_per_token * s.width * bytes);
    s.pair_rows.reserve(threads * kPairsTogether * padded_inputs * bytes);
    return true;
}

bool adapts(const Adapters& adapters, int64_t layer, Product product) {
    for (const AdapterGroup& group : adapters.groups)
        if (product_of(group, layer, product)) return true;
    return false;
}

bool shrink(Adapters& s, int64_t layer, Product product, const AdapterRows& in, int thread,
            int threads, Isa isa) {
    const bool split = shares_columns(s, layer, product, threads);
    const int64_t total = s.order.size();
    for_units(s, layer, product, split, thread, threads,
              [&](const AdapterProduct& p, int64_t first, int64_t last, int64_t block) {
        if (split)
            shrink_block(s, p, in, first, last, block, scratch_of(s, thread).gathered,
                         s.sums + (block * total + first) * s.sums_width, isa);
        else
            shrink_tokens(s, p, in, first, last, thread, isa,
                          [&](int64_t i) { return shrunk_row(s, i); });
    });
    return split;
}

void add_sums(Adapters& s, int64_t layer, Product product, int thread, int threads, Isa isa) {
    const int64_t total = s.order.size();
    const int64_t begin = total * thread / threads, end = total * (thread + 1) / threads;
    for (const AdapterGroup& group : s.groups) {
        const AdapterProduct* p = product_of(group, layer, product);
        if (!p) continue;
        const int64_t last = std::min(group.last, end);
        for (int64_t i = std::max(group.first, begin); i < last; ++i) {
            float* to = s.sums + i * s.sums_width;
            for (size_t b = 1; b < p->blocks.size(); ++b)
                add(to, s.sums + (b * total + i) * s.sums_width, p->ranks, isa);
            place_shrunk(s, *p, to, shrunk_row(s, i), isa);
        }
    }
}

void expand(const Adapters& s, int64_t layer, Product product, const AdaptedTile& tile, Isa isa) {
    const auto begin = s.order.begin();
    for (const AdapterGroup& group : s.groups) {
        const AdapterProduct* p = product_of(group, layer, product);
        if (!p) continue;
        const auto end = begin + group.last;
        const auto first = std::lower_bound(begin + group.first, end, tile.row);
        const auto last = std::lower_bound(first, end, tile.row + tile.rows);
        if (first == last) continue;
        const AdaptedRun run{shrunk_row(s, first - begin), *first, last - first, &*first};
        for (const AdapterPart& part : p->parts) expand_part(s, part, run, tile, isa);
    }
}

bool adapts_pair(const Adapters& s, const ExpertProduct& product, int64_t i) {
    return product_of_pair(s, product, i) != nullptr;
}

int64_t run_of_pairs(const Adapters& s, const ExpertProduct& product, int64_t begin, int64_t end) {
    const AdapterSlot* slot = s.slot_of[product.tokens[begin]];
    int64_t last = begin + 1;
    while (last < end && s.slot_of[product.tokens[last]] == slot) ++last;
    return last - begin;
}

void shrink_pairs(Adapters& s, const ExpertProduct& product, int64_t begin, int64_t end,
                  const void* rows, int64_t stride, int thread, Isa isa) {
    shrink_tokens(s, *product_of_pair(s, product, begin), {rows, stride, true}, 0, end - begin,
                  thread, isa,
                  [&](int64_t i) { return pair_row(s, product.first + begin + i); });
}

void expand_pairs(const Adapters& s, const ExpertProduct& product, const AdaptedTile& tile,
                  Isa isa) {
    for (int64_t i = tile.row, count; i < tile.row + tile.rows; i += count) {
        count = run_of_pairs(s, product, i, tile.row + tile.rows);
        const AdapterProduct* p = product_of_pair(s, product, i);
        if (!p) continue;
        const AdaptedRun run{pair_row(s, product.first + i), i, count, nullptr};
        for (const AdapterPart& part : p->parts) expand_part(s, part, run, tile, isa);
    }
}

}  // namespace hetero
