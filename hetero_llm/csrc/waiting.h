// What threads of all our libraries wait with: clocks, a pause of the core, and sleep until another
// thread or process wakes.

#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace hetero {

inline int64_t clock_ns(clockid_t clock) {
    timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

inline int64_t now_ns() { return clock_ns(CLOCK_MONOTONIC); }

inline timespec timespec_of(int64_t ns) {
    return {(time_t)(ns / 1'000'000'000), (long)(ns % 1'000'000'000)};
}

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Sleeps for at most `ns` while the word has this value, until `wake`; as FUTEX_WAIT of futex(2),
// but without FUTEX_PRIVATE_FLAG: the other side may be another process.
inline long sleep_while(std::atomic<uint32_t>* word, uint32_t value, int64_t ns) {
    const timespec longest = timespec_of(ns);
    return syscall(SYS_futex, word, FUTEX_WAIT, value, &longest, nullptr, 0);
}

// Wakes up to `most` of those that sleep on the word.
inline void wake(std::atomic<uint32_t>* word, int most) {
    syscall(SYS_futex, word, FUTEX_WAKE, most, nullptr, nullptr, 0);
}

}  // namespace hetero
