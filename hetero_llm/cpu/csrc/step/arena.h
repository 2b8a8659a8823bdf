// Two kinds of zeroed memory: an arena in huge pages, and scratch buffers that grow.

#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace hetero {

constexpr int64_t kHugePage = 2 << 20, kLine = 64;

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Memory that is given out front to back in the order of use: one stream for the prefetcher. The
// first pass of `take` counts; after `reserve`, a second one gets the memory.
class Arena {
  public:
    ~Arena() {
        if (mapped_) munmap(mapped_, size_);
    }
    // False: the system has no memory. Pages that are never written cost nothing.
    bool reserve() {
        size_ = round_up(next_, kHugePage) + kHugePage;
        void* got = mmap(nullptr, size_, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (got == MAP_FAILED) return false;
        mapped_ = got;
        base_ = (char*)round_up((int64_t)got, kHugePage);
        next_ = 0;
        madvise(mapped_, size_, MADV_HUGEPAGE);  // if refused, steps are a few percent slower
        return true;
    }
    // Null before `reserve`.
    template <typename T>
    T* take(int64_t count) {
        char* at = base_ ? base_ + next_ : nullptr;
        next_ += round_up(count * (int64_t)sizeof(T), kLine);
        return (T*)at;
    }

  private:
    void* mapped_ = nullptr;
    char* base_ = nullptr;
    int64_t size_ = 0, next_ = 0;
};

// Scratch that grows; its content does not survive growing.
template <typename T>
class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }
    operator T*() const { return data_; }
    T* reserve(int64_t count) {
        const int64_t bytes = round_up(count * (int64_t)sizeof(T), kLine);
        if (bytes > size_) {
            std::free(data_);
            size_ = round_up(bytes + bytes / 4, kLine);
            data_ = (T*)std::aligned_alloc(kLine, size_);
            if (!data_) std::abort();  // a step cannot report an error
            std::memset((void*)data_, 0, size_);
        }
        return data_;
    }

  private:
    T* data_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace hetero
