#include "pool.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older kernels say EINVAL
#endif

namespace hetero::pool {
namespace {

constexpr int kPreferred = 1;           // MPOL_PREFERRED of linux/mempolicy.h
constexpr int64_t kPieceBytes = 8 << 20;  // touched by one thread at a time
constexpr unsigned kPortable = 1, kDeviceMap = 2;  // CU_MEMHOSTREGISTER_*

double now() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

// The functions of libcuda needed here; CUcontext is a pointer, CUresult an int.
struct Driver {
    int (*get_context)(void**) = nullptr;
    int (*set_context)(void*) = nullptr;
    int (*register_memory)(void*, size_t, unsigned) = nullptr;
    int (*unregister_memory)(void*) = nullptr;
    int (*error_name)(int, const char**) = nullptr;

    // Whether it can be used. The library stays loaded: other code uses it, too.
    bool open(const char* path) {
        void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (!library) return false;
        find(library, "cuCtxGetCurrent", get_context);
        find(library, "cuCtxSetCurrent", set_context);
        find(library, "cuMemHostRegister_v2", register_memory);
        find(library, "cuMemHostUnregister", unregister_memory);
        find(library, "cuGetErrorName", error_name);
        return register_memory && unregister_memory;
    }

    template <typename Function>
    static void find(void* library, const char* name, Function& function) {
        function = reinterpret_cast<Function>(dlsym(library, name));
    }
};

class Pool {
public:
    explicit Pool(const Options& options) : options_(options), registers_(options.libcuda) {
        options_.libcuda = nullptr;  // the caller's
        page_ = sysconf(_SC_PAGESIZE);
        bytes_ = round_up(options.row_bytes * options.num_rows);
        chunks_ = (options.num_rows + options.chunk_rows - 1) / options.chunk_rows;
    }

    // Returns an errno, 0 on success.
    int start(const char* libcuda) {
        void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) return errno;
        base_ = static_cast<char*>(memory);
        // A child would make this process write to copies of pages that the device reads; a core
        // dump would hold everybody's prompts.
        madvise(base_, bytes_, MADV_DONTFORK);
        madvise(base_, bytes_, MADV_DONTDUMP);
        prefer_node();
        if (registers_) {
            if (!driver_.open(libcuda)) {
                snprintf(failure_, sizeof failure_, "the driver library %s cannot be used",
                         libcuda);
                finished_ = true;
                failed_ = true;
                return 0;
            }
            if (driver_.get_context) driver_.get_context(&context_);
        }
        touched_ = std::vector<std::atomic<int64_t>>(chunks_);
        // Signals are handled by Python's threads.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        for (int64_t i = 0; i < options_.threads; i++) touchers_.emplace_back([this] { touch(); });
        filler_ = std::thread([this] { fill(); });
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return 0;
    }

    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        changed_.notify_all();
        if (filler_.joinable()) filler_.join();
        for (std::thread& thread : touchers_) thread.join();
        if (!base_) return;
        // In an own thread, to leave the caller's current context alone.
        if (registered_) std::thread([this] { unregister(); }).join();
        munmap(base_, bytes_);
    }

    int64_t ready() const { return ready_rows_.load(std::memory_order_acquire); }
    bool failed() const { return failed_.load(std::memory_order_acquire); }

    bool wait(double seconds) {
        std::unique_lock<std::mutex> lock(mutex_);
        auto longest = std::chrono::duration<double>(std::min(seconds, 1e6));
        return changed_.wait_for(lock, longest, [this] { return finished_; });
    }

    void state(State* state) {
        std::lock_guard<std::mutex> lock(mutex_);
        *state = {reinterpret_cast<int64_t>(base_), ready(), mbind_error_, touch_seconds_,
                  register_seconds_};
    }

    void failure(char* text, int64_t bytes) {
        std::lock_guard<std::mutex> lock(mutex_);
        snprintf(text, bytes, "%s", failure_);
    }

private:
    int64_t round_up(int64_t bytes) const { return (bytes + page_ - 1) / page_ * page_; }

    int64_t begin_of(int64_t chunk) const {
        return chunk * options_.chunk_rows * options_.row_bytes;
    }
    int64_t end_of(int64_t chunk) const {
        return chunk + 1 < chunks_ ? begin_of(chunk + 1) : bytes_;
    }
    int64_t rows_before(int64_t chunk) const {
        return std::min(chunk * options_.chunk_rows, options_.num_rows);
    }

    void prefer_node() {
        if (options_.node < 0) return;
        constexpr int64_t kBits = 8 * sizeof(unsigned long);
        std::vector<unsigned long> mask(options_.node / kBits + 1);
        mask[options_.node / kBits] = 1UL << (options_.node % kBits);
        // The kernel reads one bit less than the argument says.
        if (syscall(SYS_mbind, base_, bytes_, kPreferred, mask.data(), mask.size() * kBits + 1, 0))
            mbind_error_ = errno;
    }

