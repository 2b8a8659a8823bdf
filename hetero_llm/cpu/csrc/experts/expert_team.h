// The threads that answer a mailbox, see hetero_llm/bridge/expert_mailbox.py for the protocol.

#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "../step/threads.h"
#include "exchange.h"

namespace hetero::experts {

constexpr int32_t kStoppedByCall = 1;  // else a Refusal

struct Running {  // the C ABI
    int64_t exchanges;  // answered
    int64_t busy_ns;    // from the sequence number seen to the answer
    int64_t naps;       // times that thread 0 went to sleep
    int64_t slept_ns;   // of all threads at barriers
};

// Thread 0 polls for requests; a Team of as many threads as there are CPUs computes.
//
// Without a request all threads spin for `spin_us`. Then the others sleep until the next request,
// and thread 0 naps: 50 us, twice as long each time, up to 1 ms. So a request that comes after a
// pause is seen up to a nap late, and finds sleeping threads. `wake` ends naps at once and makes
// all threads spin again: it costs a system call if thread 0 sleeps.
class ExpertTeam {
  public:
    // cpus: [threads] or null.
    ExpertTeam(const Setting& setting, int threads, const int32_t* cpus, int64_t spin_us);
    // Stops.
    ~ExpertTeam();
    ExpertTeam(const ExpertTeam&) = delete;
    ExpertTeam& operator=(const ExpertTeam&) = delete;

    // Whether threads were made; false: the system refused.
    bool is_running() const { return has_thread_; }
    int size() const { return team_->size(); }
    void wake();
    // An exchange under way is answered; then no more. Returns when the threads are gone.
    void stop();
    Running running() const;

  private:
    static void* serve_of(void* self);
    void serve();
    bool answer(int32_t sequence);
    void nap(uint32_t calls, int64_t nanoseconds);

    const int cpu_;
    const int64_t spin_ns_;
    const int32_t* request_;
    int32_t* answer_;
    std::unique_ptr<Team> team_;
    Exchange exchange_;
    pthread_t thread_{};
    bool has_thread_ = false;
    const int process_;  // that made the thread
    struct alignas(128) {
        std::atomic<uint32_t> calls{0};   // of wake and stop; the futex
        std::atomic<uint32_t> asleep{0};
        std::atomic<bool> stops{false};
    } bell_;
    std::atomic<int64_t> exchanges_{0}, busy_ns_{0}, naps_{0};
};

}  // namespace hetero::experts
