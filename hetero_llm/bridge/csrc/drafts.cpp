#include <cstdint>
#include <cstring>

#include "drafts.h"

namespace hetero::ring {
namespace {

// Highest logarithm of a probability: 0, and what rounding adds to it.
constexpr float kMostLogProb = 1e-3f, kLeastLogProb = -3e38f;

struct Node {
    int32_t token;
    int16_t parent, unused;
    float log_prob;
};
constexpr uint32_t kNodeWords = sizeof(Node) / 4;

}  // namespace

bool is_sound_draft(const uint32_t* body, uint32_t words, DraftLimits limits) {
    if (words % kNodeWords != 0 || words / kNodeWords > limits.most_nodes) return false;
    for (uint32_t i = 0; i * kNodeWords < words; ++i) {
        Node node;
        memcpy(&node, body + i * kNodeWords, sizeof node);
        if (node.token < 0 || (uint32_t)node.token >= limits.vocab_size) return false;
        if (node.parent < -1 || node.parent >= (int32_t)i) return false;
        // Not-a-number fails every comparison.
        if (!(node.log_prob >= kLeastLogProb && node.log_prob <= kMostLogProb)) return false;
    }
    return true;
}

}  // namespace hetero::ring
