// A ring of 64-byte slots in memory that two processes share: one pushes, the other pops.
//
// Neither side trusts the memory. Each keeps its own position to itself and only publishes it; what
// the other one published must pass a checksum and lie where it can lie, else the last good value
// stands. Every slot carries its place in the sequence and a CRC32C, is copied out before it is
// looked at, and is skipped if it fails. No lock is ever held: either side may be killed or stopped
// at any instruction, and the other one meets an empty or a full ring.

#pragma once

#include <cstddef>
#include <cstdint>

namespace hetero::ring {

constexpr int64_t kSlotBytes = 64;
constexpr uint32_t kSlotWords = 13;       // 32-bit words of payload in a slot
constexpr uint32_t kMaxRecordSlots = 512;
constexpr int64_t kMinSlots = 8, kMaxSlots = 1 << 20;  // a power of two

// What a record begins with; `words` 32-bit words follow it. The ring looks at nothing but `words`:
// what is in a record is the business of whoever pushes and pops.
struct RecordHeader {
    uint32_t kind, slot, generation, base_length, words, depth, value;
};
constexpr uint32_t kHeaderWords = sizeof(RecordHeader) / 4;
constexpr uint32_t kFirstWords = kSlotWords - kHeaderWords;  // of the body, in the first slot
constexpr uint32_t kMaxWords = kFirstWords + (kMaxRecordSlots - 1) * kSlotWords;

enum Status : int64_t { kOk, kEmpty, kFull, kCorrupt, kTimeout, kInterrupted };
enum Role : int64_t { kProducer, kConsumer };
enum Refusal : int64_t { kFine, kTooSmall, kNoRing, kOtherVersion, kDamaged, kOtherSize, kOtherRing };

// What a pop tells, in one number: a Status in 4 bits; in 8 the kind of all its records, 0 if they
// are of several or of one beyond those bits; in 20 how many; above, words of all their bodies.
constexpr int kKindBit = 4, kRecordsBit = 12, kWordsBit = 32;
constexpr uint32_t kMostKind = 255;
constexpr int64_t kMostRecords = (1 << 20) - 1, kMostWords = INT32_MAX;

// Totals of one end since it was opened.
struct Counters {
    int64_t records;
    int64_t slots;
    int64_t corrupt_slots;  // failed their checks
    int64_t dropped_slots;  // sound, but of a record that has a corrupt one
    int64_t bad_positions;  // times that the other side's position was not to be believed
    int64_t full;           // pushes that could not push everything
    int64_t naps;           // waits that went to sleep
    int64_t wakes;          // sleepers that were woken
    int64_t missed_wakes;   // naps that ran to their end although something had come
};

struct End;  // one process's side of a ring

}  // namespace hetero::ring

extern "C" {

// Bytes of memory for a ring of so many slots; 0 if it cannot have that number.
int64_t hetero_ring_bytes(int64_t slots);

// Makes a ring of fresh memory. `stamp` marks the ring's slots, so that no other ring's are taken
// for them; `start` is the first position.
void hetero_ring_format(void* base, int64_t slots, uint64_t stamp, uint32_t start);

// A Refusal: why these `bytes` are not the ring of that stamp and that many slots; kFine if they are.
int64_t hetero_ring_refusal(const void* base, int64_t bytes, int64_t slots, uint64_t stamp);

// One end of a ring that was not refused, null if that end is taken or memory is damaged. The memory
// must stay until hetero_ring_close. An end belongs to one thread at a time.
void* hetero_ring_open(void* base, int64_t role);
void hetero_ring_close(void* end);

// Pushes the first records as far as there is room, returns how many; they become visible together.
// `words`: the bodies, one after the other, `num_words` in all. Returns -1, having done nothing, if
// they are not as the headers say or one is longer than kMaxWords.
int64_t hetero_ring_push(void* end, const hetero::ring::RecordHeader* headers, const uint32_t* words,
                         int64_t count, int64_t num_words);

// Where the consumer's pops put their records, up to `max_records` (at most kMostRecords) and
// `max_words` (kMaxWords to kMostWords) each time.
void hetero_ring_buffers(void* end, hetero::ring::RecordHeader* headers, uint32_t* words,
                         int64_t max_records, int64_t max_words);

// Pops what is there, and tells it as above. kOk: records came. kEmpty: nothing. kCorrupt: something
// was lost, what records came are sound.
int64_t hetero_ring_pop(void* end);

// The same, but with nothing there it waits until `deadline_ns` of CLOCK_MONOTONIC: it spins for
// `spin_ns`, then sleeps. kTimeout: nothing came. kInterrupted: a signal came first, wait again.
int64_t hetero_ring_wait(void* end, int64_t deadline_ns, int64_t spin_ns);

void hetero_ring_counters(const void* end, hetero::ring::Counters* counters);

// CRC32C of the bytes, going on from `seed`; `table`: without the processor's instruction.
uint32_t hetero_crc32c(const void* bytes, int64_t count, uint32_t seed, int64_t table);

}
