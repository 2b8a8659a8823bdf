// As much of libcuda as pins memory: it keeps a list of what is pinned, refuses what a test says,
// and stands still where a test says so.

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace {

std::mutex mutex;
std::condition_variable changed;
std::map<char*, size_t> pinned;
int64_t calls, allowed = 1 << 30, refused_at = -1, refused_with, contexts_seen;
thread_local void* context;

}  // namespace

extern "C" {

int cuCtxGetCurrent(void** current) {
    *current = context;
    return 0;
}

int cuCtxSetCurrent(void* current) {
    context = current;
    return 0;
}

int cuGetErrorName(int error, const char** name) {
    *name = error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : nullptr;
    return error == 2 ? 0 : 1;
}

int cuMemHostRegister_v2(void* memory, size_t bytes, unsigned flags) {
    std::unique_lock<std::mutex> lock(mutex);
    int64_t call = calls++;
    changed.notify_all();
    changed.wait(lock, [call] { return call < allowed; });
    if (call == refused_at) return (int)refused_with;
    char* begin = static_cast<char*>(memory);
    if ((uintptr_t)begin % 4096 || bytes % 4096 || flags != 3) return 1;
    for (const auto& [other, length] : pinned)
        if (begin < other + length && other < begin + bytes) return 712;  // pinned already
    volatile char* bytes_of = begin;
    for (size_t at = 0; at < bytes; at += 4096) bytes_of[at] = bytes_of[at] + 1;
    pinned[begin] = bytes;
    if (context == (void*)0x1234) contexts_seen++;
    return 0;
}

int cuMemHostUnregister(void* memory) {
    std::lock_guard<std::mutex> lock(mutex);
    if (context == (void*)0x1234) contexts_seen++;
    return pinned.erase(static_cast<char*>(memory)) ? 0 : 713;
}

// For tests. The calling thread gets a context; call number `refuse` (from 0, -1: none) fails with
// `error`; calls from number `allow` on stand still until that number is raised.
void fake_reset(int64_t refuse, int64_t error, int64_t allow) {
    std::lock_guard<std::mutex> lock(mutex);
    context = (void*)0x1234;
    calls = contexts_seen = 0;
    allowed = allow, refused_at = refuse, refused_with = error;
}

void fake_allow(int64_t allow) {
    std::lock_guard<std::mutex> lock(mutex);
    allowed = allow;
    changed.notify_all();
}

// Waits until so many calls have begun.
void fake_wait_calls(int64_t count) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [count] { return calls >= count; });
}

int64_t fake_pinned_ranges() { return (int64_t)pinned.size(); }

int64_t fake_pinned_bytes() {
    int64_t sum = 0;
    for (const auto& entry : pinned) sum += (int64_t)entry.second;
    return sum;
}

int64_t fake_contexts_seen() { return contexts_seen; }

}
