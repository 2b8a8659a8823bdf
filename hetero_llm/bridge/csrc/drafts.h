// Are drafts that came through a ring what drafts have to be? A record may be whole and still not be
// what its reader can use: whoever wrote it may be wrong.

#pragma once

#include <cstdint>

namespace hetero::ring {

struct DraftLimits {
    uint16_t kind;  // of the records that are drafts
    uint32_t most_nodes, vocab_size;
};

// At most so many whole nodes, tokens of the vocabulary, parents before their children,
// log-probabilities that are numbers.
bool is_sound_draft(const uint32_t* body, uint32_t words, DraftLimits limits);

}  // namespace hetero::ring
