// Where the copiers of several processes report what has ended, in memory that they share: one ring
// for each rank of a model, written by the rank's process and read by that of rank 0, and one bell
// that wakes rank 0. Every byte of a transfer has landed, or nothing of it is written any more,
// before its report can be read.

#pragma once

#include <atomic>
#include <cstdint>

#include "copier.h"

namespace hetero::kv {

constexpr int64_t kMaxRanks = 64;
constexpr int64_t kHeadBytes = 4096, kRingBytes = 1 << 17;
constexpr uint64_t kReports = 4096;  // of a ring; a power of two

struct alignas(128) ReportRing {
    std::atomic<uint64_t> head;  // reports written
    alignas(64) std::atomic<uint64_t> tail;  // reports read
    alignas(64) std::atomic<int64_t> ready_rows;
    std::atomic<int64_t> broken;
    alignas(64) Done reports[kReports];
};
static_assert(sizeof(ReportRing) <= kRingBytes);

struct Board {
    uint64_t magic;
    int64_t ranks;
    alignas(128) std::atomic<uint32_t> bell;  // futex: changes with every report
    std::atomic<uint32_t> sleepers;           // 1 while rank 0 sleeps on it or is about to

    ReportRing& ring(int64_t rank) {
        return *reinterpret_cast<ReportRing*>(reinterpret_cast<char*>(this) + kHeadBytes +
                                              rank * kRingBytes);
    }
    // Whether there was room. One caller at a time for each rank.
    bool put(int64_t rank, const Done& report);
    void ring_bell();
};
static_assert(sizeof(Board) <= kHeadBytes);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

}  // namespace hetero::kv

extern "C" {

// Bytes of a board for a number of ranks; 0 if the number is invalid.
int64_t hetero_reports_bytes(int64_t ranks);
// Initializes a board in fresh memory.
void hetero_reports_format(void* board, int64_t ranks);
// The ranks of the board in `size` bytes of memory; 0: there is none.
int64_t hetero_reports_ranks(const void* board, int64_t size);

// For rank 0. Takes up to `room` reports of a rank, in their order; returns their number.
int64_t hetero_reports_take(void* board, int64_t rank, hetero::kv::Done* done, int64_t room);
// Sleeps until any rank has reported something that was not taken, for at most `ns`, or until a
// signal comes; returns whether there is something.
int64_t hetero_reports_wait(void* board, int64_t ns);
// The least number of host rows that all ranks but rank 0 can use.
int64_t hetero_reports_ready_rows(void* board);
// Whether the driver of any rank has reported a lasting error.
int64_t hetero_reports_broken(void* board);

// For a rank: the number of its host rows that can be used.
void hetero_reports_set_ready_rows(void* board, int64_t rank, int64_t rows);

}
