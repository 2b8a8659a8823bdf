// The likeliest tokens of a sample and their log-probabilities, from scores that come piece by
// piece.

#pragma once

#include <cstdint>

#include "isa.h"
#include "rows.h"

namespace hetero {

constexpr int64_t kMostCandidates = 16;

// Summary of the scores that one thread has added for one sample. held: tokens in the list, best
// first; threshold: the score of the last one once the list is full.
// highest: the largest score; sum: of exp(score - highest), NaN if a score was.
struct alignas(64) Candidates {
    float scores[kMostCandidates];
    int32_t tokens[kMostCandidates];
    double sum;
    float highest, threshold;
    int32_t held;
};

void begin_candidates(Candidates& found);

// Adds scores of the tokens first, first + 1, ...; calls come in ascending order of tokens. count:
// the size of the list. noise: as in `pick_noisy`, or null for the scores as they are.
void add_candidates(const float* scores, int64_t size, int64_t first, const Noise* noise,
                    int64_t count, Candidates& found, Isa isa);

// Merges found[0], found[stride], ... into tokens and log-probabilities [count], best first, the
// lower token first where scores are equal. If fewer tokens have a probability, the last ones are
// -1 with -infinity; if a score was NaN or +infinity, all are.
void merge_candidates(const Candidates* found, int64_t parts, int64_t stride, int64_t count,
                      int32_t* tokens, float* log_probs);

}  // namespace hetero
