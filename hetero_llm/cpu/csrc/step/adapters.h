// LoRA adapters: packed A, B and scales in slots, and what they add to the products of a step.
//
// An adapter adds (x A^T * scales) B^T to the outputs of a product, for the tokens that have it.
// Its product with A (shrink) is a phase of its own before the product; its product with B (expand)
// is added to each tile of the product's outputs by the thread that holds the tile. Tokens are
// sorted by slot for that. A step without an adapter's token runs none of this.
//
// A's columns are cut into blocks, whose sums are kept apart and added in their order, so that
// threads can share the shrink of few tokens. No result depends on that, nor on other tokens.

#pragma once

#include <memory>
#include <vector>

#include "arena.h"
#include "executor.h"
#include "matmul.h"
#include "model.h"

namespace hetero {

// Products of a layer that adapters may name.
enum Product : int64_t {
    kQkvProduct, kOutProduct, kGateUpProduct, kDownProduct, kRouterProduct, kSharedGateProduct,
    kProducts
};

// B of one module, or of gate and up, whose strips take turns as in the base's weights: its strips
// are those of the base's outputs.
struct AdapterPart {
    int64_t first, last;   // strips of the base; the panel of `first` is b's first one
    int64_t even, odd;     // where the inputs of even and odd strips begin in a shrunk row
    Matrix b;              // [outputs in whole panels][rank]
};

// A block of A's columns. Few ranks leave strips of a panel free: then strips hold `folds` pieces
// of the columns, and their sums are added.
struct ShrinkBlock {
    Matrix a;       // [folds * ranks in whole strips][columns of a piece]
    int64_t folds;  // 1, 2 or 4
};

struct ShrunkPart {
    int64_t first_rank, at;  // of A's ranks; in a shrunk row
    Matrix like;             // gives type and depth
};

struct AdapterProduct {
    int64_t ranks = 0;      // of all modules; 0: the adapter leaves the product as it is
    int64_t width = 0;      // elements of a shrunk row
    float* scales = nullptr;
    std::vector<ShrinkBlock> blocks;
    std::vector<ShrunkPart> shrunk;
    std::vector<AdapterPart> parts;
};

struct AdapterSlot {
    std::vector<AdapterProduct> products;  // [layers * kProducts]; none: the slot is empty
    std::vector<AdapterProduct> experts;   // [layers * experts * 2]: gate_up, down; or none
    std::unique_ptr<Arena> memory;
};

// Tokens of a step with one adapter: order[first .. last).
struct AdapterGroup {
    const AdapterSlot* slot;
    int64_t first, last;
};

struct Adapters {
    Format format = Format::kFloat;  // of A and B: kBf16 or kFloat
    std::vector<AdapterSlot> slots;
    std::vector<int32_t> order;        // tokens with adapters by slot, then as in the step
    std::vector<AdapterGroup> groups;
    std::vector<int64_t> counts;
    int64_t sums_width = 0, width = 0; // the largest of the step's products
    int64_t scratch_size = 0;          // floats of a thread
    Buffer<char> shrunk;               // [order][width], as B's products take them
    Buffer<float> sums;                // [blocks of columns][order][sums_width]
    Buffer<float> scratch;             // [threads][scratch_size]
    Buffer<char> rows;                 // [order][padded inputs], prepared by the caller
    // Of experts, whose rows are pairs of a token and one of its experts, an expert's one behind the
    // other and not sorted by slot.
    bool of_experts = false;                 // whether a token's adapter names any
    std::vector<const AdapterSlot*> slot_of; // [tokens]; null: none
    Buffer<char> pairs;                      // [pairs][width], as B's products take them
    Buffer<char> pair_rows;                  // [threads][kPairsTogether][padded inputs]
};

constexpr int64_t kPairsTogether = 64;  // rows of a run of pairs that are multiplied at a time

// Makes empty slots; before any is filled.
void make_slots(Adapters& adapters, int64_t count, Format format);

// Reserves a slot's memory for an adapter and lays it out. See hetero_executor_fill_slot for the
// arguments and results.
int64_t lay_out_slot(Adapters& adapters, const Model& model, int64_t slot,
                     const HeteroAdapter& adapter, Isa isa);

// Packs a laid-out slot; thread `part` of `parts` packs its share of the products.
void pack_slot(Adapters& adapters, const Model& model, int64_t slot,
               const HeteroAdapter& adapter, int64_t part, int64_t parts);

// Sorts a step's tokens by slot and reserves scratch. padded_inputs: the most inputs of a product;
// experts_per_token: 0 in a model without experts. False if no token has an adapter.
bool plan_adapters(Adapters& adapters, const HeteroStep& step, int threads, int64_t padded_inputs,
                   int64_t experts_per_token);

// Whether an adapter of the step names the product.
bool adapts(const Adapters& adapters, int64_t layer, Product product);

// A product's inputs in the adapters' format. sorted: row i is that of token order[i], else of
// token i.
struct AdapterRows {
    const void* data;
    int64_t stride;  // elements
    bool sorted;
};

// The calling thread's share of the shrink. Returns whether `add_sums` has to follow, after a
// barrier; another one has to come before `expand`.
bool shrink(Adapters& adapters, int64_t layer, Product product, const AdapterRows& in, int thread,
            int threads, Isa isa);
void add_sums(Adapters& adapters, int64_t layer, Product product, int thread, int threads, Isa isa);

// A tile of a product's outputs: tokens [row, row + rows), strips [first, first + strips).
struct AdaptedTile {
    float* data;
    int64_t stride, row, rows, first, strips;
};

// Adds the adapters to a tile.
void expand(const Adapters& adapters, int64_t layer, Product product, const AdaptedTile& tile,
            Isa isa);

// One of the two products of an expert, `number` = layer * experts + expert, and its pairs: pair
// first + i is that of token tokens[i].
struct ExpertProduct {
    int64_t number;
    bool down;
    const int32_t* tokens;
    int64_t first;
};

// Whether a token's adapter names the expert's product, so that its inputs are needed.
bool adapts_pair(const Adapters& adapters, const ExpertProduct& product, int64_t i);

// How many of the pairs from `begin` on, before `end`, have the slot of the first one.
int64_t run_of_pairs(const Adapters& adapters, const ExpertProduct& product, int64_t begin,
                     int64_t end);

// The shrink of a run of at most kPairsTogether pairs with one slot, whose adapter names the
// product, by the calling thread. rows: of the first pair, `stride` elements apart.
void shrink_pairs(Adapters& adapters, const ExpertProduct& product, int64_t begin, int64_t end,
                  const void* rows, int64_t stride, int thread, Isa isa);

// Adds the adapters to a tile, whose rows are pairs of the expert.
void expand_pairs(const Adapters& adapters, const ExpertProduct& product, const AdaptedTile& tile,
                  Isa isa);

}  // namespace hetero
