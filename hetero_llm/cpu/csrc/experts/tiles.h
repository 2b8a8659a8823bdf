// Products of many tokens with rows of weights on AMX tiles.
//
// The weights are the tiles' rows as they lie in memory (16 of them, 64 bytes each; what is no bf16
// is unpacked to it first), the tokens are the columns: inputs are repacked, weights never.

#pragma once

#include "matrix.h"

namespace hetero::experts {

constexpr int64_t kTileTokens = 16, kTileRows = 16, kMostTileBlocks = 4;

// Whether tiles serve the form, given that rows are bf16: offsets need sums of inputs.
inline bool fits_tiles(const Form& form) {
    return form.kind != Kind::kFloat && form.kind != Kind::kHalf && form.zeros != Zeros::kOffsets;
}

// How a block of 16 tokens is ordered: in pairs of places, [padded / 2][kTileTokens][2] bf16.
enum class TileOrder : int { kNatural, kBytes, kGroups };
TileOrder tile_order(Kind kind);
int64_t tile_place(TileOrder order, int64_t k);
constexpr int64_t tile_block_size(int64_t depth) { return padded(depth) * kTileTokens; }

struct TileJob {
    const Form* form;
    Matrix matrix;
    int64_t first, count;   // rows: at most kTileRows
    const uint16_t* x;      // blocks of tokens, tile_block_size(stored) apart
    int64_t blocks;         // at most kMostTileBlocks
    float* out;             // out[i * blocks * kTileTokens + t], 64-byte aligned
    const char* next;       // rows to prefetch, or null
};

void tile_rows(const TileJob& job);

// Releases the calling thread's tiles, whose state slows down context switches.
void release_expert_tiles();

}  // namespace hetero::experts
