"""The two indexes over tokens, as the configuration asks for them: of running sequences, and of a
generation of the global cache."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetero_llm.config.lookahead_config import LookaheadConfig
from hetero_llm.core.draft_tree import MAX_NODES
from hetero_llm.spec_decode.acceptance_stats import table_of
from hetero_llm.spec_decode.lookahead import ngram_index, suffix_trie, trie_buckets
from hetero_llm.spec_decode.lookahead.ngram_index import NgramIndex, NgramParams
from hetero_llm.spec_decode.lookahead.sequence_state import SequenceRows
from hetero_llm.spec_decode.lookahead.suffix_trie import (
    CONTINUED,
    SuffixTrie,
    TrieParams,
    new_active,
)
from hetero_llm.spec_decode.lookahead.trie_proposer import TrieProposalParams

RAW, TURBO, MERGED = 0, 1, 3
"""Values of `LookaheadConfig.cache_mode`. 2 is Raw where Turbo has nothing; merged: the drafts of
both become one tree."""

MAX_TRIE_NODES = 32
"""Of the trie's draft."""

_PRIOR_TRIALS = 8.0  # weight of the n-gram index's prior
_MIN_PATH_PROB = 0.01  # of a node of the trie's draft; the budget cuts off what does not pay
_GLOBAL_FREQ = 1.0  # of a new entry of the global cache; a local one begins with start_freq
_SLICE = 4096  # tokens entered at once: indexes reserve room for the worst that these could need


def ngram_params(config: LookaheadConfig) -> NgramParams:
    """Of exactly the types that the compiled functions know."""
    return NgramParams(
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
        key_length=_key_length(config),
        max_depth=int(config.turbo_match_length + config.copy_length),
        cell_max_size=int(config.cell_max_size),
        threshold=float(config.threshold),
        decay=float(config.decay),
    )


def trie_proposal_params(config: LookaheadConfig) -> TrieProposalParams:
    """Of exactly the types that the compiled functions know."""
    children = config.token_paths_top_k * (2 if config.cache_mode == MERGED else 1)
    return TrieProposalParams(
        key_length=_key_length(config),
        match_length=int(config.turbo_match_length),
        copy_length=int(config.copy_length),
        sure_length=max(int(config.sure_copy_length), int(config.copy_length)),
        top_k_in_cell=int(config.top_k_in_cell),
        token_paths_top_k=min(int(children), MAX_NODES),
        start_freq=float(config.start_freq),
        p_min=_MIN_PATH_PROB,
    )


def _key_length(config: LookaheadConfig) -> int:
    """Tokens of the trie's shortest context. A merged tree looks single tokens up in the trie, too,
    if Raw may."""
    merged = config.cache_mode == MERGED and config.is_hybrid
    return 1 if merged else int(config.min_match_length)


class LocalNgramIndex:
    """Raw's index of running sequences.

    Args:
        accepted: [NUM_BUCKETS, 2] float32 view, filled in: what to expect of drafts from local and
            global indexes before anything was drafted.
    """

    NUM_BUCKETS = ngram_index.NUM_LEVELS * ngram_index.NUM_DEPTHS
    name = "ngrams"

    def __init__(self, config: LookaheadConfig, accepted: NDArray[np.float32]) -> None:
        self._params = ngram_params(config)
        self._index = NgramIndex(self._params)
        rates = np.repeat(ngram_index.FURTHER_RATES[:, None], ngram_index.NUM_DEPTHS, axis=1)
        rates[:, 0] = ngram_index.FIRST_RATES
        accepted[:] = table_of(rates, _PRIOR_TRIALS).reshape(-1, 2)

    @property
    def arrays(self) -> ngram_index.NgramArrays:
        return self._index.arrays

    @property
    def num_bytes(self) -> int:
        return self._index.num_bytes

    @property
    def num_entries(self) -> int:
        return self._index.num_keys

    def reserve(self, tokens: int, num_rows: int) -> None:
        self._index.reserve(tokens)

    def forget(self, tokens: NDArray[np.int32], spans: SequenceRows) -> None:
        ngram_index.remove_all(
            self._index.arrays, self._params, tokens, spans.salts, spans.starts, spans.indexed
        )


