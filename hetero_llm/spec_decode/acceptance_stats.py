"""How often the drafted nodes of each acceptance bucket were accepted.

Counts and shares in an index do not say how likely a token is; the outcome of earlier drafts does.
A node counts only if its parent was accepted: nothing is known about the others. It counts whether
it was verified or not, since the tokens that followed show what it was worth.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetero_llm.utils.jit import njit

MEMORY = 512.0
"""Tried nodes of a bucket after which older ones begin to fade."""


def table_of(rates: NDArray[np.floating], trials: float) -> NDArray[np.float32]:
    """[*rates.shape, 2] accepted and tried nodes of buckets with these rates, in the weight of
    `trials` tried nodes each."""
    return np.stack([rates * trials, np.full(rates.shape, trials)], axis=-1).astype(np.float32)


def rates_of(table: NDArray[np.float32]) -> NDArray[np.float32]:
    """[...] rates of a table [..., 2], by Laplace's rule of succession."""
    rates: NDArray[np.float32] = (table[..., 0] + 1) / (table[..., 1] + 2)
    return rates


@njit(cache=True, nogil=True)
def record_outcome(
    text: np.ndarray,
    begin: int,
    end: int,
    row: int,
    tokens: np.ndarray,
    parents: np.ndarray,
    buckets: np.ndarray,
    counts: np.ndarray,
    kept: int,
    table: np.ndarray,
) -> int:
    """Enters into `table` which nodes of a draft were accepted.

    Args:
        text: int32; the tokens at begin .. end-1 came since the draft was made.
        row: of the draft in the following arrays.
        tokens, parents, buckets: [R, 63]. counts: [R].
        kept: number of nodes that were verified, the first ones.
        table: [buckets, 2] float32, see `table_of`. Nodes of negative buckets are left out.

    Returns:
        Number of verified nodes that were accepted.
    """
    node = -1
    accepted = 0
    for position in range(begin, end):
        token = text[position]
        followed = -1
        for child in range(node + 1, counts[row]):
            if parents[row, child] != node:
                continue
            hit = tokens[row, child] == token
            if hit and followed < 0:
                followed = child
            bucket = buckets[row, child]
            if bucket < 0:
                continue
            if table[bucket, 1] >= MEMORY:
                table[bucket, 0] *= 0.5
                table[bucket, 1] *= 0.5
            table[bucket, 0] += 1.0 if hit else 0.0
            table[bucket, 1] += 1.0
        if followed < 0:
            break
        node = followed
        if node < kept:
            accepted += 1
    return accepted