    // Touches piece after piece of the memory, in ascending order.
    void touch() {
        double start = now();
        for (;;) {
            int64_t chunk, begin, end;
            {
                std::lock_guard<std::mutex> lock(mutex_);
                if (stop_ || next_chunk_ == chunks_) break;
                chunk = next_chunk_;
                begin = begin_of(chunk) + next_offset_;
                end = std::min(begin + kPieceBytes, end_of(chunk));
                next_offset_ += end - begin;
                if (end == end_of(chunk)) next_chunk_++, next_offset_ = 0;
            }
            if (madvise(base_ + begin, end - begin, MADV_POPULATE_WRITE))
                for (int64_t at = begin; at < end; at += page_)
                    const_cast<volatile char*>(base_)[at] = 0;
            if (touched_[chunk].fetch_add(end - begin) + end - begin ==
                end_of(chunk) - begin_of(chunk)) {
                std::lock_guard<std::mutex> lock(mutex_);
                changed_.notify_all();
            }
        }
        std::lock_guard<std::mutex> lock(mutex_);
        touch_seconds_ = std::max(touch_seconds_, now() - start);
    }

    // Registers chunk after chunk, each as soon as it is touched.
    void fill() {
        if (registers_ && driver_.set_context && context_) driver_.set_context(context_);
        for (int64_t chunk = 0; chunk < chunks_; chunk++) {
            int64_t bytes = end_of(chunk) - begin_of(chunk);
            {
                std::unique_lock<std::mutex> lock(mutex_);
                changed_.wait(lock, [&] { return stop_ || touched_[chunk].load() == bytes; });
                if (stop_) break;
            }
            double start = now();
            int error = 0;
            if (registers_)
                error = driver_.register_memory(base_ + begin_of(chunk), bytes,
                                                kPortable | kDeviceMap);
            double seconds = now() - start;
            std::unique_lock<std::mutex> lock(mutex_);
            register_seconds_ += seconds;
            if (error) {
                refuse(chunk, error);
                break;
            }
            if (registers_) registered_++;
            ready_rows_.store(rows_before(chunk + 1), std::memory_order_release);
            if (options_.pause) {
                // The driver's lock was held all the time: let other threads have it.
                auto pause = std::chrono::duration<double>(seconds);
                changed_.wait_for(lock, pause, [this] { return stop_; });
            } else {
                lock.unlock();
                std::this_thread::yield();
            }
        }
        finish();
    }

    // Called with the lock held.
    void refuse(int64_t chunk, int error) {
        const char* name = nullptr;
        if (!driver_.error_name || driver_.error_name(error, &name)) name = nullptr;
        const int length = snprintf(failure_, sizeof failure_,
                                    "cuMemHostRegister refused chunk %lld of %lld: CUDA error %d",
                                    (long long)chunk + 1, (long long)chunks_, error);
        if (name) snprintf(failure_ + length, sizeof failure_ - length, " (%s)", name);
    }

    void finish() {
        const bool failed = failure_[0] != '\0';  // written by this thread alone
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (failed) stop_ = true;
        }
        if (failed) {
            // Memory that is not registered cannot be used: stop touching it, and give it back
            // to the system.
            for (std::thread& thread : touchers_) thread.join();
            touchers_.clear();
            int64_t used = begin_of(registered_);
            if (used < bytes_) madvise(base_ + used, bytes_ - used, MADV_DONTNEED);
        }
        std::lock_guard<std::mutex> lock(mutex_);
        finished_ = true;
        failed_ = failed;
        changed_.notify_all();
    }

    void unregister() {
        if (driver_.set_context && context_) driver_.set_context(context_);
        for (int64_t chunk = 0; chunk < registered_; chunk++)
            driver_.unregister_memory(base_ + begin_of(chunk));
    }

    Options options_;
    const bool registers_;
    int64_t page_, bytes_, chunks_;
    char* base_ = nullptr;
    Driver driver_;
    void* context_ = nullptr;
    std::vector<std::atomic<int64_t>> touched_;  // bytes of each chunk
    std::atomic<int64_t> ready_rows_{0};
    std::atomic<bool> failed_{false};  // and finished
    std::vector<std::thread> touchers_;
    std::thread filler_;
    int64_t mbind_error_ = 0;

    std::mutex mutex_;  // guards what follows
    std::condition_variable changed_;
    int64_t next_chunk_ = 0, next_offset_ = 0;
    int64_t registered_ = 0;  // chunks
    bool stop_ = false, finished_ = false;
    double touch_seconds_ = 0, register_seconds_ = 0;
    char failure_[400] = "";
};

Pool* as_pool(void* pool) { return static_cast<Pool*>(pool); }

}  // namespace
}  // namespace hetero::pool

using hetero::pool::as_pool;

extern "C" {

void* hetero_pool_open(const hetero::pool::Options* options, int64_t* error) {
    auto* pool = new (std::nothrow) hetero::pool::Pool(*options);
    *error = pool ? pool->start(options->libcuda) : ENOMEM;
    if (!*error) return pool;
    delete pool;
    return nullptr;
}

void hetero_pool_state(void* pool, hetero::pool::State* state) { as_pool(pool)->state(state); }

int64_t hetero_pool_ready(void* pool) {
    bool failed = as_pool(pool)->failed();  // read first: once true, rows do not grow
    return failed ? ~as_pool(pool)->ready() : as_pool(pool)->ready();
}

int64_t hetero_pool_wait(void* pool, double seconds) { return as_pool(pool)->wait(seconds); }

void hetero_pool_failure(void* pool, char* text, int64_t bytes) {
    as_pool(pool)->failure(text, bytes);
}

void hetero_pool_close(void* pool) { delete as_pool(pool); }

}
