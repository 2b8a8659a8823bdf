// Included before the copier's sources: its monotonic clock stands still but for what tests set.
// Timed waits of its thread then end at once, so it looks around all the time.

#pragma once

#include <time.h>

#include <atomic>
#include <cstdint>

inline std::atomic<int64_t> fake_now_ns{0}, fake_reads{0};
inline thread_local bool sets_the_clock = false;

inline int fake_clock_gettime(clockid_t clock, timespec* t) {
    if (clock != CLOCK_MONOTONIC) return clock_gettime(clock, t);
    const int64_t now = fake_now_ns;
    *t = {(time_t)(now / 1'000'000'000), (long)(now % 1'000'000'000)};
    fake_reads += !sets_the_clock;
    return 0;
}

extern "C" {
__attribute__((used)) inline void fake_clock_set(int64_t ns) {
    sets_the_clock = true;
    fake_now_ns = ns;
}
// How often the copy thread has looked at its clock: the thread that sets it does not count, which
// looks at it itself whenever it asks how much of a load is left.
__attribute__((used)) inline int64_t fake_clock_reads() { return fake_reads; }
}

#define clock_gettime fake_clock_gettime
