// Slots of LoRA adapters and their products: see adapters.h.

#include "adapters.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "rows.h"

namespace hetero {
namespace {

constexpr int64_t kShrinkDepth = 1024;  // columns of a block of A
constexpr int64_t kRowsTogether = 64;   // of a call of either product
constexpr int64_t kMostRanks = 512;     // of a part

// Rows of B are short: a panel's depth is as long as `multiply` needs it, not a multiple of kDepth.
int64_t rank_step(Format format, Isa isa) {
    if (format == Format::kFloat) return 4;
    return isa == kAmx ? 32 : 8;  // a tile's depth; kUnroll steps of two
}

int64_t bytes_of(const Matrix& m) {
    return m.padded_outputs * m.padded_depth * element_bytes(m.format);
}

Matrix matrix_of(Format format, int64_t outputs, int64_t depth, int64_t step) {
    return {format, outputs, depth, round_up(outputs, kPanel), round_up(depth, step),
            nullptr, nullptr, nullptr, {}};
}

struct Shape {
    int64_t outputs, depth;
};

Shape shape_of(const Model& model, int64_t product) {
    const HeteroModel& s = model.sizes;
    switch (product) {
        case kQkvProduct: return {model.all_heads() * s.dim, s.hidden};
        case kOutProduct: return {s.hidden, s.heads * s.dim};
        case kGateUpProduct: return {2 * s.inner, s.hidden};
        default: return {s.hidden, s.inner};
    }
}

bool fits(const HeteroAdapterProduct& from, const HeteroAdapterPart* parts, Shape shape) {
    if (from.ranks < 1 || from.columns != shape.depth || from.num_parts < 1) return false;
    int64_t row = 0;
    for (int64_t i = 0; i < from.num_parts; ++i) {
        const HeteroAdapterPart& p = parts[i];
        if (p.rank < 1 || p.rank > kMostRanks || p.first_rank < 0 ||
            p.first_rank + p.rank > from.ranks)
            return false;
        if (p.rows < 1 || p.first_row < row || p.first_row + p.rows > shape.outputs) return false;
        row = p.first_row + p.rows;
    }
    return true;
}

// Lays out one product without memory. cut: the output at which parts are cut, 0 for none.
AdapterProduct lay_out(const HeteroAdapterProduct& from, const HeteroAdapterPart* parts,
                       Format format, int64_t cut, Isa isa) {
    AdapterProduct to;
    to.ranks = from.ranks;
    for (int64_t k = 0; k < from.columns; k += kShrinkDepth)
        to.a.push_back(matrix_of(format, from.ranks, std::min(kShrinkDepth, from.columns - k),
                                 kDepth));
    const int64_t step = rank_step(format, isa);
    for (int64_t i = 0; i < from.num_parts; ++i) {
        const HeteroAdapterPart& p = parts[i];
        const int64_t end = p.first_row + p.rows;
        const int64_t middle = p.first_row < cut && cut < end ? cut : end;
        for (int64_t first = p.first_row, last = middle; first < end; first = last, last = end) {
            to.parts.push_back({first, to.width, matrix_of(format, last - first, p.rank, step)});
            to.first_ranks.push_back(p.first_rank);
        }
        to.width += round_up(p.rank, step);
    }
    return to;
}

// Calls see(pointer, bytes) for each piece of a product's memory, in the order of its use.
template <typename See>
void for_pieces(AdapterProduct& product, See see) {
    for (Matrix& a : product.a) see(&a.data, bytes_of(a));
    see((void**)&product.scales, round_up(product.ranks * 4, kLine));
    for (AdapterPart& part : product.parts) see(&part.b.data, bytes_of(part.b));
}

const AdapterProduct* product_of(const AdapterGroup& group, int64_t layer, Product product) {
    const AdapterProduct& found = group.slot->products[layer * kProducts + product];
    return found.ranks ? &found : nullptr;
}

int64_t blocks_of(int64_t rows) { return (rows + kRowsTogether - 1) / kRowsTogether; }

// Scratch of a thread: gathered inputs, two blocks of sums, outputs of a part.
struct Scratch {
    float *gathered, *sums, *more, *outputs;
};

Scratch scratch_of(const Adapters& s, int thread) {
    Scratch found;
    found.gathered = s.scratch + thread * s.scratch_size;
    found.sums = found.gathered + kRowsTogether * kShrinkDepth;
    found.more = found.sums + kRowsTogether * s.ranks;
    found.outputs = found.more + kRowsTogether * s.ranks;
    return found;
}

// Block `block` of the columns of tokens order[first .. last), as `multiply` takes them.
Rows rows_of(const Adapters& s, const AdapterRows& in, int64_t first, int64_t last,
             const Matrix& a, int64_t block, float* gathered) {
    const int64_t bytes = element_bytes(s.format);
    const char* data = (const char*)in.data + block * kShrinkDepth * bytes;
    const int64_t begin = in.sorted ? first : s.order[first];
    const int64_t end = in.sorted ? last : s.order[last - 1] + 1;
    if (end - begin == last - first) return {data + begin * in.stride * bytes, in.stride, nullptr};
    const int64_t size = a.padded_depth * bytes;
    for (int64_t i = first; i < last; ++i)
        std::memcpy((char*)gathered + (i - first) * size, data + s.order[i] * in.stride * bytes,
                    size);
    return {gathered, a.padded_depth, nullptr};
}

// sums [tokens][ranks, in whole strips] of one block of columns.
void shrink_block(const Adapters& s, const AdapterProduct& p, const AdapterRows& in, int64_t first,
                  int64_t last, int64_t block, float* gathered, float* sums, Isa isa) {
    const Matrix& a = p.a[block];
    const Rows rows = rows_of(s, in, first, last, a, block, gathered);
    multiply(a, rows, last - first, 0, round_up(p.ranks, kStrip) / kStrip, sums, s.ranks, isa);
}

// Scales a token's sums and rounds them to the format of B.
void place_shrunk(const AdapterProduct& p, float* sums, Format format, char* to, Isa isa) {
    for (int64_t i = 0; i < p.ranks; ++i) sums[i] *= p.scales[i];
    int64_t at = -1;
    for (size_t i = 0; i < p.parts.size(); ++i) {
        const AdapterPart& part = p.parts[i];
        if (part.at == at) continue;  // a part that was cut
        at = part.at;
        prepare_row(part.b, sums + p.first_ranks[i], to + at * element_bytes(format), nullptr, isa);
    }
}

char* shrunk_row(const Adapters& s, int64_t i) {
    return s.shrunk + i * s.width * element_bytes(s.format);
}

// Calls body(product, first, last, block) for this thread's share of the step's units of work: some
// tokens of a group and, if `split`, one block of columns. block: -1 for all.
template <typename Body>
void for_units(const Adapters& s, int64_t layer, Product product, bool split, int thread,
               int threads, Body body) {
    int64_t units = 0;
    for (const AdapterGroup& group : s.groups)
        if (const AdapterProduct* p = product_of(group, layer, product))
            units += blocks_of(group.last - group.first) * (split ? p->a.size() : 1);
    int64_t unit = 0;
    const int64_t begin = units * thread / threads, end = units * (thread + 1) / threads;
    for (const AdapterGroup& group : s.groups) {
        const AdapterProduct* p = product_of(group, layer, product);
        if (!p) continue;
        for (int64_t first = group.first; first < group.last; first += kRowsTogether) {
            const int64_t last = std::min(first + kRowsTogether, group.last);
            const int64_t blocks = split ? p->a.size() : 1;
            for (int64_t block = 0; block < blocks; ++block, ++unit)
                if (begin <= unit && unit < end) body(*p, first, last, split ? block : -1);
        }
    }
}

// Whether there are too few tokens for all threads, so that they share the columns, too.
bool shares_columns(const Adapters& s, int64_t layer, Product product, int threads) {
    int64_t units = 0;
    size_t blocks = 0;
    for (const AdapterGroup& group : s.groups)
        if (const AdapterProduct* p = product_of(group, layer, product)) {
            units += blocks_of(group.last - group.first);
            blocks = p->a.size();
        }
    return blocks > 1 && units < threads;
}

// Where outputs [begin, end) of a part that begins at `first` lie in a tile.
struct Overlap {
    int64_t begin, end;
};

Overlap overlap_of(int64_t first, int64_t count, const AdaptedTile& tile) {
    return {std::max(first, tile.first), std::min(first + count, tile.first + tile.count)};
}

// Adds one part to tokens order[first .. last) of a tile. offset: added to the part's outputs; half:
// -1, or 0 for gate and 1 for up.
void expand_part(const Adapters& s, const AdapterPart& part, int64_t first, int64_t last,
                 const char* shrunk, const AdaptedTile& tile, int64_t offset, int half,
                 float* outputs, Isa isa) {
    const int64_t begin = part.first + offset;
    const Overlap own = overlap_of(begin, part.b.outputs, tile);
    if (own.begin >= own.end) return;
    const int64_t strip = (own.begin - begin) / kStrip;
    const int64_t strips = (own.end - begin + kStrip - 1) / kStrip - strip;
    const int64_t stride = strips * kStrip, skipped = own.begin - begin - strip * kStrip;
    const int64_t bytes = element_bytes(s.format);
    const Rows rows{shrunk + part.at * bytes, s.width, nullptr};
    multiply(part.b, rows, last - first, strip, strips, outputs - strip * kStrip, stride, isa);
    for (int64_t i = first; i < last; ++i) {
        const float* from = outputs + (i - first) * stride + skipped;
        float* to = tile.data + (s.order[i] - tile.row) * tile.stride;
        if (half < 0) {
            add(to + own.begin - tile.first, from, own.end - own.begin, isa);
            continue;
        }
        for (int64_t n = own.begin - tile.first, size; n < own.end - tile.first; n += size) {
            size = std::min(kStrip - n % kStrip, own.end - tile.first - n);
            float* strip_at = to + n / kStrip * 2 * kStrip + half * kStrip + n % kStrip;
            for (int64_t j = 0; j < size; ++j) strip_at[j] += from[j];
            from += size;
        }
    }
}

}  // namespace

Adapters::~Adapters() {
    for (AdapterSlot& slot : slots) std::free(slot.memory);
}

void make_slots(Adapters& adapters, int64_t count, Format format) {
    adapters.format = format;
    adapters.slots.resize(count);
    adapters.counts.resize(count + 1);
}

int64_t lay_out_slot(Adapters& adapters, const Model& model, int64_t slot,
                     const HeteroAdapter& adapter, Isa isa) {
    if (slot < 0 || slot >= (int64_t)adapters.slots.size()) return -1;
    const int64_t layers = model.sizes.layers;
    std::vector<AdapterProduct> products(layers * kProducts);
    const HeteroAdapterPart* parts = adapter.parts;
    int64_t bytes = 0;
    for (int64_t i = 0; i < adapter.num_products; ++i) {
        const HeteroAdapterProduct& from = adapter.products[i];
        if (from.layer < 0 || from.layer >= layers || from.product < 0 ||
            from.product >= kProducts || !fits(from, parts, shape_of(model, from.product)))
            return -1;
        AdapterProduct& to = products[from.layer * kProducts + from.product];
        if (to.ranks) return -1;
        const int64_t cut = from.product == kGateUpProduct ? model.sizes.inner : 0;
        to = lay_out(from, parts, adapters.format, cut, isa);
        for_pieces(to, [&](void**, int64_t size) { bytes += size; });
        parts += from.num_parts;
    }
    AdapterSlot& to = adapters.slots[slot];
    to.products.clear();
    if (bytes > to.bytes) {
        std::free(to.memory);
        to.memory = (char*)std::aligned_alloc(kLine, bytes);
        to.bytes = to.memory ? bytes : 0;
        if (!to.memory) return -2;
    }
    std::memset(to.memory, 0, bytes);  // padding
    char* next = to.memory;
    for (AdapterProduct& product : products)
        for_pieces(product, [&](void** at, int64_t size) {
            *at = next;
            next += size;
        });
    to.products = std::move(products);
    return 0;
}

void pack_slot(Adapters& adapters, int64_t slot, const HeteroAdapter& adapter, int64_t part,
               int64_t parts) {
    const bool is_bf16 = adapters.format == Format::kBf16;
    const int64_t bytes = element_bytes(adapters.format);
    const HeteroAdapterPart* given = adapter.parts;
    for (int64_t i = 0; i < adapter.num_products; given += adapter.products[i].num_parts, ++i) {
        if (i % parts != part) continue;
        const HeteroAdapterProduct& from = adapter.products[i];
        AdapterProduct& to =
            adapters.slots[slot].products[from.layer * kProducts + from.product];
        for (size_t block = 0; block < to.a.size(); ++block)
            pack(to.a[block], (const char*)from.a + block * kShrinkDepth * bytes, is_bf16,
                 from.columns, 0, from.ranks, 0);
        std::memcpy(to.scales, from.scales, from.ranks * 4);
        size_t own = 0;
        for (int64_t p = 0; p < from.num_parts; ++p) {
            const int64_t end = given[p].first_row + given[p].rows;
            for (; own < to.parts.size() && to.parts[own].first < end; ++own) {
                const int64_t first = to.parts[own].first - given[p].first_row;
                Matrix& b = to.parts[own].b;
                pack(b, given[p].b, is_bf16, given[p].rank, first, first + b.outputs, 0);
            }
        }
    }
}

bool plan_adapters(Adapters& s, const HeteroStep& step, int threads, int64_t tile_width,
                   int64_t padded_inputs) {
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
    s.ranks = s.width = 0;
    for (size_t i = 0; i < s.slots.size(); ++i) {
        const int64_t first = s.counts[i], last = first + s.counts[i + 1];
        s.counts[i + 1] = last;
        if (first == last) continue;
        s.groups.push_back({&s.slots[i], first, last});
        for (const AdapterProduct& p : s.slots[i].products) {
            s.ranks = std::max(s.ranks, round_up(p.ranks, kStrip));
            s.width = std::max(s.width, p.width);
            depth_blocks = std::max(depth_blocks, (int64_t)p.a.size());
        }
    }
    s.order.resize(total);
    int64_t token = 0;
    for (int64_t i = 0; i < step.num_sequences; token += step.num_scheduled[i], ++i)
        if (step.adapter_slots[i] >= 0)
            for (int64_t k = 0; k < step.num_scheduled[i]; ++k)
                s.order[s.counts[step.adapter_slots[i]]++] = (int32_t)(token + k);
    s.width = round_up(s.width * element_bytes(s.format), kLine) / element_bytes(s.format);
    s.scratch_size = kRowsTogether * (kShrinkDepth + 2 * s.ranks + round_up(tile_width, kPanel) +
                                      kPanel);
    s.scratch = s.scratch_buffer.of<float>(threads * s.scratch_size);
    s.rows = s.rows_buffer.of<char>(total * padded_inputs * element_bytes(s.format));
    s.shrunk = s.shrunk_buffer.of<char>(total * s.width * element_bytes(s.format));
    s.sums = s.sums_buffer.of<float>(depth_blocks * total * s.ranks);
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
    const Scratch own = scratch_of(s, thread);
    const int64_t total = s.order.size();
    for_units(s, layer, product, split, thread, threads,
              [&](const AdapterProduct& p, int64_t first, int64_t last, int64_t block) {
        if (split) {
            shrink_block(s, p, in, first, last, block, own.gathered,
                         s.sums + (block * total + first) * s.ranks, isa);
            return;
        }
        for (size_t b = 0; b < p.a.size(); ++b) {
            float* to = b ? own.more : own.sums;
            shrink_block(s, p, in, first, last, b, own.gathered, to, isa);
            if (b) add(own.sums, own.more, (last - first) * s.ranks, isa);
        }
        for (int64_t i = first; i < last; ++i)
            place_shrunk(p, own.sums + (i - first) * s.ranks, s.format, shrunk_row(s, i),
                         isa);
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
            float* to = s.sums + i * s.ranks;
            for (size_t b = 1; b < p->a.size(); ++b)
                add(to, s.sums + (b * total + i) * s.ranks, p->ranks, isa);
            place_shrunk(*p, to, s.format, shrunk_row(s, i), isa);
        }
    }
}

void expand(const Adapters& s, int64_t layer, Product product, int64_t inner,
            const AdaptedTile& tile, int thread, Isa isa) {
    float* outputs = scratch_of(s, thread).outputs;
    const auto begin = s.order.begin();
    for (const AdapterGroup& group : s.groups) {
        const AdapterProduct* p = product_of(group, layer, product);
        if (!p) continue;
        const int64_t end =
            std::lower_bound(begin + group.first, begin + group.last, tile.row + tile.rows) - begin;
        int64_t first = std::lower_bound(begin + group.first, begin + end, tile.row) - begin;
        for (int64_t last; first < end; first = last) {
            last = std::min(first + kRowsTogether, end);
            for (const AdapterPart& part : p->parts) {
                const bool paired = product == kGateUpProduct, up = paired && part.first >= inner;
                expand_part(s, part, first, last, shrunk_row(s, first), tile,
                            up ? -inner : 0, paired ? up : -1, outputs, isa);
            }
        }
    }
}

}  // namespace hetero
