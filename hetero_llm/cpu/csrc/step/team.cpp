// Threads that wait for the next run: spinning first, then asleep on a futex.
//
// The barrier is a dissemination barrier: in round r thread i signals thread i + 2^r and waits for
// thread i - 2^r. After log2(n) rounds every thread has, directly or through others, a signal of
// every other. A thread spins on cache lines that one other thread writes, so no line is contended,
// whatever the number of threads.
//
// A thread that waits at a barrier spins for its patience, then sleeps until the sender wakes it.
// It does not yield: on a core that others want, every yield hands them a whole time slice, while a
// thread that slept gets its core back as soon as it is woken.

#include "team.h"

#include <algorithm>
#include <climits>
#include <memory>
#include <numeric>
#include <vector>

#include "threads.h"
#include "waiting.h"

namespace hetero {
namespace {

// Nanoseconds. The most is longer than parts of a step differ on cores of our own; waking up takes 5
// to 50 microseconds.
constexpr int64_t kMostPatience = 200000, kLeastPatience = 2000;
// A wait as long is not for a part of a step that takes longer, but for a core that was taken away:
// a time slice of Linux is some milliseconds.
constexpr int64_t kCoreTaken = 500000;
// For how long a thread expects that to happen again: four times as long if it does soon.
constexpr int64_t kFirstCaution = 10'000'000, kMostCaution = 1'000'000'000;
constexpr int kSpinsPerClock = 64;

// For how long a thread spins at a barrier before it sleeps: briefly for a while after its team has
// lost a core, since threads that sleep get theirs back as soon as they are woken; else for longer
// than parts of a step differ, or each barrier would cost the time to wake up.
class Patience {
  public:
    int64_t at(int64_t now) const { return now < careful_until_ ? kLeastPatience : kMostPatience; }

    // A wait has ended now, for which the thread has slept.
    void note_wait(int64_t now, int64_t waited) {
        if (waited < kCoreTaken) return;
        const bool careful = now < careful_until_, soon = now < careful_until_ + caution_;
        if (!careful) caution_ = soon ? std::min(4 * caution_, kMostCaution) : kFirstCaution;
        careful_until_ = now + caution_;
    }

