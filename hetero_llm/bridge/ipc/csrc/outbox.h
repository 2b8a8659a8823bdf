// A queue of messages that wait to enter a ring, oldest first. It grows without bound. One thread
// at a time.

#pragma once

#include "ring.h"

namespace hetero::ring {

// Header of a run: several messages of one kind in one buffer. After it come four columns of
// `count` integers (4 or 8 bytes each, see `*_bytes`), then the concatenated bodies.
struct RunHeader {
    uint32_t kind, depth, value;
    uint32_t width;  // words of an item
    uint32_t count;  // messages
    uint32_t slot_bytes, generation_bytes, base_length_bytes;
    uint32_t items_bytes;  // last column: number of items in each body
};

}  // namespace hetero::ring

extern "C" {

void* hetero_outbox_make();
void hetero_outbox_free(void* outbox);

// Appends the runs in `data`, then pushes waiting messages to `end`, a ring's producer (null: to
// none), as many as fit. Returns how many still wait. Returns -1 and changes nothing if a run
// contradicts its header or a message is longer than kMaxWords.
int64_t hetero_outbox_push(void* outbox, void* end, const void* data, int32_t bytes);

// Drops the oldest `count` messages; the caller knows that there are as many.
void hetero_outbox_drop(void* outbox, int64_t count);

// Total words of all bodies. hetero_outbox_copy copies headers and bodies into large enough
// buffers.
int64_t hetero_outbox_words(const void* outbox);
void hetero_outbox_copy(const void* outbox, hetero::ring::MessageHeader* headers, uint32_t* words);

}
