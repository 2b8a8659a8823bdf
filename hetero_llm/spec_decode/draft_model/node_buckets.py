"""Acceptance buckets of draft nodes, and the acceptance rate measured for each bucket.

A draft model's probability of a token is not the probability that the target accepts it. So nodes
are sorted into buckets, and the accepted share of earlier nodes of a bucket estimates the
acceptance of the next ones. A candidate's bucket is given by its log-odds in the draft model, its
rank among its siblings and whether sampling noise was in the scores; that of a node from the
engine's lookahead cache (external node) by the odds that the cache gives it. Worker and engine each
keep statistics of their own: both see the same nodes and the same sequences.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from hetero_llm.spec_decode.acceptance_stats import rates_of
from hetero_llm.utils.jit import njit

NUM_ODDS = 16
"""Intervals of log-odds."""
NUM_RANKS = 3
"""The most likely candidate, the second, all others."""
FIRST_EXTERNAL = 2 * NUM_RANKS * NUM_ODDS
"""First bucket of external nodes."""
NUM_BUCKETS = FIRST_EXTERNAL + NUM_ODDS
"""Buckets are 0 .. NUM_BUCKETS - 1 and fit into eight bits."""

FIRST_CHOICES = np.r_[:NUM_ODDS, NUM_RANKS * NUM_ODDS : (NUM_RANKS + 1) * NUM_ODDS]
"""Buckets of the most likely candidates, without and with sampling noise."""

_FIRST_EDGE, _WIDTH = -5.0, 0.75  # edges between intervals: from 0.7% to 99.6%
PRIOR_TRIALS = 16.0
"""Weight of the prior rate, as a number of trials."""


def prior_rates() -> NDArray[np.float32]:
    """[NUM_BUCKETS] acceptance rate assumed before any trial: the middle of the odds interval.

    The softmax of scores is the probability that the first candidate stays first if a Gumbel
    variable is added to each score, and scores of a small and a large model differ by about that
    much. For scores that contain sampling noise already, the middle is only a guess; hence the
    small weight of the prior.
    """
    odds = _FIRST_EDGE + _WIDTH * (np.arange(NUM_ODDS) - 0.5)
    middles = (1.0 / (1.0 + np.exp(-odds))).astype(np.float32)
    return np.tile(middles, NUM_BUCKETS // NUM_ODDS)


class BucketStats:
    """How often nodes of each bucket were accepted, given that their parent was. One thread at a
    time.

    Attributes:
        table: [NUM_BUCKETS, 2] float32 accepted and tried of each bucket, at first the prior (see
            `acceptance_stats.table_of`); compiled functions read and update it.
    """

    def __init__(self) -> None:
        self.table = np.empty((NUM_BUCKETS, 2), np.float32)
        self.table[:, 1] = PRIOR_TRIALS
        # So that (accepted + 1) / (tried + 2) is the prior rate.
        self.table[:, 0] = prior_rates() * (PRIOR_TRIALS + 2.0) - 1.0

    def rates(self) -> NDArray[np.float32]:
        """[NUM_BUCKETS] acceptance probability of a node of each bucket, given its parent's."""
        return rates_of(self.table)


@njit(cache=True, nogil=True)
def first_choice_rate(table: NDArray[np.float32]) -> float:
    """Recent acceptance rate of the worker's most likely candidates.

    Args:
        table: see `BucketStats`.
    """
    accepted, tried = 0.5, 2.0  # not to wait for a model before it was right
    for bucket in FIRST_CHOICES:
        if table[bucket, 1] > PRIOR_TRIALS:  # the prior is no measurement
            accepted += table[bucket, 0]
            tried += table[bucket, 1]
    return accepted / tried


@njit(cache=True, nogil=True)
def odds_interval(log_prob: float) -> int:
    """Interval of a probability, given its logarithm; -1 for probability 0 or NaN."""
    if not log_prob > -np.inf:
        return -1
    if log_prob >= 0.0:
        return NUM_ODDS - 1
    odds = log_prob - math.log(-math.expm1(log_prob))
    place = math.floor((odds - _FIRST_EDGE) / _WIDTH)
    return int(min(max(place + 1, 0), NUM_ODDS - 1))


@njit(cache=True, nogil=True)
def bucket_of(log_prob: float, rank: int, noisy: bool) -> int:
    """Bucket of a candidate of the draft model; -1 if its probability is 0 or NaN.

    Args:
        log_prob: logarithm of its probability in the draft model.
        rank: number of more likely siblings.
        noisy: whether the score contains sampling noise.
    """
    interval = odds_interval(log_prob)
    if interval < 0:
        return -1
    cell = min(rank, NUM_RANKS - 1) + (NUM_RANKS if noisy else 0)
    return cell * NUM_ODDS + interval


@njit(cache=True, nogil=True)
def external_bucket(prob: float) -> int:
    """Bucket of an external node of this probability, given its parent; -1 for 0 or NaN."""
    if not prob > 0.0:
        return -1
    return FIRST_EXTERNAL + odds_interval(math.log(prob))