  private:
    int64_t careful_until_ = 0, caution_ = kFirstCaution;
};

// A word on a cache line of its own; a pair of lines, as Intel's prefetcher fetches pairs.
struct alignas(128) Word {
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> asleep{0};  // whether the reader of a signal sleeps on it
};

struct alignas(128) Seat {
    pthread_t handle{};
    int cpu = -1;
    // Only this thread uses these two.
    uint32_t barriers = 0;  // passed so far
    Patience patience;
    std::atomic<int64_t> delay_ns{0};
    std::atomic<int64_t> slept_ns{0};  // at barriers
};

std::atomic<uint32_t> forks{0};

void count_fork() { forks.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

struct Team::State {
    struct Start {  // argument of a new thread
        State* state;
        int thread;
    };

    struct alignas(128) {
        std::atomic<uint32_t> runs{0};  // started so far; the futex
        Body body = nullptr;            // null: the threads end
        void* context = nullptr;
    } order;
    Word asleep;
    int threads, rounds = 0;
    int64_t spin_ns;
    uint32_t born;  // `forks` when the threads were made
    std::unique_ptr<Seat[]> seats;
    std::unique_ptr<Word[]> signals;  // [threads][rounds] barriers that the sender has reached
    std::vector<Start> starts;

    void launch();
    void announce(Body body, void* context);
    uint32_t await(uint32_t seen);
    void wait_for_all(int thread);
    void wait_for(Word& signal, uint32_t barrier, Seat& seat);
    static void* work(void* start);
};

// Makes the threads; if the system refuses one, the team consists of those made so far.
void Team::State::launch() {
    born = forks.load(std::memory_order_relaxed);
    order.runs.store(0, std::memory_order_relaxed);
    asleep.value.store(0, std::memory_order_relaxed);
    seats[0].barriers = 0;
    starts.resize(threads);
    int made = 1;
    for (; made < threads; ++made) {
        seats[made].barriers = 0;
        starts[made] = {this, made};
        if (!start_thread(&seats[made].handle, work, &starts[made])) break;
    }
    // No thread reads these before the first run.
    threads = made;
    rounds = 0;
    while (1 << rounds < threads) ++rounds;
    signals.reset(new Word[threads * rounds + 1]);
}

void Team::State::announce(Body body, void* context) {
    order.body = body;
    order.context = context;
    // A thread counts itself as asleep before the kernel looks at `runs`: either we see it here or
    // it sees the new run there.
    order.runs.fetch_add(1, std::memory_order_seq_cst);
    if (asleep.value.load(std::memory_order_seq_cst) > 0) wake(order.runs, INT_MAX);
}

// Returns the number of the next run once it has started.
uint32_t Team::State::await(uint32_t seen) {
    const int64_t until = now_ns() + spin_ns;
    for (int spins = 1;; ++spins) {
        const uint32_t runs = order.runs.load(std::memory_order_acquire);
        if (runs != seen) return runs;
        if (spins % kSpinsPerClock == 0 && now_ns() >= until) break;
        pause_briefly();
    }
    asleep.value.fetch_add(1, std::memory_order_seq_cst);
    while (order.runs.load(std::memory_order_acquire) == seen) sleep_on(order.runs, seen);
    asleep.value.fetch_sub(1, std::memory_order_relaxed);
    return order.runs.load(std::memory_order_acquire);
}

void Team::State::wait_for_all(int thread) {
    const uint32_t barrier = ++seats[thread].barriers;
    for (int round = 0; round < rounds; ++round) {
        const int to = (thread + (1 << round)) % threads;
        Word& theirs = signals[to * rounds + round];
        // Either the reader's `asleep` is seen here, or the reader sees the value before it sleeps.
        theirs.value.store(barrier, std::memory_order_seq_cst);
        if (theirs.asleep.load(std::memory_order_seq_cst) != 0) wake(theirs.value, 1);
        wait_for(signals[thread * rounds + round], barrier, seats[thread]);
    }
}

// Returns when the sender has reached the barrier. It may be one barrier ahead already: compared
// with wrap-around.
void Team::State::wait_for(Word& signal, uint32_t barrier, Seat& seat) {
    const auto reached = [&](uint32_t value) { return (int32_t)(value - barrier) >= 0; };
    int64_t until = 0;
    for (int spins = 1; !reached(signal.value.load(std::memory_order_acquire)); ++spins) {
        pause_briefly();
        if (spins % kSpinsPerClock != 0) continue;
        const int64_t now = now_ns();
        if (until == 0) until = now + seat.patience.at(now);
        if (now < until) continue;
        signal.asleep.store(1, std::memory_order_seq_cst);
        uint32_t value = signal.value.load(std::memory_order_seq_cst);
        while (!reached(value)) {
            sleep_on(signal.value, value);
            value = signal.value.load(std::memory_order_seq_cst);
        }
        signal.asleep.store(0, std::memory_order_relaxed);
        const int64_t awake = now_ns();
        seat.slept_ns.fetch_add(awake - now, std::memory_order_relaxed);
        seat.patience.note_wait(awake, awake - now);
        return;
    }
}

void* Team::State::work(void* start) {
    const auto [state, thread] = *static_cast<Start*>(start);
    pthread_setname_np(pthread_self(), "hetero-cpu");
    pin_thread(state->seats[thread].cpu);
    for (uint32_t seen = 0;;) {
        seen = state->await(seen);
        const Body body = state->order.body;
        if (body == nullptr) return nullptr;
        body(state->order.context, thread);
        state->wait_for_all(thread);
    }
}

Team::Team(int threads, const int* cpus, int64_t spin_us) : state_(new State) {
    static const int registered = pthread_atfork(nullptr, nullptr, count_fork);
    (void)registered;
    state_->threads = threads < 1 ? 1 : threads;
    state_->spin_ns = spin_us * 1000;
    state_->seats.reset(new Seat[state_->threads]);
    for (int i = 1; cpus != nullptr && i < state_->threads; ++i) state_->seats[i].cpu = cpus[i];
    state_->launch();
}

Team::~Team() {
    if (state_->born == forks.load(std::memory_order_relaxed)) {
        state_->announce(nullptr, nullptr);
        for (int i = 1; i < state_->threads; ++i) pthread_join(state_->seats[i].handle, nullptr);
    }
    delete state_;
}

int Team::size() const { return state_->threads; }

void Team::revive() {
    if (state_->born != forks.load(std::memory_order_relaxed)) state_->launch();
}

void Team::run_body(Body body, void* context) {
    revive();
    state_->announce(body, context);
    body(context, 0);
    state_->wait_for_all(0);
}

void Team::barrier(int thread) {
    const int64_t delay = state_->seats[thread].delay_ns.load(std::memory_order_relaxed);
    if (delay > 0) {
        const timespec wait{(time_t)(delay / 1000000000), (long)(delay % 1000000000)};
        nanosleep(&wait, nullptr);
    }
    state_->wait_for_all(thread);
}

int64_t Team::slept_ns() const {
    int64_t sum = 0;
    for (int i = 0; i < state_->threads; ++i) {
        sum += state_->seats[i].slept_ns.load(std::memory_order_relaxed);
    }
    return sum;
}

void Team::delay(int thread, int64_t nanoseconds) {
    state_->seats[thread].delay_ns.store(nanoseconds, std::memory_order_relaxed);
}

}  // namespace hetero

extern "C" {

// The functions of Team in team.h, and checks of it for tests. cpus: [threads] or null.
void* hetero_team_new(int64_t threads, const int32_t* cpus, int64_t spin_us) {
    return new hetero::Team((int)threads, cpus, spin_us);
}

void hetero_team_free(hetero::Team* team) { delete team; }

int64_t hetero_team_size(hetero::Team* team) { return team->size(); }

int64_t hetero_team_slept(hetero::Team* team) { return team->slept_ns(); }

// For tests: the patience of a thread at each of `count` times, each of which is the end of a wait.
void hetero_team_patience(const int64_t* now, const int64_t* waited, int64_t count, int64_t* found) {
    hetero::Patience patience;
    for (int64_t i = 0; i < count; ++i) {
        patience.note_wait(now[i], waited[i]);
        found[i] = patience.at(now[i]);
    }
}

void hetero_team_delay(hetero::Team* team, int64_t thread, int64_t nanoseconds) {
    team->delay((int)thread, nanoseconds);
}

// One run of 2 * rounds barriers. In each round every thread writes its number of the round and,
// behind a barrier, adds up the numbers of all. Returns the number of wrong sums; a thread that did
// not take part counts as one.
int64_t hetero_team_check(hetero::Team* team, int64_t rounds) {
    const int64_t threads = team->size();
    std::vector<int64_t> written(threads, 0), wrong(threads, 1);
    team->run([&](int thread) {
        int64_t mistakes = 0;
        for (int64_t round = 1; round <= rounds; ++round) {
            written[thread] = round * (thread + 1);
            team->barrier(thread);
            const int64_t sum = std::accumulate(written.begin(), written.end(), (int64_t)0);
            mistakes += sum != round * threads * (threads + 1) / 2;
            team->barrier(thread);
        }
        wrong[thread] = mistakes;
    });
    return std::accumulate(wrong.begin(), wrong.end(), (int64_t)0);
}

// Nanoseconds that `runs` runs with `barriers` barriers each take.
int64_t hetero_team_time(hetero::Team* team, int64_t runs, int64_t barriers) {
    const int64_t begin = hetero::now_ns();
    for (int64_t i = 0; i < runs; ++i)
        team->run([&](int thread) {
            for (int64_t k = 0; k < barriers; ++k) team->barrier(thread);
        });
    return hetero::now_ns() - begin;
}

}
