#include "broadcast.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

#include "waiting.h"

namespace hetero::broadcast {
namespace {

constexpr uint64_t kMagicNumber = 0x4E41434F52544548;  // "HETROCAN"
constexpr int64_t kAlign = 64;
constexpr int kSpinsPerClock = 16;
constexpr int64_t kLongestNapNs = 100'000'000;  // should a wake-up be lost
constexpr long kBeatNs = 100'000'000;

struct alignas(128) Reader {
    std::atomic<uint64_t> tail;
    alignas(64) std::atomic<uint64_t> beats;
};

struct Shared {
    uint64_t magic;
    int64_t bytes, readers;
    alignas(128) std::atomic<uint64_t> head;
    std::atomic<uint32_t> bell;      // futex: changes with every frame
    std::atomic<uint32_t> sleepers;  // readers that sleep on it or are about to
    std::atomic<uint32_t> closed;
    Reader reader[kMaxReaders];
};
constexpr int64_t kFramesAt = 1 << 14;
static_assert(sizeof(Shared) <= kFramesAt);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

enum Kind : uint32_t { kLast, kMore, kSkip };  // kSkip: nothing until the end of the memory

struct Frame {
    uint64_t position;
    uint32_t bytes;
    Kind kind;
};
static_assert(sizeof(Frame) == 16 && (int64_t)sizeof(Frame) <= kAlign);

int64_t taken_by(int64_t count) {
    return ((int64_t)sizeof(Frame) + count + kAlign - 1) / kAlign * kAlign;
}

}  // namespace

struct End {
    Shared* shared;
    char* frames;
    int64_t bytes, readers;
    int64_t reader;     // -1: the writer
    uint64_t position;  // our own
    uint64_t slowest;   // writer only: no tail is before it
    pthread_t life;     // reader only, while `parent` is not 0
    int64_t parent;
    std::atomic<bool> ending;

    int64_t at(uint64_t where) const { return (int64_t)(where & (uint64_t)(bytes - 1)); }
    Reader& own() { return shared->reader[reader]; }
    bool has_room(int64_t count);
    void put(const Frame& frame, const void* body);
    void publish();
    bool has_frame() const {
        return shared->head.load(std::memory_order_seq_cst) != position;
    }
    Result await(int64_t deadline_ns, int64_t spin_ns);
};

bool End::has_room(int64_t count) {
    if ((int64_t)(position - slowest) + count <= bytes) return true;
    slowest = position;
    for (int64_t i = 0; i < readers; ++i) {
        const uint64_t tail = shared->reader[i].tail.load(std::memory_order_acquire);
        if (position - tail > position - slowest) slowest = tail;
    }
    return (int64_t)(position - slowest) + count <= bytes;
}

void End::put(const Frame& frame, const void* body) {
    char* to = frames + at(position);
    memcpy(to, &frame, sizeof frame);
    if (frame.kind == kSkip) {
        position += bytes - at(position);
        return;
    }
    memcpy(to + sizeof frame, body, frame.bytes);
    position += taken_by(frame.bytes);
}

void End::publish() {
    // A reader counts itself as a sleeper before its last look at the head, and sleeps only while
    // the bell is what it was before that look: either it sees the head, or we see the sleeper.
    shared->head.store(position, std::memory_order_seq_cst);
    shared->bell.fetch_add(1, std::memory_order_seq_cst);
    if (shared->sleepers.load(std::memory_order_seq_cst) != 0) wake(&shared->bell, INT_MAX);
}

// Waits until there is a frame; kNoRoom stands for "there is one".
Result End::await(int64_t deadline_ns, int64_t spin_ns) {
    int64_t now = now_ns();
    const int64_t spin_until = std::min(now + spin_ns, deadline_ns);
    for (int spins = 1; now < spin_until; ++spins) {
        if (has_frame()) return kNoRoom;
        if (spins % kSpinsPerClock == 0) now = now_ns();
        pause_briefly();
    }
    for (;;) {
        shared->sleepers.fetch_add(1, std::memory_order_seq_cst);
        const uint32_t bell = shared->bell.load(std::memory_order_seq_cst);
        const bool found = has_frame();
        const bool closed = shared->closed.load(std::memory_order_seq_cst) != 0;
        now = now_ns();
        int error = 0;
        if (!found && !closed && now < deadline_ns) {
            const int64_t nap = std::min(deadline_ns - now, kLongestNapNs);
            error = sleep_while(&shared->bell, bell, nap) == 0 ? 0 : errno;
        }
        shared->sleepers.fetch_sub(1, std::memory_order_seq_cst);
        if (found) return kNoRoom;
        if (closed) return kClosed;
        if (now >= deadline_ns) return kTimeout;
        if (error == EINTR) return kInterrupted;
    }
}

namespace {

void* live(void* handle) {
    End& end = *static_cast<End*>(handle);
    while (!end.ending.load(std::memory_order_relaxed)) {
        end.own().beats.fetch_add(1, std::memory_order_relaxed);
        if (getppid() != end.parent) kill(getpid(), SIGKILL);
        const timespec nap = timespec_of(kBeatNs);
        nanosleep(&nap, nullptr);
    }
    return nullptr;
}

}  // namespace
}  // namespace hetero::broadcast

