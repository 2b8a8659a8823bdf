// See candidates.h. One pass over the scores: if the maximum of a piece is below the threshold,
// which after the first pieces is common, none of its tokens is compared. Exponentials are relative
// to the largest score so far.

#include "candidates.h"

#include <cmath>

#include "noise_lanes.h"

namespace hetero {

namespace {

constexpr int64_t kPiece = kNoisy;  // tokens with one maximum

// Inserts a token into the sorted list; false if it is not among the best `count`.
inline bool insert(float score, int32_t token, int64_t count, Candidates& found) {
    const auto belongs_before = [&](int64_t other) {
        return score > found.scores[other] ||
               (score == found.scores[other] && token < found.tokens[other]);
    };
    if (found.held == count && !belongs_before(count - 1)) return false;
    int64_t at = found.held < count ? found.held++ : count - 1;
    for (; at > 0 && belongs_before(at - 1); --at) {
        found.scores[at] = found.scores[at - 1];
        found.tokens[at] = found.tokens[at - 1];
    }
    found.scores[at] = score;
    found.tokens[at] = token;
    if (found.held == count) found.threshold = found.scores[count - 1];
    return true;
}

// A whole piece, padded with -infinity.
template <int N>
INLINE void add_piece(const float* scores, int64_t first, int64_t count, Candidates& found) {
    Floats<N> values[kPiece / N], top = fill<N>(-INFINITY);
    for (int i = 0; i < kPiece / N; ++i) {
        values[i] = read<N>(scores + i * N);
        top = larger<N>(values[i], top);
    }
    const float highest = maximum<N>(top);
    if (highest == -INFINITY) {
        for (int64_t i = 0; i < kPiece; ++i)
            if (scores[i] != scores[i]) found.sum = NAN;
        return;
    }
    if (highest > found.threshold)
        for (int64_t i = 0; i < kPiece; i += N) {
            if (!(maximum<N>(read<N>(scores + i)) > found.threshold)) continue;
            for (int64_t k = i; k < i + N; ++k)
                if (scores[k] > found.threshold)
                    insert(scores[k], (int32_t)(first + k), count, found);
        }
    if (highest > found.highest) {
        found.sum *= std::exp((double)found.highest - highest);
        found.highest = highest;
    }
    Floats<N> sum = {};
    for (int i = 0; i < kPiece / N; ++i)
        sum += power_of_two<N>((values[i] - found.highest) * kLog2e);
    found.sum += total<N>(sum);
}

template <int N>
INLINE void add_candidates_lanes(const float* scores, int64_t size, int64_t first,
                                 const Noise* noise, int64_t count, Candidates& found) {
    alignas(64) float piece[kPiece];
    for (int64_t begin = 0; begin < size; begin += kPiece) {
        const int64_t some = size - begin < kPiece ? size - begin : kPiece;
        const float* values = scores + begin;
        if (noise || some < kPiece) {
            if (noise) add_noise<N>(values, some, first + begin, *noise, piece);
            else std::memcpy(piece, values, some * sizeof(float));
            for (int64_t i = some; i < kPiece; ++i) piece[i] = -INFINITY;
            values = piece;
        }
        add_piece<N>(values, first + begin, count, found);
    }
}

}  // namespace

DEFINE_FOR_WIDTHS(add_candidates,
                  (const float* scores, int64_t size, int64_t first, const Noise* noise,
                   int64_t count, Candidates& found),
                  (scores, size, first, noise, count, found))

void begin_candidates(Candidates& found) {
    found.sum = 0;
    found.highest = found.threshold = -INFINITY;
    found.held = 0;
}

void merge_candidates(const Candidates* found, int64_t parts, int64_t stride, int64_t count,
                      int32_t* tokens, float* log_probs) {
    Candidates best;
    begin_candidates(best);
    for (int64_t p = 0; p < parts; ++p) {
        const Candidates& part = found[p * stride];
        // Best first: once one is not inserted, none of the others is.
        for (int32_t i = 0; i < part.held; ++i)
            if (!insert(part.scores[i], part.tokens[i], count, best)) break;
        if (part.highest > best.highest) best.highest = part.highest;
    }
    for (int64_t p = 0; p < parts; ++p) {
        const Candidates& part = found[p * stride];
        if (part.sum != 0) best.sum += part.sum * std::exp((double)part.highest - best.highest);
    }
    const int64_t known = best.sum > 0 && best.sum < INFINITY ? best.held : 0;
    const double log_sum = best.highest + std::log(best.sum);
    for (int64_t i = 0; i < count; ++i) {
        tokens[i] = i < known ? best.tokens[i] : -1;
        log_probs[i] = i < known ? (float)(best.scores[i] - log_sum) : -INFINITY;
    }
}

}  // namespace hetero

// For tests: the scores of tokens 0 .. size - 1 in parts that end at `ends`, each the multiple of
// 16 that a thread would have, but for the last. temperature 0: no noise.
extern "C" void hetero_candidates(const float* scores, const int64_t* ends, int64_t parts,
                                  const float* temperature, const uint64_t* seed, int64_t position,
                                  int64_t sample_index, int64_t count, int32_t* tokens,
                                  float* log_probs, int64_t isa) {
    using namespace hetero;
    const Noise noise{*temperature, *seed, (uint32_t)position, (uint32_t)sample_index};
    Candidates* found = new Candidates[parts];
    for (int64_t p = 0, first = 0; p < parts; first = ends[p++]) {
        begin_candidates(found[p]);
        add_candidates(scores + first, ends[p] - first, first, *temperature > 0 ? &noise : nullptr,
                       count, found[p], (Isa)isa);
    }
    merge_candidates(found, parts, 1, count, tokens, log_probs);
    delete[] found;
}
