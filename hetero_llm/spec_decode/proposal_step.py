"""Where proposals are worked out: compiled functions over arrays that stay.

All of it stands between two steps of the device. So the arrays of texts, indexes and drafts are
bound once (bound.py), and what is left of a proposal are three calls with numbers and the one array
of new tokens: `catch_up`, `look_up`, `choose`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hetero_llm.config.lookahead_config import LookaheadConfig
from hetero_llm.core.draft_tree import MAX_NODES, DraftBatch
from hetero_llm.spec_decode import budget
from hetero_llm.spec_decode.array_table import ArrayTable, matrix, vector
from hetero_llm.spec_decode.budget import MOST_ROWS, StepCosts
from hetero_llm.spec_decode.lookahead import ngram_index, sequence_state, trie_proposer
from hetero_llm.spec_decode.lookahead.global_cache import History
from hetero_llm.spec_decode.lookahead.indexes import (
    MERGED,
    MOST_TURBO_NODES,
    RAW,
    TURBO,
    RawSource,
    TurboSource,
    raw_params,
    turbo_params,
)
from hetero_llm.spec_decode.lookahead.ngram_index import RawArrays, RawParams
from hetero_llm.spec_decode.lookahead.sequence_state import (
    HITS,
    Fresh,
    Live,
    LiveArrays,
)
from hetero_llm.spec_decode.lookahead.suffix_trie import TrieArrays
from hetero_llm.spec_decode.lookahead.trie_proposer import TurboParams
from hetero_llm.spec_decode.merge_trees import merge
from hetero_llm.spec_decode.proposals import Proposals

_NO_SOURCE = -1
_TURBO_KINDS, _RAW_KINDS = TurboSource.NUM_KINDS, RawSource.NUM_KINDS
_FIRST_SIZE = 16

# Places of `Desk._bound`.
_TOKENS, _LIVE, _ENDS, _RECORD, _COSTS, _EDGES, _TURBO, _RAW = 0, 1, 4, 5, 6, 7, 8, 9
# Sets of drafts: that of this proposal and the one before, in turn; Raw's; somebody else's.
_FOUND, _MORE, _THEIRS = 10, 20, 25
_WHERE, _MOST, _TRUST, _KEPT, _TOKENS_OUT, _PARENTS_OUT = range(30, 36)
_LOCAL, _YOUNG, _OLD, _STATIC = 36, 46, 56, 66  # a trie, a Raw index, their text
_NUM_PLACES = 76
_RAW_INDEX, _TEXT = 5, 9  # places behind the trie's


class _Buffers(NamedTuple):
    """What compiled functions write for [S] sequences, in the order of the places."""

    where: NDArray[np.int64]
    most: NDArray[np.int32]
    trust: NDArray[np.float32]
    kept: NDArray[np.int32]
    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]


class Desk:
    """See above. One thread at a time, but for `look_up` of different sequences.

    Args:
        record: [kinds, 2] float32, what came of drafts; Turbo's kinds come first, then Raw's.
        uses_cache: whether anything is looked up.
    """

    def __init__(
        self, config: LookaheadConfig, record: NDArray[np.float32], *, uses_cache: bool
    ) -> None:
        assert config.max_seq_len is not None and config.eos_token_id is not None
        self._mode = config.cache_mode if uses_cache else _NO_SOURCE
        self._limits = config.voc_size, config.max_seq_len
        self._target = config.target_parallelism if config.cache_mode == RAW else 0
        self._most_rows = MOST_ROWS if config.cache_mode == RAW else config.target_parallelism
        self._depth = config.copy_length
        self._now = 0  # which of the two sets of drafts is that of the last proposal
        self._asked = 0  # number of it
        self._count = 0  # its sequences
        self._bound = ArrayTable(_NUM_PLACES)
        bound = self._bound
        bound.put(_ENDS, np.array(config.eos_token_id, np.int32))
        bound.put(_RECORD, record)
        bound.put(_TURBO, np.array(turbo_params(config), np.float64))
        bound.put(_RAW, np.array(raw_params(config), np.float64))
        self._theirs: Proposals | None = None
        self._make_room(_FIRST_SIZE)
        self._found = [Proposals.empty(_FIRST_SIZE) for _ in range(2)]
        for which, found in enumerate(self._found):
            bound.put_all(_FOUND + 5 * which, found)

    def _make_room(self, size: int) -> None:
        """For proposals for so many sequences."""
        self._buffers = _Buffers(
            where=np.empty((6, size), np.int64),
            most=np.empty(size, np.int32),
            trust=np.empty(size, np.float32),
            kept=np.empty(size, np.int32),
            tokens=np.empty(size * MAX_NODES, np.int32),
            parents=np.empty(size * MAX_NODES, np.int32),
        )
        self._bound.put_all(_WHERE, self._buffers)
        self._more = Proposals.empty(size)
        self._bound.put_all(_MORE, self._more)

    # -- one proposal -----------------------------------------------------------------------

    def catch_up(self, live_rows: Live, fresh: Fresh, *, proposes: bool) -> None:
        """Takes in new tokens.

        Args:
            proposes: they are the beginning of a proposal: drafts of the last one are judged by
                them, and `most` and `trust` of each sequence are worked out.
        """
        bound, count = self._bound, fresh.num_rows
        if count > len(self._buffers.most):
            self._make_room(2 * count)
        bound.put(_TOKENS, live_rows.texts.tokens)
        bound.put_all(_LIVE, live_rows.arrays)
        asked = self._asked if proposes else sequence_state.NO_PROPOSAL
        _catch_up(bound.table, fresh.batch, count, asked, *self._limits, _FOUND + 5 * self._now)
        if not proposes:
            return
        self._count = count
        self._now = 1 - self._now
        if len(self._found[self._now].counts) < count:  # the other one may still be judged
            self._found[self._now] = Proposals.empty(len(self._buffers.most))
            bound.put_all(_FOUND + 5 * self._now, self._found[self._now])

    def bind(self, turbo: TurboSource | None, raw: RawSource | None, history: History) -> None:
        """What is looked up next is looked up in these, as they are now."""
        bound = self._bound
        history.changed = False  # before it is looked at: another thread may set it meanwhile
        if turbo is not None:
            bound.put_all(_LOCAL, turbo.local.arrays)
        if raw is not None:
            bound.put_all(_LOCAL + _RAW_INDEX, raw.local.arrays)
        for place, part in zip((_YOUNG, _OLD, _STATIC), history.generations, strict=True):
            if part.trie is not None:
                bound.put_all(place, part.trie.arrays)
            if part.raw is not None:
                bound.put_all(place + _RAW_INDEX, part.raw.arrays)
            bound.put(place + _TEXT, part.text)
            bound.cut(place + _TEXT, part.end)

    def price(self, costs: StepCosts) -> None:
        """Steps take so long from now on."""
        self._bound.put(_COSTS, costs.table())
        self._bound.put(_EDGES, costs.edges)

    def look_up(self, first: int, last: int) -> None:
        """The caches' drafts for some of the sequences."""
        _look_up(self._bound.table, self._mode, _FOUND + 5 * self._now, first, last)

    @property
    def most(self) -> NDArray[np.int32]:
        """[S] nodes that each draft of this proposal may have."""
        return self._buffers.most[: self._count]

    @property
    def found(self) -> Proposals:
        """What was looked up, or nothing if nobody did."""
        return self._found[self._now].some(slice(self._count))

    def merge(self, drafts: Proposals) -> None:
        """Adds drafts of somebody else, who keeps them in the same arrays from call to call.

        Args:
            drafts: [S or more].
        """
        if drafts is not self._theirs:
            self._theirs = drafts
            self._bound.put_all(_THEIRS, drafts)
        _merge(self._bound.table, _FOUND + 5 * self._now, _THEIRS, 0, self._count)

    def choose(self, costs: StepCosts, num_rows: int, turn: float) -> tuple[DraftBatch, bool]:
        """Chooses the nodes that make tokens come fastest and notes who got which.

        Args:
            num_rows: of the step without drafts.
            turn: seconds that the device waits for a proposal.

        Returns:
            the drafts, and whether there are nodes that pay.
        """
        count, buffers = self._count, self._buffers
        self.price(costs)
        self._asked += 1
        pays, size = _choose(
            self._bound.table, _FOUND + 5 * self._now, count, self._asked, num_rows, turn,
            self._most_rows, self._target, self._depth,
        )  # fmt: skip
        batch = DraftBatch(
            buffers.kept[:count].copy(),
            buffers.tokens[:size].copy(),
            buffers.parents[:size].copy(),
        )
        return batch, pays


