"""One face for both caches: arrays in, proposals out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_llm.core.draft import MAX_NODES, DraftBatch
from hetero_llm.core.lookahead_config import LookaheadConfig
from hetero_llm.cpu.lookahead import raw
from hetero_llm.cpu.lookahead.raw import RawArrays, RawIndex, RawParams
from hetero_llm.cpu.lookahead.texts import Text

GLOBAL_FREQ = 1.0
"""Frequency that an entry of the history begins with; a local one begins with start_freq."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Where texts lie in an array of tokens; all [S] int64, see `Text`. spaces: salts of their
    namespaces in the history."""

    salts: NDArray[np.int64]
    spaces: NDArray[np.int64]
    firsts: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]

    @staticmethod
    def of(texts: list[Text]) -> Rows:
        """`begins` are where each text's new tokens are."""
        table = np.array([(t.salt, t.space, t.first, t.indexed, t.end) for t in texts], np.int64)
        return Rows(*np.ascontiguousarray(table.reshape(-1, 5).T))

    def some(self, rows: NDArray[np.int64]) -> Rows:
        return Rows(
            self.salts[rows], self.spaces[rows], self.firsts[rows], self.begins[rows],
            self.ends[rows],
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """The history as compiled functions take it: (index, its text so far) of the young, the old
    and the static generation, for each cache that is in use."""

    raw: tuple[tuple[RawArrays, NDArray[np.int32]], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Proposals:
    """Drafts of S sequences: the first counts[i] columns of row i.

    Attributes:
        tokens, parents: [S, MAX_NODES] int32, as in `DraftTree`.
        survival: [S, MAX_NODES] float32 estimated probability that a node is accepted.
        kind: [S, MAX_NODES] int32 calibration cell of the estimate; -1 for none.
        counts: [S] int32.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    survival: NDArray[np.float32]
    kind: NDArray[np.int32]
    counts: NDArray[np.int32]

    @staticmethod
    def empty(size: int) -> Proposals:
        shape = (size, MAX_NODES)
        return Proposals(
            np.empty(shape, np.int32),
            np.empty(shape, np.int32),
            np.zeros(shape, np.float32),
            np.empty(shape, np.int32),
            np.zeros(size, np.int32),
        )

    def rows(self, count: int) -> Proposals:
        """The first rows, sharing memory, with nothing proposed."""
        some = Proposals(
            self.tokens[:count],
            self.parents[:count],
            self.survival[:count],
            self.kind[:count],
            self.counts[:count],
        )
        some.counts[:] = 0
        return some

    def put(self, rows: NDArray[np.int64], others: Proposals) -> None:
        """Replaces some rows."""
        self.tokens[rows] = others.tokens
        self.parents[rows] = others.parents
        self.survival[rows] = others.survival
        self.kind[rows] = others.kind
        self.counts[rows] = others.counts

    def batch(self) -> DraftBatch:
        """Their nodes one after the other."""
        held = np.arange(MAX_NODES) < self.counts[:, None]
        return DraftBatch(self.counts.copy(), self.tokens[held], self.parents[held])


def raw_params(config: LookaheadConfig) -> RawParams:
    """Of exactly the types that the compiled functions know."""
    return RawParams(
        match_length=int(config.match_length),
        is_hybrid=bool(config.is_hybrid),
        copy_length=int(config.copy_length),
        top_k=int(config.top_k),
        cell_max_size=int(config.cell_max_size),
        threshold=float(config.threshold),
        decay=float(config.decay),
    )


class RawSource:
    """The n-gram cache."""

    def __init__(self, config: LookaheadConfig) -> None:
        self._params = raw_params(config)
        self._freq = float(config.start_freq)
        self._local = RawIndex(self._params)

    @property
    def num_bytes(self) -> int:
        return self._local.num_bytes

    def learn(self, tokens: NDArray[np.int32], rows: Rows, tick: int) -> None:
        """Enters what is new of live sequences."""
        self._local.reserve(int((rows.ends - rows.begins).sum()))
        raw.insert_all(
            self._local.arrays, self._params, tokens, rows.salts, rows.firsts, rows.begins,
            rows.ends, self._freq, tick,
        )  # fmt: skip

    def forget(self, tokens: NDArray[np.int32], rows: Rows) -> None:
        """Takes ended sequences out again."""
        raw.remove_all(
            self._local.arrays, self._params, tokens, rows.salts, rows.firsts, rows.begins
        )

    def propose(
        self,
        tokens: NDArray[np.int32],
        rows: Rows,
        shared: Shared,
        limits: NDArray[np.int32],
        found: Proposals,
    ) -> None:
        """Fills the rows of `found`."""
        raw.propose(
            self._local.arrays, tokens, rows.salts, rows.firsts, rows.ends, rows.spaces,
            shared.raw, self._params, limits, found.tokens, found.parents, found.survival,
            found.kind, found.counts,
        )  # fmt: skip
