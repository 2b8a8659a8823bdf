// Two kinds of zeroed memory: an arena in huge pages, and scratch buffers that grow.

#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace hetero {

constexpr int64_t kHugePage = 2 << 20, kLine = 64;

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Memory of a fixed size, given out front to back in the order of use: one stream for the
// prefetcher.
class Arena {
  public:
    ~Arena() {
        if (base_) munmap(base_, size_);
    }
    bool reserve(int64_t bytes) {
        size_ = round_up(bytes, kHugePage) + kHugePage;
        void* got = mmap(nullptr, size_, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (got == MAP_FAILED) return false;
        base_ = (char*)got;
        next_ = round_up((int64_t)base_, kHugePage) - (int64_t)base_;
        madvise(base_, size_, MADV_HUGEPAGE);  // if refused, steps are a few percent slower
        return true;
    }
    // Null if less than `bytes` is left.
    void* take(int64_t bytes) {
        const int64_t begin = next_;
        if (begin + round_up(bytes, kLine) > size_) return nullptr;
        next_ += round_up(bytes, kLine);
        return base_ + begin;
    }

  private:
    char* base_ = nullptr;
    int64_t size_ = 0, next_ = 0;
};

// Scratch that grows; its content does not survive growing.
class Buffer {
  public:
    ~Buffer() { std::free(data_); }
    template <typename T>
    T* of(int64_t count) {
        const int64_t bytes = round_up(count * (int64_t)sizeof(T), kLine);
        if (bytes > size_) {
            std::free(data_);
            size_ = bytes + bytes / 4;
            size_ = round_up(size_, kLine);
            data_ = std::aligned_alloc(kLine, size_);
            if (!data_) std::abort();  // a step cannot report an error
            std::memset(data_, 0, size_);
        }
        return (T*)data_;
    }

  private:
    void* data_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace hetero
