// A team of threads that lives as long as its executor: one parallel region per step, with barriers
// inside it.

#pragma once

#include <cstdint>

namespace hetero {

// Threads count from 0, which is the caller.
class Team {
  public:
    // cpus: [threads] the logical CPU of each thread; cpus[0], the caller's, is ignored. Null
    // leaves placement to the system. A thread without work spins for about `spin_us` microseconds,
    // then sleeps until the next run.
    Team(int threads, const int* cpus, int64_t spin_us);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const;
    // Makes the threads again in a child of a fork, which has none: maybe fewer than before.
    void revive();
    // Revives the team, calls body(thread) on all threads and returns when all have returned. One
    // caller at a time.
    template <typename F>
    void run(F body) {
        run_body([](void* context, int thread) { (*static_cast<F*>(context))(thread); }, &body);
    }
    // Inside run: returns when every thread has called it; what they wrote before is visible.
    // Spins a bounded time, then sleeps: on a core that other programs want, a thread that sleeps
    // is back as soon as it is woken.
    void barrier(int thread);
    // Nanoseconds that all threads together have slept at barriers since the team was made: long
    // where a thread has to wait for its core.
    int64_t slept_ns() const;
    // For tests: this thread sleeps for `nanoseconds` before each barrier.
    void delay(int thread, int64_t nanoseconds);

  private:
    using Body = void (*)(void* context, int thread);
    void run_body(Body body, void* context);

    struct State;
    State* state_;
};

}  // namespace hetero
