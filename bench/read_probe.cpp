// Reads a buffer with several threads: the limit for a step that streams its weights.

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

using Line = uint64_t __attribute__((vector_size(64), aligned(64), may_alias));

constexpr int64_t kHugePage = 2 << 20;
constexpr int64_t kStep = 8 * sizeof(Line);  // as many loads in flight as the loop has sums

// Their results do not matter, only that they are used.
__attribute__((target_clones("avx512f", "avx2", "default"))) uint64_t read(const char* first,
                                                                          int64_t bytes) {
    Line sums[8] = {};
    for (int64_t at = 0; at < bytes; at += kStep) {
        const Line* lines = reinterpret_cast<const Line*>(first + at);
        for (int i = 0; i < 8; ++i) sums[i] ^= lines[i];
    }
    uint64_t result = 0;
    for (const Line& sum : sums) {
        for (int i = 0; i < 8; ++i) result ^= sum[i];
    }
    return result;
}

struct Slice {
    int64_t first, bytes;
};

Slice slice(int64_t bytes, int64_t threads, int64_t thread) {
    int64_t steps = bytes / kStep;
    int64_t first = steps * thread / threads, last = steps * (thread + 1) / threads;
    return {first * kStep, (last - first) * kStep};
}

}  // namespace

extern "C" {

// `bytes` (a multiple of 512) in huge pages where the system grants them, each thread's share
// written by a thread. Null: no memory.
void* probe_new(int64_t bytes, int64_t threads) {
    void* mapped = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    char* data = reinterpret_cast<char*>(
        (reinterpret_cast<uintptr_t>(mapped) + kHugePage - 1) / kHugePage * kHugePage);
    madvise(data, bytes, MADV_HUGEPAGE);
    std::vector<std::thread> team;
    for (int64_t thread = 0; thread < threads; ++thread) {
        Slice own = slice(bytes, threads, thread);
        team.emplace_back([=] { memset(data + own.first, 1 + thread, own.bytes); });
    }
    for (std::thread& member : team) member.join();
    return data;
}

// `bytes` as given to probe_new. The mapping's unaligned ends stay until the process ends.
void probe_free(void* data, int64_t bytes) { munmap(data, bytes); }

// Nanoseconds of `passes` over the buffer, without the making of the threads.
int64_t probe_read(const void* data, int64_t bytes, int64_t threads, int64_t passes) {
    std::atomic<int64_t> ready{0};
    std::atomic<bool> go{false};
    std::atomic<uint64_t> used{0};
    std::vector<std::thread> team;
    for (int64_t thread = 0; thread < threads; ++thread) {
        team.emplace_back([&, thread] {
            Slice own = slice(bytes, threads, thread);
            ready.fetch_add(1);
            while (!go.load(std::memory_order_acquire)) std::this_thread::yield();
            uint64_t result = 0;
            for (int64_t pass = 0; pass < passes; ++pass) {
                result += read(static_cast<const char*>(data) + own.first, own.bytes);
                asm volatile("" ::: "memory");  // every pass reads anew
            }
            used.fetch_xor(result);
        });
    }
    while (ready.load() < threads) std::this_thread::yield();
    auto begin = std::chrono::steady_clock::now();
    go.store(true, std::memory_order_release);
    for (std::thread& member : team) member.join();
    auto elapsed = std::chrono::steady_clock::now() - begin;
    return std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count();
}
}
