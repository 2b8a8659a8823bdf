// The likeliest tokens of a row and their log-probabilities, found piece by piece.

#pragma once

#include <cstdint>

#include "isa.h"
#include "rows.h"

namespace hetero {

constexpr int64_t kMostCandidates = 16;

// What a thread knows about the scores it has seen of one row. held: tokens in the list, best
// first, at most as many as are wanted; threshold: the score of the last one once it is full.
// highest: the largest score; sum: of exp(score - highest), NaN if a score was.
struct alignas(64) Candidates {
    float scores[kMostCandidates];
    int32_t tokens[kMostCandidates];
    double sum;
    float highest, threshold;
    int32_t held;
};

void begin_candidates(Candidates& found);

// Takes in scores of the tokens first, first + 1, ..., which come in ascending order; `count` are
// wanted. noise: as in `pick_noisy`, or null for the scores as they are.
void add_candidates(const float* scores, int64_t size, int64_t first, const Noise* noise,
                    int64_t count, Candidates& found, Isa isa);

// Of parts found[0], found[stride], ...: tokens and log-probabilities [count], best first, the lower
// token first where scores are equal. Without enough tokens of any probability the last ones are -1
// with -infinity; a row with NaN or +infinity has none.
void merge_candidates(const Candidates* found, int64_t parts, int64_t stride, int64_t count,
                      int32_t* tokens, float* log_probs);

}  // namespace hetero
