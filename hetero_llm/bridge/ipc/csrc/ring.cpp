#include "ring.h"

#include <errno.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

#include "crc32c.h"
#include "waiting.h"

namespace hetero::ring {
namespace {

constexpr uint64_t kMagicNumber = 0x474E49524F544548;  // "HETORING"
constexpr uint32_t kLayout = 2;
constexpr int kSpinsPerClock = 16;
// If the consumer's sleep flag is overwritten, no wake-up comes: naps are bounded.
constexpr int64_t kLongestNapNs = 100'000'000;

// Constant after hetero_ring_format.
struct Constants {
    uint64_t magic, stamp;
    uint32_t layout, slot_bytes, slots, unused;
    uint32_t check;  // CRC32C of the fields above
};

// Positions count slots modulo 2^32; each is published with its checksum in one 64-bit store.
struct Shared {
    alignas(128) Constants constants;
    alignas(128) std::atomic<uint64_t> head;  // position of the producer
    alignas(128) std::atomic<uint64_t> tail;  // position of the consumer
    alignas(128) std::atomic<uint32_t> asleep;  // futex: 1 if the consumer sleeps or is about to
    alignas(128) std::atomic<uint32_t> taken[2];  // by role: 1 while a process has that end open
};
constexpr size_t kSlotsAt = 1024;
static_assert(sizeof(Shared) <= kSlotsAt);
static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<uint32_t>) == 4);

struct alignas(kSlotBytes) Slot {
    uint32_t check;  // CRC32C of all that follows
    uint32_t position;
    uint16_t count, index;  // number of slots of the message; index of this one
    uint32_t payload[kSlotWords];
};
static_assert(sizeof(Slot) == kSlotBytes);
constexpr size_t kChecked = kSlotBytes - sizeof(uint32_t);

uint32_t slots_of(uint32_t words) {
    return words <= kFirstWords ? 1 : 1 + (words - kFirstWords + kSlotWords - 1) / kSlotWords;
}

uint32_t salt_of(uint64_t stamp, Role role) { return (uint32_t)(stamp >> 32) + (uint32_t)role; }

uint64_t sealed(uint32_t position, uint32_t salt) {
    return (uint64_t)crc32c(&position, sizeof position, salt) << 32 | position;
}

bool is_sealed(uint64_t word, uint32_t salt) { return word == sealed((uint32_t)word, salt); }

uint32_t check_of(const Constants& constants) {
    return crc32c(&constants, offsetof(Constants, check), 0);
}

}  // namespace

struct End {
    Shared* shared;
    Slot* slots;
    Role role;
    uint32_t capacity, slot_salt, own_salt, other_salt;
    uint32_t position;  // our own: the next slot to write or read
    uint32_t other;     // last plausible position of the other side
    uint64_t last_bad = 0;
    Counters counters{};
    // Consumer only: the buffers of pops.
    MessageHeader* headers = nullptr;
    uint32_t* words = nullptr;
    int64_t max_messages = 0, max_words = 0;

    std::atomic<uint64_t>& own_word() { return role == kProducer ? shared->head : shared->tail; }
    std::atomic<uint64_t>& other_word() { return role == kProducer ? shared->tail : shared->head; }
    Slot& slot(uint32_t at) { return slots[at & (capacity - 1)]; }
    uint32_t seal(const Slot& slot) const { return crc32c(&slot.position, kChecked, slot_salt); }

    void publish();
    void repair();
    void look();
    bool sound(const Slot& slot, uint32_t at) const;
    uint32_t waiting() const { return role == kProducer ? position - other : other - position; }
    uint32_t room() const { return capacity - waiting(); }
    void write(const MessageHeader& header, const uint32_t* body);
    void wake();
    bool read(MessageHeader& header, uint32_t* body, uint32_t max_words, bool& lost);
    int64_t take();
    Status await(int64_t deadline_ns, int64_t spin_ns);
};

void End::publish() { own_word().store(sealed(position, own_salt), std::memory_order_seq_cst); }

// Publishes our position again if its word was overwritten, so that the other side can recover.
void End::repair() {
    if (own_word().load(std::memory_order_relaxed) != sealed(position, own_salt)) publish();
}

// Reads the other side's position. It can only move forward, at most to the end of what is there.
void End::look() {
    const uint64_t word = other_word().load(std::memory_order_seq_cst);
    const uint32_t there = (uint32_t)word;
    const uint32_t limit = role == kProducer ? waiting() : room();
    if (is_sealed(word, other_salt) && there - other <= limit) {
        other = there;
    } else if (word != last_bad) {
        last_bad = word;
        ++counters.bad_positions;
    }
}

bool End::sound(const Slot& slot, uint32_t at) const {
    return slot.check == seal(slot) && slot.position == at;
}

