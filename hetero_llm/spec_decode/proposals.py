"""Drafts of several sequences in arrays: what every drafter fills and compiled functions read."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hetero_llm.core.draft_tree import MAX_NODES, DraftBatch
from hetero_llm.core.request import Sequence
from hetero_llm.spec_decode.array_table import Float32Matrix, Int32Matrix, Int32Vector
from hetero_llm.utils.jit import njit


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

    tokens: Int32Matrix
    parents: Int32Matrix
    path_probs: Float32Matrix
    buckets: Int32Matrix
    counts: Int32Vector

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


class DraftModel(Protocol):
    """A draft model as the `HybridDrafter` uses it. Sequences go by their rows.

    Attributes:
        drafts: of the last proposal, in its first rows.
    """

    drafts: Proposals

    def commit(
        self,
        rows: NDArray[np.int64],
        fresh: NDArray[np.int64],
        sizes: NDArray[np.int64],
        sequences: list[Sequence],
    ) -> None:
        """Sends new tokens of S sequences, and whole sequences of new rows.

        Args:
            rows: [S]. fresh: new tokens, one sequence after the other. sizes: [S] of each.
        """
        ...

    def propose(
        self,
        rows: NDArray[np.int64],
        most: NDArray[np.int32],
        seconds: float,
        found: Proposals,
        least: float,
        *,
        may_wait: bool,
    ) -> None:
        """Fills the first S rows of `drafts` for S sequences, whose new tokens are committed.

        Args:
            rows: [S]. most: [S] nodes of each draft.
            seconds: that the step takes without drafts, idle time included.
            found: drafts of the indexes, the first S of these sequences: where there are good ones
                it pays less to wait.
            least: path probability below which nodes were not verified lately.
            may_wait: whether to wait for the model where that pays.
        """
        ...

    def add_external_nodes(
        self, rows: NDArray[np.int64], found: Proposals, kept: NDArray[np.int32]
    ) -> None:
        """Sends nodes that are being verified and are not the model's own.

        Args:
            rows: [S] of the last proposal. found: its drafts. kept: [S] first nodes of each that
                are verified.
        """
        ...

    def close(self, rows: list[int]) -> None:
        """These sequences have ended."""
        ...

    def run_deferred(self) -> None:
        """Called once a step while the device works."""
        ...

    def metrics(self) -> dict[str, float]:
        """Counters and states, flat."""
        ...

    def shut_down(self) -> None:
        """Ends the model's process."""
        ...


class NoDraftModel:
    """In the place of a draft model where there is none: does nothing."""

    def commit(self, *_: Any) -> None: ...

    def add_external_nodes(self, *_: Any) -> None: ...

    def close(self, rows: list[int]) -> None: ...

    def run_deferred(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}

    def shut_down(self) -> None: ...


@njit(cache=True, nogil=True)
def rows_of(proposals: Proposals, first: int, last: int) -> Proposals:
    """The drafts of sequences first .. last-1, sharing memory; for compiled functions."""
    return Proposals(
        proposals.tokens[first:last],
        proposals.parents[first:last],
        proposals.path_probs[first:last],
        proposals.buckets[first:last],
        proposals.counts[first:last],
    )
