// Polls the mailbox and answers it, see expert_team.h; and the library's functions for Python.

#include "expert_team.h"

#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "waiting.h"

namespace hetero::experts {

using hetero::now_ns;
using hetero::pause_briefly;

namespace {

constexpr int kSpinsPerClock = 64;
constexpr int64_t kShortestNap = 50000, kLongestNap = 1000000;  // nanoseconds
constexpr unsigned long kTimerSlack = 1000;                     // of naps, nanoseconds

void pin(int cpu) {
    if (cpu < 0) return;
    // Fails only if the CPU was taken away meanwhile; then the system chooses.
    cpu_set_t* set = CPU_ALLOC(cpu + 1);
    CPU_ZERO_S(CPU_ALLOC_SIZE(cpu + 1), set);
    CPU_SET_S(cpu, CPU_ALLOC_SIZE(cpu + 1), set);
    pthread_setaffinity_np(pthread_self(), CPU_ALLOC_SIZE(cpu + 1), set);
    CPU_FREE(set);
}

struct Work {
    Exchange* exchange;
    Team* team;
};

void work_of(void* context, int thread) {
    const Work& work = *static_cast<Work*>(context);
    work.exchange->work(*work.team, thread);
}

void nothing(void*, int) {}

}  // namespace

ExpertTeam::ExpertTeam(const Setting& setting, int threads, const int32_t* cpus, int64_t spin_us,
                       const int32_t* request, int32_t* answer)
    : cpu_(cpus ? cpus[0] : -1),
      spin_ns_(spin_us * 1000),
      request_(request),
      answer_(answer),
      team_(new Team(threads, cpus, spin_us)),
      exchange_(setting, team_->size()),
      process_(getpid()) {
    // Signals are handled by the program's other threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    has_thread_ = pthread_create(&thread_, nullptr, serve_of, this) == 0;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

ExpertTeam::~ExpertTeam() { stop(); }

void ExpertTeam::wake() {
    // Either `asleep` is seen here, or thread 0 sees the call before it sleeps.
    bell_.calls.fetch_add(1, std::memory_order_seq_cst);
    if (bell_.asleep.load(std::memory_order_seq_cst) == 0) return;
    syscall(SYS_futex, &bell_.calls, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

void ExpertTeam::stop() {
    // After a fork the child has the object but not the thread.
    if (!has_thread_ || getpid() != process_) return;
    bell_.stops.store(true, std::memory_order_seq_cst);
    bell_.calls.fetch_add(1, std::memory_order_seq_cst);
    syscall(SYS_futex, &bell_.calls, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
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
    syscall(SYS_futex, &bell_.calls, FUTEX_WAIT_PRIVATE, calls, &wait, nullptr, 0);
    bell_.asleep.store(0, std::memory_order_seq_cst);
}

// Whether more requests may come.
bool ExpertTeam::answer(int32_t sequence) {
    const int64_t begin = now_ns();
    const Refusal refusal = exchange_.open(request_[kLayer], request_[kTokens]);
    if (refusal != Refusal::kNone) {
        __atomic_store_n(answer_ + kStopped, (int32_t)refusal, __ATOMIC_RELEASE);
        return false;
    }
    if (!exchange_.is_empty()) {
        Work work{&exchange_, team_.get()};
        team_->run(work_of, &work);
    }
    __atomic_store_n(answer_ + kAnswered, sequence, __ATOMIC_RELEASE);
    exchanges_.fetch_add(1, std::memory_order_relaxed);
    busy_ns_.fetch_add(now_ns() - begin, std::memory_order_relaxed);
    return true;
}

void ExpertTeam::serve() {
    pin(cpu_);
    int32_t answered = __atomic_load_n(answer_ + kAnswered, __ATOMIC_RELAXED);
    int64_t until = now_ns() + spin_ns_, nap_ns = kShortestNap;
    uint32_t calls = bell_.calls.load(std::memory_order_acquire);
    for (int spins = 1;; ++spins) {
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
        team_->run(nothing, nullptr);
        until = 0;
        nap_ns = kShortestNap;
    }
    __atomic_store_n(answer_ + kStopped, kStoppedByCall, __ATOMIC_RELEASE);
}

}  // namespace hetero::experts

extern "C" {

// Fields as in `Form`.
struct HeteroExpertForm {
    int64_t kind, scale, group, scale_rows, rows, depth, zeros;
};

// Fields as in `Setting`; request, answer: the mailbox's words.
struct HeteroExpertSetting {
    int64_t layers, experts, hidden, inner, max_tokens, experts_per_token;
    HeteroExpertForm gate_up, down;
    int64_t gate;
    double alpha, limit;
    int64_t input, tile_tokens, isa;
    const int64_t* addresses;
    const int32_t* ids;
    const float* weights;
    const void* x;
    float* y;
    const int32_t* request;
    int32_t* answer;
};

}

namespace {

hetero::experts::Form form_of(const HeteroExpertForm& form) {
    using namespace hetero::experts;
    return {(Kind)form.kind, (Number)form.scale, form.group, form.scale_rows,
            form.rows,       form.depth,         (Zeros)form.zeros};
}

}  // namespace

extern "C" {

// Whether products serve the form.
int64_t hetero_experts_fit(const HeteroExpertForm* form) {
    return hetero::experts::fits(form_of(*form));
}

// cpus: [threads] or null. Null: the system refuses to make threads.
void* hetero_experts_new(const HeteroExpertSetting* setting, int64_t threads, const int32_t* cpus,
                         int64_t spin_us) {
    using namespace hetero::experts;
    const HeteroExpertSetting& s = *setting;
    const Setting own{s.layers, s.experts, s.hidden, s.inner, s.max_tokens, s.experts_per_token,
                      form_of(s.gate_up), form_of(s.down),
                      {(Gate)s.gate, (float)s.alpha, (float)s.limit}, (Number)s.input, s.addresses,
                      s.ids, s.weights, (const char*)s.x, s.y, s.tile_tokens, (hetero::Isa)s.isa};
    ExpertTeam* team = new ExpertTeam(own, (int)threads, cpus, spin_us, s.request, s.answer);
    if (team->is_running()) return team;
    delete team;
    return nullptr;
}

int64_t hetero_experts_size(void* team) {
    return static_cast<hetero::experts::ExpertTeam*>(team)->size();
}

void hetero_experts_wake(void* team) { static_cast<hetero::experts::ExpertTeam*>(team)->wake(); }

void hetero_experts_stop(void* team) { static_cast<hetero::experts::ExpertTeam*>(team)->stop(); }

void hetero_experts_free(void* team) { delete static_cast<hetero::experts::ExpertTeam*>(team); }

// out: [4] as in `Running`.
void hetero_experts_running(void* team, int64_t* out) {
    const auto running = static_cast<hetero::experts::ExpertTeam*>(team)->running();
    out[0] = running.exchanges;
    out[1] = running.busy_ns;
    out[2] = running.naps;
    out[3] = running.slept_ns;
}

// For tests and benches: posts requests one after the other as a device does and waits for each
// answer. nanoseconds: [count] from the release of the sequence number to the answer seen. Returns
// 0, or the word STOPPED as soon as the team writes it.
int64_t hetero_experts_post(int32_t* request, const int32_t* answer, int64_t layer, int64_t tokens,
                            int64_t count, int64_t gap_ns, int64_t* nanoseconds) {
    using namespace hetero::experts;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t begin_gap = now_ns();
        while (now_ns() - begin_gap < gap_ns) pause_briefly();
        const int32_t sequence =
            (int32_t)((uint32_t)__atomic_load_n(request + kSequence, __ATOMIC_RELAXED) + 1);
        request[kLayer] = (int32_t)layer;
        request[kTokens] = (int32_t)tokens;
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
void hetero_experts_dots(const HeteroExpertForm* form, const void* data, const void* scales,
                         const void* zeros, const void* x, int64_t x_stride, int64_t tokens,
                         float* out, int64_t bf16_rows, int64_t copies, int64_t isa) {
    using namespace hetero::experts;
    constexpr int64_t kStrip = 64;
    const Form own = form_of(*form);
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