void End::write(const MessageHeader& header, const uint32_t* body) {
    const uint32_t count = slots_of(header.words);
    uint32_t left = header.words;
    for (uint32_t index = 0; index < count; ++index) {
        Slot made{};
        made.position = position;
        made.count = (uint16_t)count;
        made.index = (uint16_t)index;
        uint32_t* payload = made.payload;
        if (index == 0) {
            memcpy(payload, &header, sizeof header);
            payload += kHeaderWords;
        }
        const uint32_t words = std::min(left, index == 0 ? kFirstWords : kSlotWords);
        if (words > 0) memcpy(payload, body, words * sizeof *body);
        body += words;
        left -= words;
        made.check = seal(made);
        memcpy(&slot(position), &made, sizeof made);
        ++position;
    }
    counters.slots += count;
    ++counters.messages;
}

void End::wake() {
    // The consumer sets the flag before its last look at the head: either we see the flag here, or
    // the consumer sees the new head there.
    if (shared->asleep.load(std::memory_order_seq_cst) == 0) return;
    if (shared->asleep.exchange(0, std::memory_order_seq_cst) == 0) return;
    hetero::wake(&shared->asleep, 1);
    ++counters.wakes;
}

// Reads one message. If the next slot does not begin a sound one, skips it and sets `lost`. Returns
// false and does not advance if the body has more than `max_words` words.
bool End::read(MessageHeader& header, uint32_t* body, uint32_t max_words, bool& lost) {
    Slot seen;
    memcpy(&seen, &slot(position), sizeof seen);
    const bool is_sound = sound(seen, position);
    memcpy(&header, seen.payload, sizeof header);
    // Messages become visible as a whole: one that reaches beyond the head is damaged.
    if (!is_sound || seen.index != 0 || header.words > kMaxWords ||
        seen.count != slots_of(header.words) || seen.count > waiting()) {
        ++(is_sound ? counters.dropped_slots : counters.corrupt_slots);
        ++position;
        return lost = true;
    }
    if (header.words > max_words) return false;
    const uint32_t count = seen.count;
    uint32_t filled = std::min(header.words, kFirstWords);
    memcpy(body, seen.payload + kHeaderWords, filled * sizeof *body);
    for (uint32_t index = 1; index < count; ++index) {
        memcpy(&seen, &slot(position + index), sizeof seen);
        if (!sound(seen, position + index) || seen.index != index || seen.count != count) {
            // The caller continues with the bad slot, so the next message is found wherever it
            // begins.
            counters.dropped_slots += index;
            position += index;
            return lost = true;
        }
        const uint32_t words = std::min(header.words - filled, kSlotWords);
        memcpy(body + filled, seen.payload, words * sizeof *body);
        filled += words;
    }
    position += count;
    counters.slots += count;
    ++counters.messages;
    return true;
}

// Reads waiting messages until the buffers are full. Returns the packed result of a pop.
int64_t End::take() {
    Status status = kOk;
    int64_t messages = 0, num_words = 0;
    uint32_t kind = 0;
    while (messages < max_messages && waiting() > 0) {
        const uint32_t room = (uint32_t)std::min<int64_t>(max_words - num_words, kMaxWords);
        MessageHeader& header = headers[messages];
        bool lost = false;
        if (!read(header, words + num_words, room, lost)) break;
        if (lost) {
            status = kCorrupt;
            continue;
        }
        const bool is_same = messages == 0 || header.kind == kind;
        kind = is_same && header.kind <= kMaxKind ? header.kind : 0;
        num_words += header.words;
        ++messages;
    }
    publish();
    return num_words << kWordsBit | messages << kMessagesBit | (int64_t)kind << kKindBit | status;
}

// Waits until there is something to read.
Status End::await(int64_t deadline_ns, int64_t spin_ns) {
    int64_t now = now_ns();
    const int64_t spin_until = std::min(now + spin_ns, deadline_ns);
    for (int spins = 1; now < spin_until; ++spins) {
        look();
        if (waiting() > 0) return kOk;
        if (spins % kSpinsPerClock == 0) now = now_ns();
        pause_briefly();
    }
    for (;;) {
        shared->asleep.store(1, std::memory_order_seq_cst);
        look();
        now = now_ns();
        if (waiting() > 0 || now >= deadline_ns) {
            shared->asleep.store(0, std::memory_order_relaxed);
            return waiting() > 0 ? kOk : kTimeout;
        }
        ++counters.naps;
        const int64_t nap = std::min(deadline_ns - now, kLongestNapNs);
        const int error = sleep_while(&shared->asleep, 1, nap) == 0 ? 0 : errno;
        if (error == EINTR) {
            shared->asleep.store(0, std::memory_order_relaxed);
            return kInterrupted;
        }
        look();
        if (error == ETIMEDOUT && waiting() > 0) ++counters.missed_wakes;
    }
}

}  // namespace hetero::ring

using namespace hetero::ring;

