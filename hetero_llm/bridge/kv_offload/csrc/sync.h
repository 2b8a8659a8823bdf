// Mutex and condition variable with timeouts on the monotonic clock. Built on pthread: older thread
// sanitizers do not know the standard library's timed waits.

#pragma once

#include <pthread.h>

#include "waiting.h"

namespace hetero::kv {

class Mutex {
   public:
    Mutex() { pthread_mutex_init(&mutex_, nullptr); }
    ~Mutex() { pthread_mutex_destroy(&mutex_); }
    Mutex(const Mutex&) = delete;
    Mutex& operator=(const Mutex&) = delete;
    void lock() { pthread_mutex_lock(&mutex_); }
    void unlock() { pthread_mutex_unlock(&mutex_); }

   private:
    friend class Condition;
    pthread_mutex_t mutex_;
};

class Held {
   public:
    explicit Held(Mutex& mutex) : mutex_(mutex) { mutex_.lock(); }
    ~Held() { mutex_.unlock(); }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

   private:
    Mutex& mutex_;
};

class Condition {
   public:
    Condition() {
        pthread_condattr_t kind;
        pthread_condattr_init(&kind);
        pthread_condattr_setclock(&kind, CLOCK_MONOTONIC);
        pthread_cond_init(&condition_, &kind);
        pthread_condattr_destroy(&kind);
    }
    ~Condition() { pthread_cond_destroy(&condition_); }
    Condition(const Condition&) = delete;
    Condition& operator=(const Condition&) = delete;
    void signal() { pthread_cond_signal(&condition_); }
    void wait(Mutex& mutex) { pthread_cond_wait(&condition_, &mutex.mutex_); }
    // False at the deadline.
    bool wait_until(Mutex& mutex, int64_t deadline_ns) {
        const timespec until = timespec_of(deadline_ns);
        return pthread_cond_timedwait(&condition_, &mutex.mutex_, &until) == 0;
    }

   private:
    pthread_cond_t condition_;
};

}  // namespace hetero::kv
