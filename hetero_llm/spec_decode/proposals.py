"""Drafts of several sequences in arrays: what every drafter fills and compiled functions read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero_llm.core.draft_tree import MAX_NODES, DraftBatch


class Proposals(NamedTuple):
    """Drafts of S sequences: the first counts[i] columns of row i are a tree.

    Attributes:
        tokens, parents: [S, MAX_NODES] int32, as in `DraftTree`.
        path_probs: [S, MAX_NODES] float32 path probability: the estimate that a node and all nodes
            above it are accepted.
        buckets: [S, MAX_NODES] int32 acceptance bucket that the estimate comes from and that learns
            whether the node was accepted; -1 for none.
        counts: [S] int32 nodes of each draft.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    path_probs: NDArray[np.float32]
    buckets: NDArray[np.int32]
    counts: NDArray[np.int32]

    @staticmethod
    def empty(size: int) -> Proposals:
        """New arrays for `size` sequences, without drafts."""
        shape = (size, MAX_NODES)
        return Proposals(
            np.empty(shape, np.int32),
            np.empty(shape, np.int32),
            np.zeros(shape, np.float32),
            np.empty(shape, np.int32),
            np.zeros(size, np.int32),
        )

    def some(self, rows: slice) -> Proposals:
        """The drafts of some sequences, sharing memory."""
        return Proposals(
            self.tokens[rows],
            self.parents[rows],
            self.path_probs[rows],
            self.buckets[rows],
            self.counts[rows],
        )

    def batch(self) -> DraftBatch:
        """The drafts as the scheduler takes them: copies, one draft after the other."""
        held = np.arange(MAX_NODES) < self.counts[:, None]
        return DraftBatch(self.counts.copy(), self.tokens[held], self.parents[held])