using namespace hetero::broadcast;

extern "C" {

int64_t hetero_broadcast_bytes(int64_t bytes) {
    if (bytes < kMinBytes || bytes > kMaxBytes || (bytes & (bytes - 1)) != 0) return 0;
    return kFramesAt + bytes;
}

void hetero_broadcast_format(void* base, int64_t bytes, int64_t readers, uint64_t start) {
    Shared* shared = new (base) Shared{};
    shared->magic = kMagicNumber;
    shared->bytes = bytes;
    shared->readers = readers;
    for (Reader& reader : shared->reader) reader.tail.store(start, std::memory_order_relaxed);
    shared->head.store(start, std::memory_order_seq_cst);
}

void* hetero_broadcast_open(void* base, int64_t size, int64_t reader) {
    if (size < kFramesAt) return nullptr;
    Shared* shared = static_cast<Shared*>(base);
    if (shared->magic != kMagicNumber || hetero_broadcast_bytes(shared->bytes) != size ||
        shared->readers < 1 || shared->readers > kMaxReaders || reader < -1 ||
        reader >= shared->readers) {
        return nullptr;
    }
    End* end = new (std::nothrow) End{};
    if (end == nullptr) return nullptr;
    end->shared = shared;
    end->frames = static_cast<char*>(base) + kFramesAt;
    end->bytes = shared->bytes;
    end->readers = shared->readers;
    end->reader = reader;
    end->position = reader < 0 ? shared->head.load(std::memory_order_seq_cst)
                               : end->own().tail.load(std::memory_order_seq_cst);
    end->slowest = end->position - (uint64_t)end->bytes;  // unknown: the first write looks
    return end;
}

void hetero_broadcast_free(void* handle) {
    End* end = static_cast<End*>(handle);
    if (end->parent != 0) {
        end->ending.store(true, std::memory_order_relaxed);
        pthread_join(end->life, nullptr);
    }
    delete end;
}

int64_t hetero_broadcast_frame_bytes(const void* handle) {
    return static_cast<const End*>(handle)->bytes / 4 - (int64_t)sizeof(Frame);
}

int64_t hetero_broadcast_write(void* handle, const void* bytes, int64_t count, int64_t more) {
    End& end = *static_cast<End*>(handle);
    if (count < 0 || count > hetero_broadcast_frame_bytes(handle)) return kDamaged;
    const int64_t to_end = end.bytes - end.at(end.position);
    const int64_t needed = taken_by(count);
    const bool skips = needed > to_end;
    if (!end.has_room(needed + (skips ? to_end : 0))) return kNoRoom;
    if (skips) end.put({end.position, 0, kSkip}, nullptr);
    end.put({end.position, (uint32_t)count, more ? kMore : kLast}, bytes);
    end.publish();
    return count;
}

void hetero_broadcast_close(void* handle) {
    Shared* shared = static_cast<End*>(handle)->shared;
    shared->closed.store(1, std::memory_order_seq_cst);
    shared->bell.fetch_add(1, std::memory_order_seq_cst);
    hetero::wake(&shared->bell, INT_MAX);
}

int64_t hetero_broadcast_wait(void* handle, int64_t deadline_ns, int64_t spin_ns) {
    End& end = *static_cast<End*>(handle);
    for (;;) {
        if (!end.has_frame()) {
            const Result result = end.await(deadline_ns, spin_ns);
            if (result != kNoRoom) return result;
        }
        Frame frame;
        memcpy(&frame, end.frames + end.at(end.position), sizeof frame);
        if (frame.position != end.position || frame.kind > kSkip) return kDamaged;
        if (frame.kind != kSkip) {
            const int64_t to_end = end.bytes - end.at(end.position);
            return taken_by(frame.bytes) <= to_end ? (int64_t)frame.bytes : (int64_t)kDamaged;
        }
        end.position += (uint64_t)(end.bytes - end.at(end.position));
    }
}

int64_t hetero_broadcast_take(void* handle, void* bytes) {
    End& end = *static_cast<End*>(handle);
    const char* from = end.frames + end.at(end.position);
    Frame frame;
    memcpy(&frame, from, sizeof frame);
    memcpy(bytes, from + sizeof frame, frame.bytes);
    end.position += (uint64_t)taken_by(frame.bytes);
    end.own().tail.store(end.position, std::memory_order_release);
    return frame.kind == kMore;
}

int64_t hetero_broadcast_live(void* handle, int64_t parent) {
    End& end = *static_cast<End*>(handle);
    end.parent = parent;
    // Signals are for the other threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(&end.life, nullptr, live, handle);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (error != 0) end.parent = 0;
    return error;
}

void hetero_broadcast_beats(const void* handle, uint64_t* beats, uint64_t* unread) {
    const End& end = *static_cast<const End*>(handle);
    const uint64_t head = end.shared->head.load(std::memory_order_acquire);
    for (int64_t i = 0; i < end.readers; ++i) {
        const Reader& reader = end.shared->reader[i];
        unread[i] = head - reader.tail.load(std::memory_order_acquire);
        beats[i] = reader.beats.load(std::memory_order_relaxed);
    }
}

}
