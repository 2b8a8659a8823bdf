// The copier over the fake driver, for sanitizers: `copier_stress FAKE_DRIVER ROUNDS`. Loads,
// stores, steps and aborts in turn; exits with 0 if what succeeded is there.

#include "copier.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

using namespace hetero::kv;

namespace {

constexpr int64_t kLayers = 3, kLayerBytes = 96, kRows = 40, kCount = 6;
constexpr int64_t kRowBytes = kLayers * kLayerBytes;

struct Open {
    bool loads, over = false;
    std::vector<int64_t> slots, blocks;
};

}  // namespace

int main(int, char** arguments) {
    void* fake = dlopen(arguments[1], RTLD_NOW);
    if (fake == nullptr) return 2;
    const auto reset = (void (*)(unsigned, int))dlsym(fake, "fake_reset");
    const auto new_stream =
        (int (*)(void**, unsigned, int))dlsym(fake, "cuStreamCreateWithPriority");
    reset(1, 30);
    std::vector<char> device(kRows * kRowBytes), host(kRows * kRowBytes);
    for (size_t i = 0; i < host.size(); ++i) host[i] = (char)(i * 7 + i / 251);
    std::vector<int32_t> flags(64);
    const Setup setup{(int64_t)device.data(), (int64_t)host.data(), (int64_t)flags.data(),
                      kRowBytes, kLayers, kRows, 2, 0, 4 * kLayerBytes, 2 * kLayerBytes, 1, -1};
    char message[200];
    void* copier = hetero_copier_open(arguments[1], &setup, message, sizeof message);
    void* compute = nullptr;
    if (copier == nullptr || new_stream(&compute, 1, 0) != 0) return 2;

    const int64_t rounds = atoll(arguments[2]);
    int64_t wrong = 0, over = 0;
    std::vector<Open> open((size_t)rounds);
    for (int64_t ticket = 0, oldest = 0; over < rounds;) {
        while (oldest < ticket && open[(size_t)oldest].over) ++oldest;
        // At most one ticket for each sixth of the rows; they do not end in order.
        if (ticket < rounds && ticket - oldest < kRows / kCount - 1) {
            Open& own = open[(size_t)ticket];
            own.loads = ticket % 3 != 0;
            for (int64_t i = 0; i < kCount; ++i) {
                const int64_t row = ticket % (kRows / kCount) * kCount;
                own.slots.push_back(row + i);
                own.blocks.push_back(row + (i * 5 + ticket) % kCount);
            }
            hetero_copier_step_launched(copier, ticket + 1, compute);
            const Load load{ticket, ticket % 64, 1 + ticket, ticket % 3, 1 + ticket % 2, kLayers,
                            ticket};
            if (own.loads) {
                hetero_copier_load(copier, &load, own.slots.data(), own.blocks.data(), kCount);
            } else {
                hetero_copier_store(copier, ticket, own.blocks.data(), own.slots.data(), kCount,
                                    ticket);
            }
            if (ticket % 7 == 1) hetero_copier_abort(copier, ticket);
            ++ticket;
        } else {
            hetero_copier_wait(copier, 1'000'000'000);
        }
        Over done[8];
        const int64_t count = hetero_copier_poll(copier, done, 8);
        over += count;
        for (int64_t i = 0; i < count; ++i) {
            Open& own = open[(size_t)done[i].ticket];
            own.over = true;
            for (size_t k = 0; k < (size_t)kCount && done[i].ok; ++k) {
                const char* slot = &host[(size_t)(own.slots[k] * kRowBytes)];
                const char* block = &device[(size_t)(own.blocks[k] * kRowBytes)];
                wrong += memcmp(slot, block, kRowBytes) != 0;
            }
            wrong += !done[i].ok && done[i].ticket % 7 != 1;
        }
        Totals totals;
        hetero_copier_totals(copier, &totals);
        hetero_copier_ahead(copier, ticket - 1);
        hetero_copier_step_done(copier, ticket);
    }
    // Closed with one under way.
    hetero_copier_load(copier, &(const Load&)Load{rounds, 0, 1, 0, 1, kLayers, 0},
                       open[0].slots.data(), open[0].blocks.data(), kCount);
    hetero_copier_close(copier);
    hetero_copier_free(copier);
    ((int (*)(void*))dlsym(fake, "cuStreamDestroy_v2"))(compute);
    printf("%lld over, %lld wrong\n", (long long)over, (long long)wrong);
    return wrong != 0;
}
