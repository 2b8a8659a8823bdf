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
    std::vector<int64_t> host_blocks, blocks;
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
    for (int64_t transfer_id = 0, oldest = 0; over < rounds;) {
        while (oldest < transfer_id && open[(size_t)oldest].over) ++oldest;
        // At most one transfer_id for each sixth of the rows; they do not end in order.
        if (transfer_id < rounds && transfer_id - oldest < kRows / kCount - 1) {
            Open& own = open[(size_t)transfer_id];
            own.loads = transfer_id % 3 != 0;
            for (int64_t i = 0; i < kCount; ++i) {
                const int64_t row = transfer_id % (kRows / kCount) * kCount;
                own.host_blocks.push_back(row + i);
                own.blocks.push_back(row + (i * 5 + transfer_id) % kCount);
            }
            hetero_copier_step_launched(copier, transfer_id + 1, compute);
            const int64_t id = transfer_id;
            const Load load{id, id % 64, 1 + id, id % 3, 1 + id % 2, kLayers, id};
            if (own.loads) {
                hetero_copier_load(copier, &load, own.host_blocks.data(), own.blocks.data(),
                                   kCount);
            } else {
                hetero_copier_store(copier, id, own.blocks.data(), own.host_blocks.data(), kCount,
                                    id);
            }
            if (transfer_id % 7 == 1) hetero_copier_abort(copier, transfer_id);
            ++transfer_id;
        } else {
            hetero_copier_wait(copier, 1'000'000'000);
        }
        Done done[8];
        const int64_t count = hetero_copier_poll(copier, done, 8);
        over += count;
        for (int64_t i = 0; i < count; ++i) {
            Open& own = open[(size_t)done[i].transfer_id];
            own.over = true;
            for (size_t k = 0; k < (size_t)kCount && done[i].ok; ++k) {
                const char* host_block = &host[(size_t)(own.host_blocks[k] * kRowBytes)];
                const char* block = &device[(size_t)(own.blocks[k] * kRowBytes)];
                wrong += memcmp(host_block, block, kRowBytes) != 0;
            }
            wrong += !done[i].ok && done[i].transfer_id % 7 != 1;
        }
        Totals totals;
        hetero_copier_totals(copier, &totals);
        hetero_copier_ahead(copier, transfer_id - 1);
        hetero_copier_step_done(copier, transfer_id);
    }
    // Closed with one under way.
    hetero_copier_load(copier, &(const Load&)Load{rounds, 0, 1, 0, 1, kLayers, 0},
                       open[0].host_blocks.data(), open[0].blocks.data(), kCount);
    hetero_copier_close(copier);
    hetero_copier_free(copier);
    ((int (*)(void*))dlsym(fake, "cuStreamDestroy_v2"))(compute);
    printf("%lld over, %lld wrong\n", (long long)over, (long long)wrong);
    return wrong != 0;
}
