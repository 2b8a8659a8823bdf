// What threads of ours have in common: how they begin, where they run, and what they sleep on.

#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace hetero {

// Starts a thread that handles no signals: the program's other threads do. False: the system
// refuses.
inline bool start_thread(pthread_t* thread, void* (*body)(void*), void* argument) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const bool is_started = pthread_create(thread, nullptr, body, argument) == 0;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return is_started;
}

// Binds the calling thread to a logical CPU; a negative one leaves the choice to the system. Fails
// only if the CPU was taken away meanwhile; then the system chooses, too.
inline void pin_thread(int cpu) {
    if (cpu < 0) return;
    cpu_set_t* set = CPU_ALLOC(cpu + 1);
    CPU_ZERO_S(CPU_ALLOC_SIZE(cpu + 1), set);
    CPU_SET_S(cpu, CPU_ALLOC_SIZE(cpu + 1), set);
    pthread_setaffinity_np(pthread_self(), CPU_ALLOC_SIZE(cpu + 1), set);
    CPU_FREE(set);
}

// Sleeps until `wake` if the word still is `value`, or for `limit`; may return early.
inline void sleep_on(std::atomic<uint32_t>& word, uint32_t value, const timespec* limit = nullptr) {
    static_assert(sizeof word == sizeof(uint32_t));
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, limit, nullptr, 0);
}

inline void wake(std::atomic<uint32_t>& word, uint32_t most_threads) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, most_threads, nullptr, nullptr, 0);
}

}  // namespace hetero
