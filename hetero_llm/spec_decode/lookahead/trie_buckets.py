"""Acceptance buckets of the trie's nodes: what separates likely nodes from unlikely ones.

A count does not say how likely a token is. So nodes are sorted into buckets by source, by the
length of the known context and by the token's share of what followed it; the rate of a bucket is
that of the earlier nodes in it.
"""

from __future__ import annotations

import numpy as np

LOCAL, GLOBAL = 0, 1
"""Sources: the local trie; the three global ones together."""
LENGTHS = np.array([1, 2, 3, 4, 5, 6, 7, 8, 12, 20])
"""Contexts are sorted by the largest of these lengths that they reach."""
NUM_LENGTHS = len(LENGTHS)
SHARES = np.array([0.1, 0.2, 0.34, 0.5, 0.75, 0.9])
"""Tokens of a cell are sorted by where their share lies between these."""
ONCE = len(SHARES) + 1
"""Bucket of a token whose context was seen once."""
SECOND = ONCE + 1
"""First of the buckets of tokens that are not the first child of their parent, in the order of the
others."""
NUM_BUCKETS = 2 * SECOND

_PRIOR = np.array(
    [
        [
            [0.05, 0.12, 0.22, 0.27, 0.29, 0.55, 0.75, 0.35],
            [0.05, 0.15, 0.25, 0.28, 0.37, 0.59, 0.87, 0.60],
            [0.05, 0.15, 0.20, 0.25, 0.40, 0.65, 0.96, 0.78],
            [0.05, 0.15, 0.20, 0.25, 0.45, 0.85, 0.985, 0.92],
            [0.05, 0.15, 0.25, 0.30, 0.60, 0.95, 0.99, 0.97],
        ],
        [
            [0.02, 0.03, 0.04, 0.05, 0.09, 0.13, 0.25, 0.14],
            [0.02, 0.06, 0.10, 0.15, 0.25, 0.20, 0.49, 0.22],
            [0.02, 0.08, 0.15, 0.20, 0.25, 0.60, 0.80, 0.58],
            [0.02, 0.10, 0.20, 0.25, 0.35, 0.60, 0.95, 0.75],
            [0.02, 0.10, 0.20, 0.30, 0.45, 0.75, 0.95, 0.90],
        ],
    ]
)
"""[source, length, share] rate of acceptance of first children after 1, 2, 4, 8 and 20 tokens. From
drafts along what the demo target makes of half of its held-out prompts
(bench/speculation/replay_drafts.py)."""
_PRIOR_LENGTHS = (1, 2, 4, 8, 20)
_SECOND_PRIOR = np.array(
    [
        [0.03, 0.06, 0.10, 0.12, 0.15, 0.15, 0.30, 0.30],
        [0.02, 0.04, 0.05, 0.08, 0.07, 0.08, 0.08, 0.12],
    ]
)
"""[source, share] of other children, after contexts of any length."""
_PRIOR_TRIALS = 32.0


def initial_acceptance() -> np.ndarray:
    """[2, NUM_LENGTHS, NUM_BUCKETS, 2] float32: what to expect before anything was drafted.

    The last axis holds accepted and tried nodes, in the weight of `_PRIOR_TRIALS` tries.
    """
    table = np.full((2, NUM_LENGTHS, NUM_BUCKETS, 2), _PRIOR_TRIALS, np.float32)
    rates = np.empty(table.shape[:-1])
    rates[:, :, SECOND:] = _SECOND_PRIOR[:, None]
    for source in (LOCAL, GLOBAL):
        for bucket in range(SECOND):
            known = _PRIOR[source, :, bucket]
            rates[source, :, bucket] = np.interp(LENGTHS, _PRIOR_LENGTHS, known)
    # (accepted + 1) / (tried + 2) is to be the rate.
    table[..., 0] = rates * (_PRIOR_TRIALS + 2.0) - 1.0
    return table
