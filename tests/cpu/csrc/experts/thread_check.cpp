// A mailbox, its team and a poster in one program, for ThreadSanitizer: requests with random layers,
// tokens and experts, calls of `wake` by a third thread, and ends amid requests. The poster reads sums
// as a device does, each with its number, and posts its next request as soon as it has them. Prints
// nothing if all answers are right.

#include <cmath>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "experts/expert_team.h"

namespace {

using namespace hetero;
using namespace hetero::experts;

constexpr int64_t kLayers = 2, kExperts = 5, kHidden = 40, kInner = 24, kTokens_ = 6, kChoices = 2;

struct Model {
    std::vector<float> gate_up, down;  // [layers][experts][rows][columns]
    std::vector<int64_t> addresses;

    explicit Model(std::mt19937& random)
        : gate_up(kLayers * kExperts * 2 * kInner * kHidden),
          down(kLayers * kExperts * kHidden * kInner),
          addresses(kLayers * kExperts * 2 * kAddresses) {
        std::normal_distribution<float> normal(0, 0.2f);
        for (float& w : gate_up) w = normal(random);
        for (float& w : down) w = normal(random);
        for (int64_t e = 0; e < kLayers * kExperts; ++e) {
            addresses[e * 2 * kAddresses] = (int64_t)(gate_up.data() + e * 2 * kInner * kHidden);
            addresses[(e * 2 + 1) * kAddresses] = (int64_t)(down.data() + e * kHidden * kInner);
        }
    }
};

struct Mailbox {
    alignas(64) int32_t request[16] = {}, answer[16] = {};
    int32_t ids[kTokens_ * kChoices];
    float weights[kTokens_ * kChoices], x[kTokens_ * padded(kHidden)] = {};
    uint64_t y[kTokens_ * kHidden] = {};
};

Setting setting_of(const Model& model, Mailbox& box) {
    Setting s{};
    s.layers = kLayers;
    s.experts = kExperts;
    s.hidden = kHidden;
    s.inner = kInner;
    s.max_tokens = kTokens_;
    s.experts_per_token = kChoices;
    s.gate_up = {Kind::kFloat, Number::kFloat, 1, 1, 2 * kInner, kHidden, Zeros::kNone, kHidden};
    s.down = {Kind::kFloat, Number::kFloat, 1, 1, kHidden, kInner, Zeros::kNone, kInner};
    s.gate = {Gate::kRelu, 0, 0};
    s.input = Number::kFloat;
    s.addresses = model.addresses.data();
    s.ids = box.ids;
    s.weights = box.weights;
    s.x = (const char*)box.x;
    s.y = box.y;
    s.request = box.request;
    s.answer = box.answer;
    s.isa = best_isa();
    return s;
}

float wanted(const Model& model, const Mailbox& box, int64_t layer, int64_t token, int64_t column) {
    float sum = 0;
    for (int64_t i = 0; i < kChoices; ++i) {
        const int32_t id = box.ids[token * kChoices + i];
        if (id < 0) continue;
        const float* up = model.gate_up.data() + (layer * kExperts + id) * 2 * kInner * kHidden;
        const float* down = model.down.data() + (layer * kExperts + id) * kHidden * kInner;
        float out = 0;
        for (int64_t n = 0; n < kInner; ++n) {
            float a = 0, b = 0;
            for (int64_t k = 0; k < kHidden; ++k) {
                a += box.x[token * padded(kHidden) + k] * up[n * kHidden + k];
                b += box.x[token * padded(kHidden) + k] * up[(kInner + n) * kHidden + k];
            }
            out += down[column * kInner + n] * (a > 0 ? a : 0) * b;
        }
        sum += box.weights[token * kChoices + i] * out;
    }
    return sum;
}

// Waits until the answer to exchange `sequence` is in all rows of tokens that asked, or in none
// because the team has stopped.
bool wait_for(Mailbox& box, int32_t sequence, int64_t tokens) {
    const auto stopped = [&] {
        std::this_thread::yield();
        return __atomic_load_n(box.answer + kStopped, __ATOMIC_ACQUIRE) != 0;
    };
    bool asks = false;
    for (int64_t t = 0; t < tokens; ++t) {
        bool asked = false;
        for (int64_t i = 0; i < kChoices; ++i) asked = asked || box.ids[t * kChoices + i] >= 0;
        asks = asks || asked;
        for (int64_t c = 0; asked && c < kHidden; ++c)
            while ((int32_t)(__atomic_load_n(box.y + t * kHidden + c, __ATOMIC_ACQUIRE) >> 32) !=
                   sequence)
                if (stopped()) return false;
    }
    while (!asks && __atomic_load_n(box.answer + kAnswered, __ATOMIC_ACQUIRE) != sequence)
        if (stopped()) return false;
    return true;
}

float sum_at(const Mailbox& box, int64_t place) {
    return bit_cast<float>((uint32_t)__atomic_load_n(box.y + place, __ATOMIC_RELAXED));
}

// Posts until `count` answers came or the team has stopped. Returns wrong answers.
int64_t post_all(const Model& model, Mailbox& box, std::mt19937& random, int64_t count) {
    int64_t wrong = 0;
    for (int32_t sequence = 1; sequence <= count; ++sequence) {
        const int64_t layer = random() % kLayers, tokens = random() % (kTokens_ + 1);
        for (int64_t i = 0; i < tokens * kChoices; ++i) {
            box.ids[i] = (int32_t)(random() % (kExperts + 2)) - 2;
            box.weights[i] = (float)(random() % 100) / 100;
        }
        for (int64_t t = 0; t < tokens; ++t)
            for (int64_t k = 0; k < kHidden; ++k)
                box.x[t * padded(kHidden) + k] = (float)(random() % 200) / 100 - 1;
        box.request[kLayer] = (int32_t)layer;
        box.request[kTokens] = (int32_t)tokens;
        __atomic_store_n(box.request + kSequence, sequence, __ATOMIC_RELEASE);
        if (!wait_for(box, sequence, tokens)) return wrong;
        for (int64_t t = 0; t < tokens; ++t) {
            bool asked = false;
            for (int64_t i = 0; i < kChoices; ++i) asked = asked || box.ids[t * kChoices + i] >= 0;
            const int64_t column = random() % kHidden;
            if (asked && std::fabs(sum_at(box, t * kHidden + column) -
                                   wanted(model, box, layer, t, column)) > 1e-3f)
                ++wrong;
        }
        if (random() % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
    }
    return wrong;
}

}  // namespace

int main() {
    std::mt19937 random(1);
    const Model model(random);
    int64_t wrong = 0;
    for (int round = 0; round < 12; ++round) {
        Mailbox box;
        const int threads = round % 4 + 1;
        const bool ends_early = round % 3 == 2;
        ExpertTeam team(setting_of(model, box), threads, nullptr, round % 2 ? 0 : 100);
        std::atomic<bool> done{false};
        std::thread waker([&] {
            while (!done.load()) {
                team.wake();
                team.running();
                std::this_thread::sleep_for(std::chrono::microseconds(200));
            }
        });
        std::thread poster([&] { wrong += post_all(model, box, random, ends_early ? 1 << 30 : 150); });
        if (ends_early) {
            while (team.running().exchanges < 50) std::this_thread::yield();
            team.stop();
        }
        poster.join();
        done.store(true);
        waker.join();
        team.stop();
        wrong += __atomic_load_n(box.answer + kStopped, __ATOMIC_ACQUIRE) != kStoppedByCall;
    }
    if (wrong > 0) std::printf("%lld wrong answers\n", (long long)wrong);
    return wrong > 0;
}
