// Two threads on one ring, for ThreadSanitizer and AddressSanitizer: `ring_stress RECORDS SPIN_US`.
// Exits with 0 if every message arrived as it was pushed, in order.

#include "ring.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <thread>
#include <vector>

using namespace hetero::ring;

namespace {

constexpr int64_t kSlots = 32;
constexpr uint64_t kStamp = 0x123456789ABCDEFull;
constexpr uint32_t kLongest = 100;
constexpr uint32_t kBatch = 5;

uint32_t length_of(uint32_t number) { return number * 2654435761u % (kLongest + 1); }

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// Now and then a while in which the other side runs empty or full.
void dawdle(uint32_t number) {
    if (number % 97 != 0) return;
    const timespec wait{0, (long)(number % 5) * 100000};
    nanosleep(&wait, nullptr);
}

void push_all(void* base, uint32_t messages) {
    void* end = hetero_ring_open(base, kProducer);
    std::vector<MessageHeader> headers;
    std::vector<uint32_t> words;
    for (uint32_t next = 0; next < messages;) {
        headers.clear();
        words.clear();
        for (uint32_t number = next; number < messages && number < next + kBatch; ++number) {
            headers.push_back({3, 0, number, 0, length_of(number), 0, 0});
            for (uint32_t i = 0; i < length_of(number); ++i) words.push_back(number + i);
        }
        next += (uint32_t)hetero_ring_push(end, headers.data(), words.data(),
                                           (int64_t)headers.size(), (int64_t)words.size());
        dawdle(next);
    }
    hetero_ring_close(end);
}

uint32_t pop_all(void* base, uint32_t messages, int64_t spin_ns) {
    void* end = hetero_ring_open(base, kConsumer);
    std::vector<MessageHeader> headers(8);
    std::vector<uint32_t> words(kMaxWords);
    hetero_ring_buffers(end, headers.data(), words.data(), 8, kMaxWords);
    uint32_t next = 0, wrong = 0;
    while (next < messages) {
        const int64_t told = hetero_ring_wait(end, now_ns() + 60'000'000'000, spin_ns);
        const int64_t popped = told >> kMessagesBit & kMaxMessages;
        if (told % (1 << kKindBit) != kOk) {
            fprintf(stderr, "told %llx at message %u\n", (long long)told, next);
            return wrong + 1;
        }
        const uint32_t* body = words.data();
        for (int64_t i = 0; i < popped; ++i, ++next) {
            const uint32_t length = headers[i].words;
            wrong += headers[i].generation != next || length != length_of(next);
            for (uint32_t w = 0; w < length; ++w) wrong += *body++ != next + w;
        }
        dawdle(next);
    }
    Counters counters;
    hetero_ring_counters(end, &counters);
    wrong += counters.bad_positions != 0;
    hetero_ring_close(end);
    return wrong;
}

}  // namespace

int main(int, char** arguments) {
    const uint32_t messages = (uint32_t)atoi(arguments[1]);
    const int64_t spin_ns = atoll(arguments[2]) * 1000;
    const size_t bytes = (size_t)hetero_ring_bytes(kSlots);
    void* base = aligned_alloc(128, (bytes + 127) / 128 * 128);
    hetero_ring_format(base, kSlots, kStamp, 0xFFFFFF00u);
    if (hetero_ring_refusal(base, (int64_t)bytes, kSlots, kStamp) != kFine) return 2;
    uint32_t wrong = 0;
    std::thread consumer([&] { wrong = pop_all(base, messages, spin_ns); });
    std::thread producer([&] { push_all(base, messages); });
    producer.join();
    consumer.join();
    free(base);
    printf("%u messages, %u wrong\n", messages, wrong);
    return wrong != 0;
}
