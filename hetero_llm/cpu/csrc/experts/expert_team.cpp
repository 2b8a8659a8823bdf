// Polls the mailbox and answers it, see expert_team.h; and the library's functions for Python.

#include "expert_team.h"

#include <sys/prctl.h>

#include <algorithm>

#include "waiting.h"

namespace hetero::experts {

using hetero::now_ns;
using hetero::pause_briefly;

namespace {

constexpr uint32_t kSpinsPerClock = 64;
constexpr int64_t kShortestNap = 50000, kLongestNap = 1000000;  // nanoseconds
constexpr unsigned long kTimerSlack = 1000;                     // of naps, nanoseconds

}  // namespace

ExpertTeam::ExpertTeam(const Setting& setting, int threads, const int32_t* cpus, int64_t spin_us)
    : cpu_(cpus ? cpus[0] : -1),
      spin_ns_(spin_us * 1000),
      request_(setting.request),
      answer_(setting.answer),
      team_(new Team(threads, cpus, spin_us)),
      exchange_(setting, team_->size()),
      process_(getpid()) {
    has_thread_ = start_thread(&thread_, serve_of, this);
}

ExpertTeam::~ExpertTeam() { stop(); }

void ExpertTeam::wake() {
    // Either `asleep` is seen here, or thread 0 sees the call before it sleeps.
    bell_.calls.fetch_add(1, std::memory_order_seq_cst);
    if (bell_.asleep.load(std::memory_order_seq_cst) != 0) hetero::wake(bell_.calls, 1);
}

void ExpertTeam::stop() {
    // After a fork the child has the object but not the thread.
    if (!has_thread_ || getpid() != process_) return;
    bell_.stops.store(true, std::memory_order_seq_cst);
    bell_.calls.fetch_add(1, std::memory_order_seq_cst);
    hetero::wake(bell_.calls, 1);
    pthread_join(thread_, nullptr);
    has_thread_ = false;
}

Running ExpertTeam::running() const {
    return {exchanges_.load(std::memory_order_relaxed), busy_ns_.load(std::memory_order_relaxed),
            naps_.load(std::memory_order_relaxed), team_->slept_ns()};
}

void* ExpertTeam::serve_of(void* self) {
    pthread_setname_np(pthread_self(), "hetero-experts");
    prctl(PR_SET_TIMERSLACK, kTimerSlack, 0, 0, 0);
    static_cast<ExpertTeam*>(self)->serve();
    return nullptr;
}

// Sleeps until `wake` or `stop` calls once more than `calls` times, or for that long.
void ExpertTeam::nap(uint32_t calls, int64_t nanoseconds) {
    const timespec wait{0, (long)nanoseconds};
    naps_.fetch_add(1, std::memory_order_relaxed);
    bell_.asleep.store(1, std::memory_order_seq_cst);
    sleep_on(bell_.calls, calls, &wait);
    bell_.asleep.store(0, std::memory_order_seq_cst);
}

// Whether more requests may come.
bool ExpertTeam::answer(int32_t sequence) {
    const int64_t begin = now_ns();
    const Refusal refusal = exchange_.open(
        {sequence, request_[kLayer], request_[kTokens], request_[kLinked], request_[kWhole]});
    if (refusal != Refusal::kNone) {
        __atomic_store_n(answer_ + kStopped, (int32_t)refusal, __ATOMIC_RELEASE);
        return false;
    }
    if (!exchange_.is_empty()) team_->run([this](int thread) { exchange_.work(*team_, thread); });
    __atomic_store_n(answer_ + kComing, sequence, __ATOMIC_RELAXED);
    __atomic_store_n(answer_ + kAnswered, sequence, __ATOMIC_RELEASE);
    exchanges_.fetch_add(1, std::memory_order_relaxed);
    busy_ns_.fetch_add(now_ns() - begin, std::memory_order_relaxed);
    return true;
}

void ExpertTeam::serve() {
    pin_thread(cpu_);
    int32_t answered = __atomic_load_n(answer_ + kAnswered, __ATOMIC_RELAXED);
    int64_t until = now_ns() + spin_ns_, nap_ns = kShortestNap;
    uint32_t calls = bell_.calls.load(std::memory_order_acquire);
    for (uint32_t spins = 1;; ++spins) {  // wraps around in hours without a request
        const int32_t sequence = __atomic_load_n(request_ + kSequence, __ATOMIC_ACQUIRE);
        if (sequence != answered) {
            if (!answer(sequence)) return;
            answered = sequence;
            until = 0;  // the clock is read when there is time for it
            nap_ns = kShortestNap;
            spins = 0;
            continue;
        }
        pause_briefly();
        if (spins % kSpinsPerClock != 0) continue;
        if (bell_.stops.load(std::memory_order_acquire)) break;
        const int64_t now = now_ns();
        if (until == 0) until = now + spin_ns_;
        if (now < until) continue;
        if (bell_.calls.load(std::memory_order_acquire) == calls) {
            nap(calls, nap_ns);
            nap_ns = std::min(2 * nap_ns, kLongestNap);
        }
        const uint32_t now_calls = bell_.calls.load(std::memory_order_acquire);
        if (now_calls == calls) continue;
        calls = now_calls;
        // A request will come: the other threads wake up, too, and all spin again.
        team_->run([](int) {});
        until = 0;
        nap_ns = kShortestNap;
    }
    __atomic_store_n(answer_ + kStopped, kStoppedByCall, __ATOMIC_RELEASE);
}

}  // namespace hetero::experts

