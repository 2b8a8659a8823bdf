// Records on their way into a ring, oldest first. It grows without bound; one thread at a time.

#pragma once

#include "ring.h"

namespace hetero::ring {

// Several records of one kind, as they are put in: this, then `count` integers for each of the four
// columns, of so many bytes each (4 or 8), then the bodies, one after the other.
struct RunHeader {
    uint32_t kind, depth, value;
    uint32_t width;  // words of an item
    uint32_t count;  // records
    uint32_t slot_bytes, generation_bytes, base_length_bytes;
    uint32_t items_bytes;  // the last column: items of each body
};

}  // namespace hetero::ring

extern "C" {

void* hetero_outbox_make();
void hetero_outbox_free(void* outbox);

// Puts in the runs in `data`, and pushes what waits into a ring's end (null: into none), as far as
// there is room. Returns how many records wait then; -1, having done nothing, if a run is not as its
// header says or a record is longer than kMaxWords.
int64_t hetero_outbox_push(void* outbox, void* end, const void* data, int32_t bytes);

// Forgets the oldest `count`, which are there.
void hetero_outbox_drop(void* outbox, int64_t count);

// Words of all bodies; and copies headers and bodies to memory that has room for them.
int64_t hetero_outbox_words(const void* outbox);
void hetero_outbox_copy(const void* outbox, hetero::ring::RecordHeader* headers, uint32_t* words);

}
