// A team of threads that stays: one parallel region per step, barriers inside it.

#pragma once

#include <cstdint>

namespace hetero {

// What every thread of a team runs; `thread` counts from 0, which is the caller.
using Body = void (*)(void* context, int thread);

class Team {
  public:
    // cpus: one logical CPU for each thread but the caller's (cpus[0] is not looked at), or null to
    // leave placement to the system. A thread without work spins for about `spin_us` microseconds,
    // then sleeps until the next run.
    Team(int threads, const int* cpus, int64_t spin_us);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const;
    // Runs `body` on all threads and returns when all have returned. One caller at a time.
    void run(Body body, void* context);
    // Inside run: returns when every thread has called it; what they wrote before is visible.
    // Spins a bounded time, then yields the core, so that a thread without one cannot stall others
    // for longer than the system makes it wait.
    void barrier(int thread);
    // For tests: before each barrier this thread waits so long.
    void delay(int thread, int64_t nanoseconds);

  private:
    struct State;
    State* state_;
};

}  // namespace hetero
