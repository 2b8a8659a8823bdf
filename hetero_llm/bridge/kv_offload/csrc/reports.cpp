#include "reports.h"

#include <algorithm>
#include <new>

#include "waiting.h"

namespace hetero::kv {
namespace {

constexpr uint64_t kMagic = 0x53545250'4F54454Bull;

bool has_reports(Board& board) {
    for (int64_t rank = 0; rank < board.ranks; ++rank) {
        ReportRing& ring = board.ring(rank);
        if (ring.head.load(std::memory_order_seq_cst) !=
            ring.tail.load(std::memory_order_relaxed)) {
            return true;
        }
    }
    return false;
}

}  // namespace

bool Board::put(int64_t rank, const Done& report) {
    ReportRing& own = ring(rank);
    const uint64_t head = own.head.load(std::memory_order_relaxed);
    if (head - own.tail.load(std::memory_order_acquire) == kReports) return false;
    own.reports[head % kReports] = report;
    own.head.store(head + 1, std::memory_order_seq_cst);
    return true;
}

void Board::ring_bell() {
    // Rank 0 says that it will sleep before its last look at the rings, and sleeps only while the
    // bell is what it was before that look: either it sees the report, or we see the sleeper.
    bell.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) wake(&bell, 1);
}

}  // namespace hetero::kv

using namespace hetero::kv;

extern "C" {

int64_t hetero_reports_bytes(int64_t ranks) {
    return ranks < 1 || ranks > kMaxRanks ? 0 : kHeadBytes + ranks * kRingBytes;
}

void hetero_reports_format(void* memory, int64_t ranks) {
    Board* board = new (memory) Board{};
    board->magic = kMagic;
    board->ranks = ranks;
    for (int64_t rank = 0; rank < ranks; ++rank) new (&board->ring(rank)) ReportRing{};
}

int64_t hetero_reports_ranks(const void* memory, int64_t size) {
    if (size < kHeadBytes) return 0;
    const Board& board = *static_cast<const Board*>(memory);
    return board.magic == kMagic && hetero_reports_bytes(board.ranks) == size ? board.ranks : 0;
}

int64_t hetero_reports_take(void* board, int64_t rank, Done* done, int64_t room) {
    ReportRing& ring = static_cast<Board*>(board)->ring(rank);
    const uint64_t tail = ring.tail.load(std::memory_order_relaxed);
    const uint64_t there = ring.head.load(std::memory_order_acquire) - tail;
    const int64_t count = std::min(room, (int64_t)there);
    for (int64_t i = 0; i < count; ++i) {
        done[i] = ring.reports[(tail + (uint64_t)i) % kReports];
    }
    ring.tail.store(tail + (uint64_t)count, std::memory_order_release);
    return count;
}

int64_t hetero_reports_wait(void* memory, int64_t ns) {
    Board& board = *static_cast<Board*>(memory);
    if (has_reports(board)) return 1;
    board.sleepers.store(1, std::memory_order_seq_cst);
    const uint32_t bell = board.bell.load(std::memory_order_seq_cst);
    if (!has_reports(board) && ns > 0) hetero::sleep_while(&board.bell, bell, ns);
    board.sleepers.store(0, std::memory_order_seq_cst);
    return has_reports(board);
}

int64_t hetero_reports_ready_rows(void* memory) {
    Board& board = *static_cast<Board*>(memory);
    int64_t least = INT64_MAX;
    for (int64_t rank = 1; rank < board.ranks; ++rank) {
        least = std::min(least, board.ring(rank).ready_rows.load(std::memory_order_relaxed));
    }
    return least;
}

int64_t hetero_reports_broken(void* memory) {
    Board& board = *static_cast<Board*>(memory);
    int64_t broken = 0;
    for (int64_t rank = 0; rank < board.ranks; ++rank) {
        broken |= board.ring(rank).broken.load(std::memory_order_relaxed);
    }
    return broken;
}

void hetero_reports_set_ready_rows(void* board, int64_t rank, int64_t rows) {
    static_cast<Board*>(board)->ring(rank).ready_rows.store(rows, std::memory_order_relaxed);
}

}