extern "C" {

int64_t hetero_ring_bytes(int64_t slots) {
    if (slots < kMinSlots || slots > kMaxSlots || (slots & (slots - 1)) != 0) return 0;
    return (int64_t)kSlotsAt + slots * kSlotBytes;
}

void hetero_ring_format(void* base, int64_t slots, uint64_t stamp, uint32_t start) {
    Shared* shared = new (base) Shared{};
    shared->head.store(sealed(start, salt_of(stamp, kProducer)), std::memory_order_relaxed);
    shared->tail.store(sealed(start, salt_of(stamp, kConsumer)), std::memory_order_relaxed);
    Constants& constants = shared->constants;
    constants = {kMagicNumber, stamp, kLayout, kSlotBytes, (uint32_t)slots, 0, 0};
    constants.check = check_of(constants);
}

int64_t hetero_ring_refusal(const void* base, int64_t bytes, int64_t slots, uint64_t stamp) {
    if (bytes < (int64_t)kSlotsAt) return kTooSmall;
    Constants constants;
    memcpy(&constants, base, sizeof constants);
    if (constants.magic != kMagicNumber) return kNoRing;
    if (constants.layout != kLayout || constants.slot_bytes != kSlotBytes) return kOtherVersion;
    if (constants.check != check_of(constants)) return kDamaged;
    if (constants.slots != slots || hetero_ring_bytes(slots) != bytes) return kOtherSize;
    if (constants.stamp != stamp) return kOtherRing;
    return kFine;
}

void* hetero_ring_open(void* base, int64_t role) {
    Shared* shared = static_cast<Shared*>(base);
    End* end = new (std::nothrow) End{};
    if (end == nullptr) return nullptr;
    if (shared->taken[role].exchange(1, std::memory_order_acq_rel) != 0) {
        delete end;
        return nullptr;
    }
    const uint64_t stamp = shared->constants.stamp;
    end->shared = shared;
    end->slots = reinterpret_cast<Slot*>(static_cast<char*>(base) + kSlotsAt);
    end->role = (Role)role;
    end->capacity = shared->constants.slots;
    end->slot_salt = (uint32_t)stamp;
    end->own_salt = salt_of(stamp, end->role);
    end->other_salt = salt_of(stamp, end->role == kProducer ? kConsumer : kProducer);
    // Our position no longer moves, so the distance stays valid whatever the other side does.
    const uint64_t own = end->own_word().load(std::memory_order_acquire);
    const uint64_t other = end->other_word().load(std::memory_order_acquire);
    end->position = (uint32_t)own;
    end->other = (uint32_t)other;
    if (!is_sealed(own, end->own_salt) || !is_sealed(other, end->other_salt) ||
        end->waiting() > end->capacity) {
        hetero_ring_close(end);
        return nullptr;
    }
    return end;
}

void hetero_ring_close(void* handle) {
    End* end = static_cast<End*>(handle);
    end->shared->taken[end->role].store(0, std::memory_order_release);
    delete end;
}

int64_t hetero_ring_push(void* handle, const MessageHeader* headers, const uint32_t* words,
                         int64_t count, int64_t num_words) {
    End& end = *static_cast<End*>(handle);
    for (int64_t i = 0; i < count; ++i) {
        if (headers[i].words > kMaxWords) return -1;
        num_words -= headers[i].words;
    }
    if (num_words != 0) return -1;
    end.repair();
    int64_t pushed = 0;
    for (; pushed < count; ++pushed) {
        const MessageHeader& header = headers[pushed];
        const uint32_t needed = slots_of(header.words);
        if (needed > end.room()) end.look();
        if (needed > end.room()) break;
        end.write(header, words);
        words += header.words;
    }
    if (pushed < count) ++end.counters.full;
    if (pushed > 0) end.publish();
    end.wake();
    return pushed;
}

void hetero_ring_buffers(void* handle, MessageHeader* headers, uint32_t* words,
                         int64_t max_messages, int64_t max_words) {
    End& end = *static_cast<End*>(handle);
    end.headers = headers;
    end.words = words;
    end.max_messages = max_messages;
    end.max_words = max_words;
}

int64_t hetero_ring_pop(void* handle) {
    End& end = *static_cast<End*>(handle);
    end.repair();
    end.look();
    return end.waiting() > 0 ? end.take() : (int64_t)kEmpty;
}

int64_t hetero_ring_wait(void* handle, int64_t deadline_ns, int64_t spin_ns) {
    End& end = *static_cast<End*>(handle);
    end.repair();
    end.look();
    const Status status = end.waiting() > 0 ? kOk : end.await(deadline_ns, spin_ns);
    return end.waiting() > 0 ? end.take() : (int64_t)status;
}

void hetero_ring_counters(const void* handle, Counters* counters) {
    *counters = static_cast<const End*>(handle)->counters;
}

uint32_t hetero_crc32c(const void* bytes, int64_t count, uint32_t seed, int64_t table) {
    if (table == 0) return hetero::crc32c(bytes, (size_t)count, seed);
    return ~hetero::crc32c_by_table(static_cast<const unsigned char*>(bytes), (size_t)count, ~seed);
}

}
