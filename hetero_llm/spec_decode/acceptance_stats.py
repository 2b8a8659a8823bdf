"""What came of earlier drafts: how often a node of each buckets was accepted.

Counts and shares of a cache do not say how likely a token is; the record of drafts does. A node
counts only if its parent was accepted, for the others nobody knows. It counts whether it was
verified or not: the tokens that came tell.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

MEMORY = 512.0
"""Trials of a buckets after which older ones begin to fade."""


def table_of(rates: NDArray[np.floating], trials: float) -> NDArray[np.float32]:
    """A record of `trials` trials for each rate. Returns [*rates.shape, 2]: accepted, tried."""
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
    """Enters into `table` what came of a draft.

    Args:
        text: int32; positions begin .. end-1 came since the draft was made.
        row: where the draft is in the following arrays, as it was proposed.
        tokens, parents, buckets: [R, 63]. counts: [R].
        kept: its first nodes that were verified.
        table: [cells, 2] float32, see `table_of`; kinds are its rows, negative ones are left out.

    Returns:
        How many verified nodes the text followed.
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
            cell = buckets[row, child]
            if cell < 0:
                continue
            if table[cell, 1] >= MEMORY:
                table[cell, 0] *= 0.5
                table[cell, 1] *= 0.5
            table[cell, 0] += 1.0 if hit else 0.0
            table[cell, 1] += 1.0
        if followed < 0:
            break
        node = followed
        if node < kept:
            accepted += 1
    return accepted