extern "C" {

// Whether products serve the form.
int64_t hetero_experts_fit(const hetero::experts::Form* form) {
    return hetero::experts::fits(*form);
}

// cpus: [threads] or null. Null: the system refuses to make threads.
void* hetero_experts_new(const hetero::experts::Setting* setting, int64_t threads,
                         const int32_t* cpus, int64_t spin_us) {
    using namespace hetero::experts;
    ExpertTeam* team = new ExpertTeam(*setting, (int)threads, cpus, spin_us);
    if (team->is_running()) return team;
    delete team;
    return nullptr;
}

int64_t hetero_experts_size(hetero::experts::ExpertTeam* team) { return team->size(); }

void hetero_experts_wake(hetero::experts::ExpertTeam* team) { team->wake(); }

void hetero_experts_stop(hetero::experts::ExpertTeam* team) { team->stop(); }

void hetero_experts_free(hetero::experts::ExpertTeam* team) { delete team; }

void hetero_experts_running(hetero::experts::ExpertTeam* team, hetero::experts::Running* out) {
    *out = team->running();
}

// For tests and benches: posts requests one after the other as a device does and waits for each
// answer. nanoseconds: [count] from the release of the sequence number to the answer seen. Returns
// 0, or the word STOPPED as soon as the team writes it.
int64_t hetero_experts_post(int32_t* request, const int32_t* answer, int64_t layer, int64_t tokens,
                            int64_t linked, int64_t whole, int64_t count, int64_t gap_ns,
                            int64_t* nanoseconds) {
    using namespace hetero::experts;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t begin_gap = now_ns();
        while (now_ns() - begin_gap < gap_ns) pause_briefly();
        const int32_t sequence =
            (int32_t)((uint32_t)__atomic_load_n(request + kSequence, __ATOMIC_RELAXED) + 1);
        request[kLayer] = (int32_t)layer;
        request[kTokens] = (int32_t)tokens;
        request[kLinked] = (int32_t)linked;
        request[kWhole] = (int32_t)whole;
        const int64_t begin = now_ns();
        __atomic_store_n(request + kSequence, sequence, __ATOMIC_RELEASE);
        for (int64_t spins = 1;; ++spins) {
            if (__atomic_load_n(answer + kAnswered, __ATOMIC_ACQUIRE) == sequence) break;
            const int32_t stopped = __atomic_load_n(answer + kStopped, __ATOMIC_ACQUIRE);
            if (stopped != 0) return stopped;
            // A poster that shares its core with a thread of the team must not starve it.
            if (spins % 4096 == 0) sched_yield();
            pause_briefly();
        }
        nanoseconds[i] = now_ns() - begin;
    }
    return 0;
}

// For benches: products of prepared rows x, x_stride bytes apart, with `copies` equal matrices that
// lie one after the other. scales, zeros: of one of them. out: [tokens][rows].
void hetero_experts_dots(const hetero::experts::Form* form, const void* data, const void* scales,
                         const void* zeros, const void* x, int64_t x_stride, int64_t tokens,
                         float* out, int64_t bf16_rows, int64_t copies, int64_t isa) {
    using namespace hetero::experts;
    constexpr int64_t kStrip = 64;
    const Form& own = *form;
    std::vector<const void*> rows(tokens);
    for (int64_t t = 0; t < tokens; ++t) rows[t] = (const char*)x + t * x_stride;
    Matrix matrix{(const char*)data, (const char*)scales, (const char*)zeros, nullptr, nullptr};
    for (int64_t i = 0; i < copies; ++i, matrix.data += own.rows * own.stride())
        for (int64_t first = 0; first < own.rows; first += kStrip) {
            const int64_t count = std::min(kStrip, own.rows - first);
            const bool is_last = i + 1 == copies && first + count == own.rows;
            dot_rows({&own, matrix, first, count, rows.data(), tokens, out + first, own.rows,
                      is_last ? nullptr : matrix.data + (first + count) * own.stride(),
                      bf16_rows != 0, (hetero::Isa)isa});
        }
}

}
