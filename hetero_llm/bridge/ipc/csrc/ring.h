// A ring of 64-byte slots in memory that two processes share: one pushes messages, the other pops
// them.
//
// Neither side trusts the shared memory. Each keeps its own position privately and only publishes
// it. A position read from the other side must pass a checksum and lie in the possible range, else
// the last good value stays in use. Every slot carries its position and a CRC32C; a reader copies
// it out before checking it, and skips it if the check fails. There are no locks: if either side is
// killed or stopped at any instruction, the other one sees an empty or a full ring.

#pragma once

#include <cstddef>
#include <cstdint>

namespace hetero::ring {

constexpr int64_t kSlotBytes = 64;
constexpr uint32_t kSlotWords = 13;       // 32-bit words of payload in a slot
constexpr uint32_t kMaxMessageSlots = 512;
constexpr int64_t kMinSlots = 8, kMaxSlots = 1 << 20;  // a power of two

// Header of a message; `words` 32-bit words of body follow. The ring interprets only `words`; and
// `kind`, to report it with a pop.
struct MessageHeader {
    uint32_t kind, slot, generation, base_length, words, depth, value;
};
constexpr uint32_t kHeaderWords = sizeof(MessageHeader) / 4;
constexpr uint32_t kFirstWords = kSlotWords - kHeaderWords;  // body words in the first slot
constexpr uint32_t kMaxWords = kFirstWords + (kMaxMessageSlots - 1) * kSlotWords;

enum Status : int64_t { kOk, kEmpty, kFull, kCorrupt, kTimeout, kInterrupted };
enum Role : int64_t { kProducer, kConsumer };
enum Refusal : int64_t { kFine, kTooSmall, kNoRing, kOtherVersion, kDamaged, kOtherSize, kOtherRing };

// Result of a pop, packed into one number, lowest bits first: 4 bits Status; 8 bits kind of all its
// messages, 0 if they differ or it exceeds kMaxKind; 20 bits number of messages; above, total words
// of their bodies.
constexpr int kKindBit = 4, kMessagesBit = 12, kWordsBit = 32;
constexpr uint32_t kMaxKind = 255;
constexpr int64_t kMaxMessages = (1 << 20) - 1, kMaxPopWords = INT32_MAX;

// Totals of one end since it was opened.
struct Counters {
    int64_t messages;
    int64_t slots;
    int64_t corrupt_slots;  // wrong checksum
    int64_t dropped_slots;  // sound slots of messages that have a corrupt one
    int64_t bad_positions;  // implausible positions of the other side
    int64_t full;           // pushes that could not push everything
    int64_t naps;           // times the consumer went to sleep
    int64_t wakes;          // times the producer woke it
    int64_t missed_wakes;   // naps that lasted to their end although a message had come
};

struct End;  // one process's side of a ring

}  // namespace hetero::ring

extern "C" {

// Bytes of memory for a ring of `slots` slots; 0 if that number is invalid.
int64_t hetero_ring_bytes(int64_t slots);

// Initializes a ring in fresh memory. `stamp` salts the ring's checksums, so that slots of another
// ring fail them; `start` is the first position.
void hetero_ring_format(void* base, int64_t slots, uint64_t stamp, uint32_t start);

// Checks memory of `bytes` bytes: kFine if it holds the ring of this stamp and number of slots,
// else the Refusal that says why not.
int64_t hetero_ring_refusal(const void* base, int64_t bytes, int64_t slots, uint64_t stamp);

// Opens one end of a ring that passed hetero_ring_refusal; null if that end is open already or the
// positions are damaged. The memory must stay mapped until hetero_ring_close. One thread at a time
// may use an end.
void* hetero_ring_open(void* base, int64_t role);
void hetero_ring_close(void* end);

// Pushes messages in order, as many as fit, and returns how many; they become visible together.
// `words`: the concatenated bodies, `num_words` in all. Returns -1 and pushes nothing if that
// contradicts the headers or a body is longer than kMaxWords.
int64_t hetero_ring_push(void* end, const hetero::ring::MessageHeader* headers,
                         const uint32_t* words, int64_t count, int64_t num_words);

// Sets the buffers that pops of the consumer write to, and their sizes: `max_messages` (at most
// kMaxMessages) and `max_words` (kMaxWords to kMaxPopWords).
void hetero_ring_buffers(void* end, hetero::ring::MessageHeader* headers, uint32_t* words,
                         int64_t max_messages, int64_t max_words);

// Pops the available messages and returns the packed result, see kKindBit. kOk: there were some.
// kEmpty: there were none. kCorrupt: some were damaged and are lost, those returned are sound.
int64_t hetero_ring_pop(void* end);

// As hetero_ring_pop, but waits on an empty ring until `deadline_ns` of CLOCK_MONOTONIC: spins for
// `spin_ns`, then sleeps. kTimeout: no message came. kInterrupted: a signal came first, call again.
int64_t hetero_ring_wait(void* end, int64_t deadline_ns, int64_t spin_ns);

void hetero_ring_counters(const void* end, hetero::ring::Counters* counters);

// CRC32C of the bytes, continued from `seed`. `table` != 0: use the table, not the instruction.
uint32_t hetero_crc32c(const void* bytes, int64_t count, uint32_t seed, int64_t table);

}