# -- compiled -------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def _live_at(table: np.ndarray) -> LiveArrays:
    return LiveArrays(
        matrix(table, _LIVE, np.int64),
        matrix(table, _LIVE + 1, np.float64),
        vector(table, _LIVE + 2, np.float64),
    )


@njit(cache=True, nogil=True)
def _found_at(table: np.ndarray, place: int, first: int, last: int) -> Proposals:
    """Some rows of a set of drafts."""
    return Proposals(
        matrix(table, place, np.int32)[first:last],
        matrix(table, place + 1, np.int32)[first:last],
        matrix(table, place + 2, np.float32)[first:last],
        matrix(table, place + 3, np.int32)[first:last],
        vector(table, place + 4, np.int32)[first:last],
    )


@njit(cache=True, nogil=True)
def _trie_at(table: np.ndarray, place: int) -> TrieArrays:
    return TrieArrays(
        matrix(table, place, np.int64),
        matrix(table, place + 1, np.int32),
        matrix(table, place + 2, np.int32),
        matrix(table, place + 3, np.float32),
        vector(table, place + 4, np.int64),
    )


@njit(cache=True, nogil=True)
def _raw_at(table: np.ndarray, place: int) -> RawArrays:
    place += _RAW_INDEX
    return RawArrays(
        matrix(table, place, np.int64),
        matrix(table, place + 1, np.int32),
        matrix(table, place + 2, np.float32),
        vector(table, place + 3, np.int64),
    )


