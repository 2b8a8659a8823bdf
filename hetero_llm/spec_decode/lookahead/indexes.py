"""One face for both caches: arrays in, proposals out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_llm.config.lookahead_config import LookaheadConfig
from hetero_llm.core.draft_tree import MAX_NODES
from hetero_llm.spec_decode.acceptance_stats import table_of
from hetero_llm.spec_decode.lookahead import ngram_index, suffix_trie, trie_buckets
from hetero_llm.spec_decode.lookahead.ngram_index import RawIndex, RawParams
from hetero_llm.spec_decode.lookahead.suffix_trie import Trie, TrieParams, new_active
from hetero_llm.spec_decode.lookahead.trie_proposer import TurboParams

RAW, TURBO, MERGED = 0, 1, 3
"""Values of `LookaheadConfig.cache_mode`. 2 is Raw where Turbo has nothing; merged: the drafts of
both become one tree."""

_PRIOR_TRIALS = 8.0
_LEAST_SURVIVAL = 0.01  # of a node of a tree: what does not pay is cut off later
MOST_TURBO_NODES = 32
"""Of Turbo's tree."""

GLOBAL_FREQ = 1.0
"""Frequency that an entry of the history begins with; a local one begins with start_freq."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Where texts lie in an array of tokens; all [S] int64. salts, spaces: of their own entries and
    of their namespaces' in the history. begins: where new tokens are. places: the texts' rows."""

    salts: NDArray[np.int64]
    spaces: NDArray[np.int64]
    firsts: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    places: NDArray[np.int64]


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


def trie_params(config: LookaheadConfig) -> TrieParams:
    """Of exactly the types that the compiled functions know."""
    return TrieParams(
        key_length=_shortest(config),
        max_depth=int(config.turbo_match_length + config.copy_length),
        cell_max_size=int(config.cell_max_size),
        threshold=float(config.threshold),
        decay=float(config.decay),
    )


def turbo_params(config: LookaheadConfig) -> TurboParams:
    """Of exactly the types that the compiled functions know."""
    children = config.token_paths_top_k * (2 if config.cache_mode == MERGED else 1)
    return TurboParams(
        key_length=_shortest(config),
        match_length=int(config.turbo_match_length),
        copy_length=int(config.copy_length),
        sure_length=min(2 * int(config.copy_length) + 1, MAX_NODES),
        top_k_in_cell=int(config.top_k_in_cell),
        token_paths_top_k=min(int(children), MAX_NODES),
        start_freq=float(config.start_freq),
        p_min=_LEAST_SURVIVAL,
    )


def _shortest(config: LookaheadConfig) -> int:
    """Tokens of the trie's shortest context. A merged tree looks single tokens up in the trie, too,
    if Raw may."""
    merged = config.cache_mode == MERGED and config.is_hybrid
    return 1 if merged else int(config.min_match_length)


class RawSource:
    """The n-gram cache of live sequences; it drafts from the history, too.

    Args:
        record: [NUM_KINDS, 2] view of what came of its drafts; see `calibration`.

    Attributes:
        local: their index. To be read only.
    """

    NUM_KINDS = ngram_index.NUM_LEVELS * ngram_index.NUM_DEPTHS

    def __init__(self, config: LookaheadConfig, record: NDArray[np.float32]) -> None:
        self._params = raw_params(config)
        self._freq = float(config.start_freq)
        self.local = RawIndex(self._params)
        rates = np.repeat(ngram_index.FURTHER_RATES[:, None], ngram_index.NUM_DEPTHS, axis=1)
        rates[:, 0] = ngram_index.FIRST_RATES
        record[:] = table_of(rates, _PRIOR_TRIALS).reshape(-1, 2)

    @property
    def num_bytes(self) -> int:
        return self.local.num_bytes

    def learn(self, tokens: NDArray[np.int32], rows: Rows, tick: int) -> None:
        """Enters what is new of live sequences."""
        self.local.reserve(int((rows.ends - rows.begins).sum()))
        ngram_index.insert_all(
            self.local.arrays, self._params, tokens, rows.salts, rows.firsts, rows.begins,
            rows.ends, self._freq, tick,
        )  # fmt: skip

    def forget(self, tokens: NDArray[np.int32], rows: Rows) -> None:
        """Takes ended sequences out again."""
        ngram_index.remove_all(
            self.local.arrays, self._params, tokens, rows.salts, rows.firsts, rows.begins
        )


class TurboSource:
    """The suffix trie of live sequences; it drafts from the history, too.

    Args:
        record: [NUM_KINDS, 2] view of what came of its drafts, whose kinds are the first.

    Attributes:
        local: their trie. To be read only.
    """

    NUM_KINDS = 2 * trie_buckets.NUM_LENGTHS * trie_buckets.NUM_BUCKETS

    def __init__(self, config: LookaheadConfig, record: NDArray[np.float32]) -> None:
        self._params = trie_params(config)
        self._turbo = turbo_params(config)
        self.local = Trie(self._params)
        self._actives = np.empty((0, len(new_active(self._params))), np.int32)
        record[:] = trie_buckets.initial_calibration().reshape(-1, 2)

    @property
    def num_bytes(self) -> int:
        return self.local.num_bytes

    def learn(self, tokens: NDArray[np.int32], rows: Rows, _: int) -> None:
        """Enters what is new of live sequences."""
        last = int(rows.places.max())
        if last >= len(self._actives):
            more = np.tile(new_active(self._params), (2 * last + 1 - len(self._actives), 1))
            self._actives = np.concatenate([self._actives, more])
        self.local.reserve(int((rows.ends - rows.begins).sum()))
        actives = self._actives[rows.places]
        suffix_trie.insert_all(
            self.local.arrays, self._params, tokens, rows.salts, rows.begins, rows.ends, actives,
            self._turbo.start_freq,
        )  # fmt: skip
        self._actives[rows.places] = actives

    def forget(self, tokens: NDArray[np.int32], rows: Rows) -> None:
        """Takes ended sequences out again."""
        for salt, first, end, place in zip(
            rows.salts, rows.firsts, rows.begins, rows.places, strict=True
        ):
            suffix_trie.remove(self.local.arrays, self._params, tokens, salt, first, end)
            if place < len(self._actives):
                self._actives[place] = new_active(self._params)
