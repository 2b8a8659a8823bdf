"""Kinds of nodes of the draft worker's trees, and how often nodes of each kind came true.

A draft model's probability of a token is not the chance that the target takes it. So candidates are
told apart by the log-odds that the model gives them, by their rank among their siblings and by
whether noise was in the scores; nodes out of the engine's lookahead cache by the odds that it gives
them. What came of earlier nodes says how likely the next ones are. Worker and engine each keep such
a record of their own: both see the same nodes and the same texts.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hetero_llm.spec_decode.acceptance_stats import rates_of

NUM_BUCKETS = 16
NUM_RANKS = 3
"""The likeliest candidate, the second, all others."""
GRAFTED = 2 * NUM_RANKS * NUM_BUCKETS
"""First of the kinds of nodes out of the engine's cache."""
NUM_KINDS = GRAFTED + NUM_BUCKETS
"""All kinds: 0 .. NUM_KINDS - 1, in eight bits."""

_FIRST_EDGE, _WIDTH = -5.0, 0.75  # log-odds between the buckets: from 0.7% to 99.6%
PRIOR_TRIALS = 16.0
"""Weight of what is expected of a kind that has not been tried."""


def prior_rates() -> NDArray[np.float32]:
    """[NUM_KINDS] what to expect before anything came true or not.

    It is the middle of the bucket, with and without noise: softmax of scores is the chance that the
    first stays first when each gets an error as large as a Gumbel variable, and about that far
    apart is what a small model and a large one say. For scores that hold the noise of the draw
    already this is a guess to begin with, hence the small weight of the prior.
    """
    odds = _FIRST_EDGE + _WIDTH * (np.arange(NUM_BUCKETS) - 0.5)
    middles = (1.0 / (1.0 + np.exp(-odds))).astype(np.float32)
    return np.tile(middles, NUM_KINDS // NUM_BUCKETS)


class Record:
    """How often nodes of each kind were followed when their parent was. One thread at a time.

    Args:
        table: [NUM_KINDS, 2] float32 to keep it in; begins with the prior.

    Attributes:
        table: accepted and tried, see `calibration.table_of`; compiled code reads and writes it.
    """

    def __init__(self, table: NDArray[np.float32] | None = None) -> None:
        self.table = np.empty((NUM_KINDS, 2), np.float32) if table is None else table
        assert self.table.shape == (NUM_KINDS, 2) and self.table.dtype == np.float32
        self.table[:, 1] = PRIOR_TRIALS
        # (accepted + 1) / (tried + 2) is to be the rate.
        self.table[:, 0] = prior_rates() * (PRIOR_TRIALS + 2.0) - 1.0

    def rates(self) -> NDArray[np.float32]:
        """[NUM_KINDS] chance of a node of each kind, given its parent."""
        return rates_of(self.table)


@njit(cache=True, nogil=True)
def bucket_of(log_chance: float) -> int:
    """Bucket of a chance, given its logarithm; -1 for none at all or not a number."""
    if not log_chance > -np.inf:
        return -1
    if log_chance >= 0.0:
        return NUM_BUCKETS - 1
    odds = log_chance - math.log(-math.expm1(log_chance))
    place = math.floor((odds - _FIRST_EDGE) / _WIDTH)
    return int(min(max(place + 1, 0), NUM_BUCKETS - 1))


@njit(cache=True, nogil=True)
def kind_of(log_chance: float, rank: int, noisy: bool) -> int:
    """Kind of a candidate; -1 if it is none.

    Args:
        log_chance: logarithm of the probability that the draft model gives it.
        rank: candidates that are likelier. noisy: the draw's noise is in its score.
    """
    bucket = bucket_of(log_chance)
    if bucket < 0:
        return -1
    cell = min(rank, NUM_RANKS - 1) + (NUM_RANKS if noisy else 0)
    return cell * NUM_BUCKETS + bucket


@njit(cache=True, nogil=True)
def grafted_kind(chance: float) -> int:
    """Kind of a node of the engine's cache with this chance, given its parent; -1 for none."""
    if not chance > 0.0:
        return -1
    return GRAFTED + bucket_of(math.log(chance))