@njit(cache=True, nogil=True)
def _turbo_params_at(table: np.ndarray) -> TurboParams:
    n = vector(table, _TURBO, np.float64)
    return TurboParams(int(n[0]), int(n[1]), int(n[2]), int(n[3]), int(n[4]), int(n[5]), n[6], n[7])


@njit(cache=True, nogil=True)
def _raw_params_at(table: np.ndarray) -> RawParams:
    n = vector(table, _RAW, np.float64)
    return RawParams(int(n[0]), n[1] != 0.0, int(n[2]), int(n[3]), int(n[4]), n[5], n[6])


@njit(cache=True, nogil=True)
def _catch_up(
    table: np.ndarray,
    batch: np.ndarray,
    count: int,
    asked: int,
    vocabulary: int,
    longest: int,
    judged: int,
) -> None:
    """See `live.catch_up`; `judged` is the place of the drafts."""
    found = _found_at(table, judged, 0, table[judged, 1])
    sequence_state.catch_up(
        vector(table, _TOKENS, np.int32), _live_at(table), batch, count,
        vector(table, _ENDS, np.int32), vocabulary, longest, asked, found,
        matrix(table, _RECORD, np.float32), matrix(table, _WHERE, np.int64),
        vector(table, _MOST, np.int32), vector(table, _TRUST, np.float32),
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _look_up(table: np.ndarray, mode: int, place: int, first: int, last: int) -> None:
    """Drafts for sequences first .. last-1."""
    found = _found_at(table, place, first, last)
    found.counts[:] = 0
    if mode == _NO_SOURCE:
        return
    if mode != RAW:
        _ask_turbo(table, found, first, last)
    if mode == MERGED:
        more = _found_at(table, _MORE, first, last)
        more.counts[:] = 0
        _ask_raw(table, more, first, last)
        _merge(table, place, _MORE, first, last)
    elif mode != TURBO:
        _ask_raw(table, found, first, last)


@njit(cache=True, nogil=True)
def _merge(table: np.ndarray, place: int, other: int, first: int, last: int) -> None:
    """Adds one set's drafts for some of the sequences to another's."""
    found, more = _found_at(table, place, first, last), _found_at(table, other, first, last)
    merge(
        found.tokens, found.parents, found.path_probs, found.buckets, found.counts, more.tokens,
        more.parents, more.path_probs, more.buckets, more.counts,
        vector(table, _MOST, np.int32)[first:last],
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _ask_turbo(table: np.ndarray, found: Proposals, first: int, last: int) -> None:
    """Turbo's drafts."""
    params, record = _turbo_params_at(table), matrix(table, _RECORD, np.float32)
    work = trie_proposer.new_work(params, record[:_TURBO_KINDS], MAX_NODES)
    where = matrix(table, _WHERE, np.int64)
    most = vector(table, _MOST, np.int32)[first:last].copy()
    for i in range(len(most)):
        most[i] = min(most[i], MOST_TURBO_NODES)
    trie_proposer.propose_all(
        _trie_at(table, _LOCAL), vector(table, _TOKENS, np.int32), where[0, first:last],
        where[2, first:last], where[4, first:last], where[1, first:last],
        (
            (_trie_at(table, _YOUNG), vector(table, _YOUNG + _TEXT, np.int32)),
            (_trie_at(table, _OLD), vector(table, _OLD + _TEXT, np.int32)),
            (_trie_at(table, _STATIC), vector(table, _STATIC + _TEXT, np.int32)),
        ),
        params, work, most, found.tokens, found.parents, found.path_probs, found.buckets,
        found.counts,
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _ask_raw(table: np.ndarray, found: Proposals, first: int, last: int) -> None:
    """Raw's drafts for sequences that have none."""
    params, record = _raw_params_at(table), matrix(table, _RECORD, np.float32)
    first_kind = len(record) - _RAW_KINDS
    own = record[first_kind:]
    rates = (own[:, 0] + np.float32(1.0)) / (own[:, 1] + np.float32(2.0))
    rates = rates.reshape((ngram_index.NUM_LEVELS, ngram_index.NUM_DEPTHS))
    local, tokens = _raw_at(table, _LOCAL), vector(table, _TOKENS, np.int32)
    generations = (
        (_raw_at(table, _YOUNG), vector(table, _YOUNG + _TEXT, np.int32)),
        (_raw_at(table, _OLD), vector(table, _OLD + _TEXT, np.int32)),
        (_raw_at(table, _STATIC), vector(table, _STATIC + _TEXT, np.int32)),
    )
    where, most = matrix(table, _WHERE, np.int64), vector(table, _MOST, np.int32)
    path = np.empty(MAX_NODES, np.int32)
    for i in range(last - first):
        if found.counts[i] > 0:
            continue
        salt, space, begin = where[0, first + i], where[1, first + i], where[2, first + i]
        row = found.tokens[i], found.parents[i], found.path_probs[i], found.buckets[i]
        count = ngram_index.propose_one(
            local, tokens, begin, where[4, first + i], salt, space, generations, params, path,
            most[first + i], rates, row,
        )  # fmt: skip
        for node in range(count):
            found.buckets[i, node] += first_kind
        found.counts[i] = count


@njit(cache=True, nogil=True)
def _choose(
    table: np.ndarray,
    place: int,
    count: int,
    asked: int,
    num_rows: int,
    turn: float,
    most_rows: int,
    target: int,
    depth: int,
) -> tuple[bool, int]:
    """Chooses nodes and notes who got which; whether there are nodes that pay, and how many run."""
    found, live_arrays = _found_at(table, place, 0, count), _live_at(table)
    trust = vector(table, _TRUST, np.float32)[:count]
    kept = vector(table, _KEPT, np.int32)[:count]
    kept[:] = 0
    budget.choose(
        found.path_probs, found.counts, trust, vector(table, _COSTS, np.float64),
        vector(table, _EDGES, np.int64), num_rows, turn, most_rows, kept,
    )  # fmt: skip
    rows = matrix(table, _WHERE, np.int64)[5, :count]
    pays = kept.sum() > 0
    if target > 0:
        _keep_to_target(target, depth, live_arrays.averages, rows, kept)
    size = kept.sum()
    sequence_state.hand_over(
        live_arrays, rows, asked, found, kept, vector(table, _TOKENS_OUT, np.int32),
        vector(table, _PARENTS_OUT, np.int32),
    )  # fmt: skip
    return pays, size


@njit(cache=True, nogil=True)
def _keep_to_target(
    target: int, depth: int, averages: np.ndarray, rows: np.ndarray, kept: np.ndarray
) -> None:
    """TACO's target_parallelism: beyond so many rows in a step, drafts shrink with their hits.

    Parents come before their children, so the first nodes of a draft are a draft.
    """
    if len(rows) + kept.sum() <= target:
        return
    best, num_rows = 0.0, len(rows)
    for row in rows:
        best = max(best, averages[row, HITS])
    for i in range(len(rows)):
        share = averages[rows[i], HITS] / best if best > 0.0 else 1.0
        kept[i] = min(kept[i], min(max(int(depth * share), 1), depth))
        num_rows += kept[i]
    if num_rows > target:
        for i in range(len(rows)):
            kept[i] = max(int((kept[i] + 1) * (target / num_rows)) - 1, 0)