class LocalSuffixTrie:
    """Turbo's index of running sequences.

    Args:
        accepted: [NUM_BUCKETS, 2] float32 view, filled in: what to expect of drafts from local and
            global tries before anything was drafted.

    Attributes:
        actives: [rows, max_depth + 2] int32, how far each row's text is entered: see
            `suffix_trie.insert`. Replaced by a larger one by `reserve`.
    """

    NUM_BUCKETS = 2 * trie_buckets.NUM_LENGTHS * trie_buckets.NUM_BUCKETS
    name = "trie"

    def __init__(self, config: LookaheadConfig, accepted: NDArray[np.float32]) -> None:
        self._params = trie_params(config)
        self._trie = SuffixTrie(self._params)
        self.actives = np.empty((0, len(new_active(self._params))), np.int32)
        accepted[:] = trie_buckets.initial_acceptance().reshape(-1, 2)

    @property
    def arrays(self) -> suffix_trie.TrieArrays:
        return self._trie.arrays

    @property
    def num_bytes(self) -> int:
        return self._trie.num_bytes

    @property
    def num_entries(self) -> int:
        return self._trie.num_keys + self._trie.num_nodes + self._trie.num_entries

    def reserve(self, tokens: int, num_rows: int) -> None:
        self._trie.reserve(tokens)
        if num_rows > len(self.actives):
            more = np.tile(new_active(self._params), (num_rows - len(self.actives), 1))
            self.actives = np.concatenate([self.actives, more])

    def forget(self, tokens: NDArray[np.int32], spans: SequenceRows) -> None:
        for row, salt, start, indexed in zip(
            spans.rows, spans.salts, spans.starts, spans.indexed, strict=True
        ):
            suffix_trie.remove(self._trie.arrays, self._params, tokens, salt, start, indexed)
            if row < len(self.actives):
                self.actives[row] = new_active(self._params)


LocalIndex = LocalNgramIndex | LocalSuffixTrie
"""An index of running sequences. `name` is its field in the arrays of `ProposalStep`, which enters
tokens; `arrays` are to be read anew after `reserve`, which makes room for `tokens` more tokens of
rows below `num_rows`; `num_entries` is 0 if all sequences are forgotten. `forget` removes the
tokens before `indexed`."""


class GlobalNgramIndex(NgramIndex):
    """Raw's index of a generation; see `GlobalIndex`."""

    name = "ngrams"

    def add(
        self, text: NDArray[np.int32], namespace: int, start: int, begin: int, end: int, tick: int
    ) -> None:
        for first in range(begin, end, _SLICE):
            last = min(first + _SLICE, end)
            self.reserve(last - first)
            ngram_index.insert(
                self.arrays, self.params, text, namespace, start, first, last, _GLOBAL_FREQ, tick
            )

    def add_many(
        self,
        text: NDArray[np.int32],
        namespaces: NDArray[np.int64],
        starts: NDArray[np.int64],
        begins: NDArray[np.int64],
        ends: NDArray[np.int64],
        tick: int,
    ) -> None:
        self.reserve(int((ends - begins).sum()))
        ngram_index.insert_all(
            self.arrays, self.params, text, namespaces, starts, begins, ends, _GLOBAL_FREQ, tick
        )


class GlobalSuffixTrie(SuffixTrie):
    """Turbo's index of a generation; see `GlobalIndex`."""

    name = "trie"

    def add(
        self, text: NDArray[np.int32], namespace: int, start: int, begin: int, end: int, tick: int
    ) -> None:
        active = new_active(self.params)
        if begin > start:
            active[0] = CONTINUED
        for first in range(begin, end, _SLICE):
            last = min(first + _SLICE, end)
            self.reserve(last - first)
            suffix_trie.insert(
                self.arrays, self.params, text, namespace, first, last, active, _GLOBAL_FREQ
            )

    def add_many(
        self,
        text: NDArray[np.int32],
        namespaces: NDArray[np.int64],
        starts: NDArray[np.int64],
        begins: NDArray[np.int64],
        ends: NDArray[np.int64],
        tick: int,
    ) -> None:
        self.reserve(int((ends - begins).sum()))
        actives = np.tile(new_active(self.params), (len(ends), 1))
        actives[begins > starts, 0] = CONTINUED
        suffix_trie.insert_all(
            self.arrays, self.params, text, namespaces, begins, ends, actives, _GLOBAL_FREQ
        )


GlobalIndex = GlobalNgramIndex | GlobalSuffixTrie
"""An index of one generation of the global cache. Positions refer to the generation's text: a
document begins at `start`, its new tokens at `begin`; before that stands what another document
holds. `add` enters a document of any length, `add_many` short ones in one compiled call, which
holds no lock."""
