// What both kinds of rings wait with: a clock, a pause of the core, sleep until another process
// wakes.

#pragma once

#include <time.h>

#include <cstdint>
#include <atomic>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace hetero {

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Without FUTEX_PRIVATE_FLAG: the other side is another process.
inline long futex(std::atomic<uint32_t>* word, int operation, uint32_t value,
                  const timespec* longest) {
    return syscall(SYS_futex, word, operation, value, longest, nullptr, 0);
}

}  // namespace hetero
