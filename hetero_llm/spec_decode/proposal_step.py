"""One proposal of the `HybridDrafter`: compiled functions over arrays that stay.

The device waits meanwhile. So the arrays of tokens, indexes and drafts are entered into a table
once (array_table.py), and what is left of a proposal are three compiled calls with numbers and the
one array of new tokens: `take_in`, `look_up`, `choose`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero_llm.config.lookahead_config import LookaheadConfig
from hetero_llm.core.draft_tree import MAX_NODES, DraftBatch
from hetero_llm.core.drafter import (
    FIRST_END_ID,
    MAX_KNOWN,
    NUM_KNOWN,
    NUM_WRITABLE,
    ROW,
)
from hetero_llm.core.step_times import StepTimes
from hetero_llm.spec_decode import budget
from hetero_llm.spec_decode.acceptance_stats import record_outcome
from hetero_llm.spec_decode.array_table import (
    BORROWING,
    ArrayTable,
    Float32Matrix,
    Float32Vector,
    Float64Vector,
    Int32Matrix,
    Int32Vector,
    Int64Vector,
    reader_of,
)
from hetero_llm.spec_decode.budget import MOST_ROWS
from hetero_llm.spec_decode.lookahead import ngram_index, suffix_trie, trie_proposer
from hetero_llm.spec_decode.lookahead.global_cache import GlobalCache
from hetero_llm.spec_decode.lookahead.indexes import (
    MAX_TRIE_NODES,
    MERGED,
    RAW,
    TURBO,
    LocalIndex,
    LocalNgramIndex,
    LocalSuffixTrie,
    ngram_params,
    trie_params,
    trie_proposal_params,
)
from hetero_llm.spec_decode.lookahead.ngram_index import NgramArrays, NgramParams
from hetero_llm.spec_decode.lookahead.sequence_state import (
    CLOSED,
    END,
    EXPECTED_HITS,
    HITS,
    INDEXED,
    MEAN_EXPECTED_HITS,
    MEAN_HITS,
    NAMESPACE,
    NODE_LIMIT,
    NUM_FOLLOWED,
    NUM_OUT_OF_VOCAB,
    NUM_VERIFIED,
    OUT_OF_VOCAB,
    PLACE,
    PROPOSAL,
    PROPOSAL_END,
    PROPOSED_HITS,
    SALT,
    SEPARATOR,
    SHARED,
    START,
    NewTokens,
    SequenceArrays,
    SequenceStates,
)
from hetero_llm.spec_decode.lookahead.suffix_trie import TrieArrays, TrieParams
from hetero_llm.spec_decode.lookahead.trie_proposer import TrieProposalParams
from hetero_llm.spec_decode.merge_trees import merge
from hetero_llm.spec_decode.proposal_account import ProposalIdle, ProposalTerms
from hetero_llm.spec_decode.proposals import DraftModel, Proposals, rows_of
from hetero_llm.utils.jit import njit

_NO_INDEX = -1  # instead of a cache mode
_NO_PROPOSAL = -2  # a number that no proposal has
_TRIE_BUCKETS, _NGRAM_BUCKETS = LocalSuffixTrie.NUM_BUCKETS, LocalNgramIndex.NUM_BUCKETS
_ANY_ROOM = MAX_NODES
_INITIAL_SIZE = 16
_LEAST_PER_THREAD = 64
"""Sequences that make a thread worth waking: one is looked up in some 2 us, and an empty call of
another thread took 34 us. On the 16 cores of an H200 node four threads took 166 us for 64 sequences
of Raw, one thread 6 us for 8."""
_REHEARSED = 16  # last tokens of each sequence that are looked up at the end of a pause
_MOST_REHEARSED = 10  # lookups for that: at least one of each sequence, each of some 3 us
_DRAFT_LENGTH = 7  # tokens that a usual draft has
_LEARN_ROOM = 256  # tokens for which the local indexes make room at once, at least
_KEPT_SHARE = 0.8  # of the moving averages of hits, kept at each step
_MIN_SCALE, _MAX_SCALE = 0.1, 2.0  # of a sequence's acceptance scale


class _Buffers(NamedTuple):
    """What compiled functions write for the S sequences of a proposal.

    Attributes:
        rows: [S] of the sequence states.
        salts, namespaces: [S] of their entries in the local indexes and in the global cache.
        starts, ends: [S] positions in the token buffer.
        limits: [S] nodes that each draft may have.
        rooms: [S] nodes for which there are KV blocks.
        scales: [S] acceptance scale: what to scale the odds of a draft's path probabilities by.
        kept: [S] nodes of each draft to be verified, its first ones.
        token_ids, parents: these nodes, one draft after the other.
    """

    rows: Int64Vector
    salts: Int64Vector
    namespaces: Int64Vector
    starts: Int64Vector
    ends: Int64Vector
    limits: Int32Vector
    rooms: Int32Vector
    scales: Float32Vector
    kept: Int32Vector
    token_ids: Int32Vector
    parents: Int32Vector


class TakenIn(NamedTuple):
    """The T sequences of a steady batch that go on: see `SteadyStep`. `rows`: [T] int64, of the
    sequence states."""

    going_on: NDArray[np.int64] | None
    rows: NDArray[np.int64]
    num_computed_tokens: NDArray[np.int32]
    token_ids: NDArray[np.int32]


class _LocalIndexes(NamedTuple):
    """Of the running sequences; positions refer to `_Arrays.tokens`."""

    trie: TrieArrays
    ngrams: NgramArrays


class _Indexes(NamedTuple):
    """Of a generation of the global cache; positions refer to `text`."""

    trie: TrieArrays
    ngrams: NgramArrays
    text: Int32Vector


# large: one name for each array that compiled functions find.
class _Arrays:
    """What compiled functions find by name. Arrays of an index that the configuration does not use
    are never entered nor looked at.

    The first 2 * NUM_LENGTHS * NUM_BUCKETS rows of `accepted` belong to the trie, the others to the
    n-gram index. `more`: drafts of the n-gram index that are to be merged with the trie's.
    """

    tokens: Int32Vector
    states: SequenceArrays
    stop_tokens: Int32Vector
    accepted: Float32Matrix
    step_seconds: Float64Vector
    step_sizes: Int64Vector
    trie_params: TrieProposalParams
    trie_entering: TrieParams
    trie_actives: Int32Matrix
    ngram_params: NgramParams
    buffers: _Buffers
    found: Proposals
    more: Proposals
    of_model: Proposals
    local: _LocalIndexes
    young: _Indexes
    old: _Indexes
    static: _Indexes


_read = reader_of(_Arrays)


# large: what stays of a proposal from one call to the next.
class ProposalStep:
    """See the module. New tokens are taken in, by `take_in` or `take_in_next`, then `propose` makes
    drafts. One thread at a time.

    Args:
        states: the sequences to draft for.
        indexes: their local indexes; without any, nothing is looked up.
        cache: the global cache.
        accepted: [buckets, 2] float32, accepted and tried nodes of each acceptance bucket: those of
            the trie, then those of the n-gram index.
        num_threads: that share large batches.

    Attributes:
        has_blocks: whether each sequence has KV blocks for its nodes of the last proposal; always
            behind `take_in`, which does not know.
    """

    def __init__(
        self,
        config: LookaheadConfig,
        states: SequenceStates,
        indexes: list[LocalIndex],
        cache: GlobalCache,
        accepted: NDArray[np.float32],
        *,
        num_threads: int,
    ) -> None:
        assert config.max_seq_len is not None and config.eos_token_id is not None
        self._states, self._indexes, self._cache = states, indexes, cache
        self._mode = config.cache_mode if indexes else _NO_INDEX
        self._limits = config.voc_size, config.max_seq_len
        self._target = config.target_parallelism if config.cache_mode == RAW else 0
        self._max_tokens = MOST_ROWS if config.cache_mode == RAW else config.target_parallelism
        self._depth = config.copy_length
        self.has_blocks = True
        self._number = 0  # of the last proposal
        self._count = 0  # its sequences
        self._least_kept = 0.0  # least path probability of its nodes that are verified
        self._num_threads = num_threads
        self._start_freq = float(config.start_freq)
        self._room = self._num_rows = 0  # of the local indexes: tokens to enter, and rows
        self._pool = ThreadPoolExecutor(max(num_threads - 1, 1), "hetero-lookahead")
        self._arrays = ArrayTable(_Arrays)
        self._arrays.put("stop_tokens", np.array(config.eos_token_id, np.int32))
        self._arrays.put("accepted", accepted)
        self._arrays.put("trie_params", trie_proposal_params(config))
        self._arrays.put("trie_entering", trie_params(config))
        self._arrays.put("ngram_params", ngram_params(config))
        self._make_room(_INITIAL_SIZE)
        self._found = Proposals.empty(_INITIAL_SIZE)
        self._arrays.put("found", self._found)
        self._reserve(0, 0)

    def _make_room(self, size: int) -> None:
        """Replaces the buffers by those for proposals for `size` sequences."""
        self._buffers = _Buffers(
            rows=np.empty(size, np.int64),
            salts=np.empty(size, np.int64),
            namespaces=np.empty(size, np.int64),
            starts=np.empty(size, np.int64),
            ends=np.empty(size, np.int64),
            limits=np.empty(size, np.int32),
            rooms=np.empty(size, np.int32),
            scales=np.empty(size, np.float32),
            kept=np.empty(size, np.int32),
            token_ids=np.empty(size * MAX_NODES, np.int32),
            parents=np.empty(size * MAX_NODES, np.int32),
        )
        self._arrays.put("buffers", self._buffers)
        self._arrays.put("more", Proposals.empty(size))

    @property
    def found(self) -> Proposals:
        """[S] drafts of the last proposal, whether verified or not."""
        return self._found.some(slice(self._count))

    def set_step_times(self, times: StepTimes) -> None:
        """Enters what steps take from now on."""
        self._arrays.put("step_seconds", times.table())
        self._arrays.put("step_sizes", times.sizes)

    def learn(self, rows: NDArray[np.int64], chunk: int, tick: int) -> NDArray[np.int64]:
        """Enters into the local indexes the tokens of these sequences that are not there yet.

        Args:
            rows: [S] of the sequence states. tick: time, never less than at the call before.

        Returns:
            Those rows with at least `chunk` tokens that the global cache does not hold.
        """
        table, freq = self._arrays.table, self._start_freq
        due = np.empty(len(rows), np.int64)
        num_new, num_due = _learn(
            table, rows, self._mode, self._room, self._num_rows, freq, tick, chunk, due
        )
        if num_new < 0:
            num_rows = len(self._states.arrays.numbers)
            self._reserve(max(-num_new, _LEARN_ROOM), num_rows)
            num_new, num_due = _learn(
                table, rows, self._mode, self._room, num_rows, freq, tick, chunk, due
            )
        self._room -= num_new
        return due[:num_due]

    def rehearse(
        self, new: NewTokens, chunk: int, num_rows: int, idle: ProposalIdle, tick: int
    ) -> tuple[float | None, NDArray[np.int64]]:
        """Takes in the tokens that sequences got in a pause and works out what drafts would have
        saved meanwhile, as if the pause had been none: looks up the last tokens one draft after the
        other, judges each draft by what followed, and enters the tokens into the local indexes.

        Args:
            num_rows: tokens of a step without drafts. idle: of the device.
            chunk, tick: see `learn`.

        Returns:
            Steps without drafts that the accepted nodes would have saved beyond what the steps with
            drafts would have taken longer, for each step without drafts that was looked at; None if
            none was, or if step times are not known. And the rows as `learn` returns them.
        """
        self.take_in(new, proposes=True)
        self.refresh_indexes()
        table, rows = self._arrays.table, new.rows
        due = np.empty(len(rows), np.int64)
        room = len(new.batch) + _LEARN_ROOM
        if self._room < room or self._num_rows < len(self._states.arrays.numbers):
            self._reserve(room, len(self._states.arrays.numbers))
        saved, looked_at, num_new, num_due = _rehearse(
            table, self._mode, self._count, num_rows, idle.proposed, idle.plain, self._max_tokens,
            self._start_freq, tick, chunk, due,
        )  # fmt: skip
        self._room -= num_new
        return (saved if looked_at else None), due[:num_due]

    def _reserve(self, tokens: int, num_rows: int) -> None:
        """Makes room in the local indexes for `tokens` more tokens of rows below `num_rows`."""
        for index in self._indexes:
            index.reserve(tokens, num_rows)
            self._arrays.put("local." + index.name, index.arrays)
            if isinstance(index, LocalSuffixTrie):
                self._arrays.put("trie_actives", index.actives)
        self._room, self._num_rows = tokens, num_rows

    def refresh_indexes(self) -> None:
        """Enters the global cache's generations as they are now, if they have changed."""
        if not self._cache.changed:
            return
        put = self._arrays.put
        self._cache.changed = False  # before it is looked at: another thread may set it meanwhile
        for name, part in zip(("young.", "old.", "static."), self._cache.generations, strict=True):
            for learned in part.indexes:
                put(name + learned.name, learned.arrays)
            put(name + "text", part.text)
            self._arrays.cut(name + "text", part.end)

    def take_in(self, new: NewTokens, *, proposes: bool) -> None:
        """Appends new tokens to their sequences.

        Args:
            proposes: a proposal for these sequences begins: what came of the last one's drafts is
                recorded, and limit and acceptance scale of each sequence are worked out.
        """
        self.prepare(new.num_sequences)
        number = self._number if proposes else _NO_PROPOSAL
        _take_in(self._arrays.table, new.batch, new.num_sequences, number, *self._limits)
        if proposes:
            self._begin(new.num_sequences)

    def prepare(self, count: int) -> None:
        """Makes room for `count` sequences and enters the arrays that taking in needs: to be called
        before `take_in_next`, while nothing waits."""
        if count > len(self._buffers.limits):
            self._make_room(2 * count)
        self._arrays.put("tokens", self._states.buffer.tokens)
        self._arrays.put("states", self._states.arrays)

    def take_in_next(
        self,
        numbers: NDArray[np.int64],
        token_ids: NDArray[np.int64],
        sizes: NDArray[np.int64],
        most_nodes: int,
    ) -> TakenIn | None:
        """Appends new tokens to the sequences of a steady batch that go on, for which a proposal
        begins; see `ArrayDrafter.propose_next`."""
        count = len(sizes)
        longs, ints = np.empty((2, count), np.int64), np.empty((2, count), np.int32)
        num_left = _take_in_next(
            self._arrays.table, numbers, token_ids, sizes, most_nodes, self._number, *self._limits,
            longs, ints,
        )  # fmt: skip
        if not num_left:
            return None
        self._begin(num_left)
        if num_left == count:
            return TakenIn(None, longs[1], ints[0], ints[1])
        going_on, rows = longs[:, :num_left]
        return TakenIn(going_on, rows, *ints[:, :num_left])

    def _begin(self, count: int) -> None:
        """Begins a proposal for `count` sequences whose tokens are taken in."""
        self._count = count
        if len(self._found.counts) < count:  # the last drafts are not needed any more
            self._found = Proposals.empty(len(self._buffers.limits))
            self._arrays.put("found", self._found)

    def propose(
        self,
        rows: NDArray[np.int64],
        terms: ProposalTerms,
        model: DraftModel | None,
    ) -> tuple[DraftBatch, float]:
        """Drafts for the sequences whose tokens were taken in last.

        Args:
            rows: [S] of the sequence states.
            model: a draft model, which has got the new tokens already; its drafts are added.

        Returns:
            the drafts, and what they gain (`budget.choose`).
        """
        self.look_up(self._count)
        if model is not None:
            limits = self._buffers.limits[: self._count]
            seconds = terms.plain_seconds + terms.idle.proposed
            model.propose(
                rows, limits, seconds, self._found, self._least_kept, may_wait=terms.may_wait
            )
            self.merge(model.drafts)
        return self.choose(terms)

    def look_up(self, count: int) -> None:
        """Drafts for the first `count` sequences from the indexes; threads share large batches."""
        self.refresh_indexes()
        table, mode = self._arrays.table, self._mode
        num_parts = min(self._num_threads, count // _LEAST_PER_THREAD)
        if num_parts <= 1:
            _look_up(table, mode, 0, count)
            return
        edges = [count * part // num_parts for part in range(num_parts + 1)]
        calls = [
            self._pool.submit(_look_up, table, mode, first, last)
            for first, last in zip(edges[1:], edges[2:], strict=False)
        ]
        _look_up(table, mode, 0, edges[1])
        for call in calls:
            call.result()

    def merge(self, drafts: Proposals) -> None:
        """Adds the draft model's drafts for the sequences of this proposal."""
        self._arrays.put("of_model", drafts)
        _merge_model(self._arrays.table, self._count)

    def choose(self, terms: ProposalTerms) -> tuple[DraftBatch, float]:
        """Chooses the nodes that make tokens come fastest and notes which sequence got which; see
        `propose`."""
        count, buffers = self._count, self._buffers
        self._number += 1
        num_rows, idle = terms.num_rows, terms.idle
        max_tokens = min(self._max_tokens, num_rows + terms.most_nodes)
        gain, size, self._least_kept, self.has_blocks = _choose(
            self._arrays.table, count, self._number, num_rows, idle.proposed, idle.plain,
            max_tokens, self._target, self._depth,
        )  # fmt: skip
        batch = DraftBatch(
            buffers.kept[:count].copy(),
            buffers.token_ids[:size].copy(),
            buffers.parents[:size].copy(),
        )
        return batch, gain


# -- compiled -------------------------------------------------------------------------------


@njit(**BORROWING)
def _learn(
    table: np.ndarray,
    rows: np.ndarray,
    mode: int,
    room: int,
    num_rows: int,
    freq: float,
    tick: int,
    chunk: int,
    due: np.ndarray,
) -> tuple[int, int]:
    """Enters new tokens of these rows into the local indexes; a row may occur twice.

    Args:
        room: tokens that may be entered. num_rows: rows that the indexes know.
        freq: of a new entry.
        due: [S], written: rows with at least `chunk` tokens that are not shared.

    Returns:
        How many were entered and the number of rows due; less than 0 if there is no room for as
        many, or for these rows. Then nothing was entered.
    """
    numbers = _read(table, "states").numbers
    total, last = 0, -1
    for row in rows:
        # With ignore_prompt INDEXED may lie behind END: an output's first tokens are left out.
        if numbers[row, CLOSED] == 0 and numbers[row, END] > numbers[row, INDEXED]:
            total += numbers[row, END] - numbers[row, INDEXED]
            last = max(last, row)
    if total == 0:
        return 0, 0
    if total > room or last >= num_rows:
        return -total, 0
    count = 0
    for row in rows:
        state = numbers[row]
        if state[CLOSED] != 0 or state[END] <= state[INDEXED]:
            continue
        _enter(table, row, state[END], mode, freq, tick)
        if state[END] - state[SHARED] >= chunk:
            due[count] = row
            count += 1
    return total, count


@njit(**BORROWING)
def _enter(table: np.ndarray, row: int, end: int, mode: int, freq: float, tick: int) -> None:
    """Enters the tokens of a row before `end` that are not in the local indexes yet."""
    state, tokens = _read(table, "states").numbers[row], _read(table, "tokens")
    begin, salt = state[INDEXED], state[SALT]
    if mode != _NO_INDEX and mode != RAW:
        suffix_trie.insert(
            _read(table, "local").trie, _read(table, "trie_entering"), tokens, salt, begin, end,
            _read(table, "trie_actives")[row], freq,
        )  # fmt: skip
    if mode != _NO_INDEX and mode != TURBO:
        ngram_index.insert(
            _read(table, "local").ngrams, _read(table, "ngram_params"), tokens, salt,
            state[START], begin, end, freq, tick,
        )  # fmt: skip
    state[INDEXED] = end


@njit(cache=True, nogil=True)
def _rehearse(
    table: np.ndarray,
    mode: int,
    count: int,
    num_rows: int,
    idle: float,
    plain_idle: float,
    max_tokens: int,
    freq: float,
    tick: int,
    chunk: int,
    due: np.ndarray,
) -> tuple[float, int, int, int]:
    """See `ProposalStep.rehearse`. Returns what was saved for each token looked at, their number,
    the number of tokens entered, and the number of rows due."""
    found, buffers = _read(table, "found"), _read(table, "buffers")
    states, tokens = _read(table, "states"), _read(table, "tokens")
    seconds, sizes = _read(table, "step_seconds"), _read(table, "step_sizes")
    plain = seconds[min(np.searchsorted(sizes, num_rows), len(sizes) - 1)]
    kept = np.zeros(1, np.int32)
    most = max(_MOST_REHEARSED // max(count, 1), 1)  # lookups for each sequence
    span = min(_REHEARSED, most + _DRAFT_LENGTH)
    own_idle = idle - (plain + idle) * (num_rows - 1) / num_rows  # a sequence's share of a step
    saved, looked_at, entered, num_due = 0.0, 0, 0, 0
    for i in range(count):
        row = buffers.rows[i]
        state = states.numbers[row]
        end, known = state[END], state[INDEXED]
        if state[CLOSED] != 0 or end <= known:
            continue
        entered += end - known
        position, left = max(known, end - span), most
        if known == state[START] or state[OUT_OF_VOCAB] != 0 or plain <= 0.0:
            left = 0  # a prompt, of which no token is drafted
        while position < end and left > 0:
            left -= 1
            _enter(table, row, position, mode, freq, tick)
            buffers.ends[i], buffers.limits[i] = position, end - position
            _look_up(table, mode, i, i + 1)
            kept[0] = 0
            if found.counts[i] > 0:
                budget.choose(
                    found.path_probs[i : i + 1], found.counts[i : i + 1], buffers.scales[i : i + 1],
                    seconds, sizes, num_rows, own_idle, own_idle, max_tokens, kept,
                )  # fmt: skip
            accepted = record_outcome(
                tokens, position, end, i, found.tokens, found.parents, found.buckets, found.counts,
                kept[0], _read(table, "accepted"),
            )  # fmt: skip
            step = seconds[min(np.searchsorted(sizes, num_rows + kept[0]), len(sizes) - 1)]
            lost = step - plain + (idle - plain_idle) / num_rows
            saved += accepted / num_rows - lost / (plain + plain_idle)
            looked_at += accepted + 1
            position += accepted + 1
        _enter(table, row, end, mode, freq, tick)
        buffers.ends[i] = end
        if end - state[SHARED] >= chunk:
            due[num_due] = row
            num_due += 1
    if looked_at > 0:
        saved *= num_rows / looked_at
    return saved, looked_at, entered, num_due


@njit(**BORROWING)
def _take_in(
    table: np.ndarray, batch: np.ndarray, count: int, number: int, voc_size: int, max_seq_len: int
) -> None:
    """Appends new tokens and records what came of the drafts of proposal `number`.

    Args:
        batch, count: of `NewTokens`.
        voc_size: a sequence with a token of this or above gets no drafts.
        max_seq_len: tokens beyond which nothing is drafted.
    """
    first = 3 * count
    for i in range(count):
        size = batch[2 * count + i]
        new = batch[first : first + size]
        _take_in_one(
            table, i, batch[i], new, batch[count + i], _ANY_ROOM, number, voc_size, max_seq_len
        )
        first += size


@njit(**BORROWING)
def _take_in_next(
    table: np.ndarray,
    numbers: np.ndarray,
    token_ids: np.ndarray,
    sizes: np.ndarray,
    most_nodes: int,
    number: int,
    voc_size: int,
    max_seq_len: int,
    longs: np.ndarray,
    ints: np.ndarray,
) -> int:
    """As `_take_in`, for those of S sequences that go on.

    Args:
        numbers, token_ids, sizes, most_nodes: see `ArrayDrafter.propose_next`.
        longs: [2, S] int64, written: `TakenIn.going_on` and `TakenIn.rows`.
        ints: [2, S] int32, written: `TakenIn.num_computed_tokens` and `TakenIn.token_ids`.

    Returns:
        How many sequences go on; 0 if one of them lacks the block for its next token, too. Then
        nothing was taken in.
    """
    going_on, rows = longs
    num_computed, last_tokens = ints
    count = first = 0
    for i in range(len(sizes)):
        known, end = numbers[i, NUM_KNOWN] + sizes[i], first + sizes[i]
        if known < numbers[i, MAX_KNOWN] and not _holds_any(
            token_ids[first:end], numbers[i, FIRST_END_ID:]
        ):
            if numbers[i, NUM_WRITABLE] < known:
                return 0
            going_on[count], rows[count] = i, numbers[i, ROW]
            num_computed[count], last_tokens[count] = known - 1, token_ids[end - 1]
            count += 1
        first = end
    first = i = 0
    states = _read(table, "states")
    for place in range(count):
        while i < going_on[place]:
            first += sizes[i]
            i += 1
        known = numbers[i, NUM_KNOWN] + sizes[i]
        # If all nodes are accepted, one more token follows them.
        limit = max(min(numbers[i, MAX_KNOWN] - known - 1, most_nodes), 0)
        room = numbers[i, NUM_WRITABLE] - known
        new = token_ids[first : first + sizes[i]]
        _take_in_one(table, place, rows[place], new, limit, room, number, voc_size, max_seq_len)
        states.numbers[rows[place], NUM_FOLLOWED] += sizes[i]
    return count


@njit(**BORROWING)
def _holds_any(token_ids: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether any of the tokens is among those wanted."""
    for token in token_ids:
        for one in wanted:
            if token == one:
                return True
    return False


@njit(**BORROWING)
def _take_in_one(
    table: np.ndarray,
    i: int,
    row: int,
    new: np.ndarray,
    limit: int,
    room: int,
    number: int,
    voc_size: int,
    max_seq_len: int,
) -> None:
    """Appends new tokens to a sequence, judges its draft of proposal `number` by them, and writes
    place `i` of the buffers.

    Args:
        row: of the sequence states. new: its new tokens.
        limit: most nodes of its next draft. room: nodes for which it has KV blocks.
    """
    tokens, buffers = _read(table, "tokens"), _read(table, "buffers")
    numbers, averages, totals = _read(table, "states")
    state, average = numbers[row], averages[row]
    if state[OUT_OF_VOCAB] == 0 and len(new) > 0:
        if _append(tokens, new, state[END], _read(table, "stop_tokens"), voc_size):
            state[END] += len(new)
        else:
            tokens[state[END]] = SEPARATOR
            state[OUT_OF_VOCAB] = 1
            totals[NUM_OUT_OF_VOCAB] += 1
    if state[PROPOSAL] == number and len(new) > 0:
        found = _read(table, "found")
        accepted = record_outcome(
            tokens, state[PROPOSAL_END], state[END], state[PLACE], found.tokens, found.parents,
            found.buckets, found.counts, state[NUM_VERIFIED], _read(table, "accepted"),
        )  # fmt: skip
        if state[NUM_VERIFIED] > 0:
            weight, proposed = 1 - _KEPT_SHARE, average[PROPOSED_HITS]
            average[HITS] += weight * (accepted - average[HITS])
            average[EXPECTED_HITS] += weight * (proposed - average[EXPECTED_HITS])
            weight /= 8
            totals[MEAN_HITS] += weight * (accepted - totals[MEAN_HITS])
            totals[MEAN_EXPECTED_HITS] += weight * (proposed - totals[MEAN_EXPECTED_HITS])
    buffers.rows[i], buffers.salts[i] = row, state[SALT]
    buffers.namespaces[i] = state[NAMESPACE]
    buffers.starts[i], buffers.ends[i] = state[START], state[END]
    left = max_seq_len - (state[END] - state[START])
    limit = max(min(limit, state[NODE_LIMIT], left), 0)
    buffers.limits[i] = limit if state[OUT_OF_VOCAB] == 0 else 0
    buffers.rooms[i] = room
    scale = average[HITS] / max(average[EXPECTED_HITS], 1e-6)
    buffers.scales[i] = min(max(scale, _MIN_SCALE), _MAX_SCALE)


@njit(**BORROWING)
def _append(
    tokens: np.ndarray, new: np.ndarray, end: int, stop_tokens: np.ndarray, voc_size: int
) -> bool:
    """Writes new tokens from `end` on, separators in the place of stop tokens. False if one is
    beyond the vocabulary."""
    for index in range(len(new)):
        token = new[index]
        if token >= voc_size:
            return False
        for stop in stop_tokens:
            if token == stop:
                token = SEPARATOR
        tokens[end + index] = token
    tokens[end + len(new)] = SEPARATOR
    return True


@njit(cache=True, nogil=True)
def _look_up(table: np.ndarray, mode: int, first: int, last: int) -> None:
    """Drafts for sequences first .. last-1."""
    found = rows_of(_read(table, "found"), first, last)
    found.counts[:] = 0
    if mode == _NO_INDEX:
        return
    if mode != RAW:
        _draft_from_tries(table, found, first, last)
    if mode == MERGED:
        more = rows_of(_read(table, "more"), first, last)
        more.counts[:] = 0
        _draft_from_ngrams(table, more, first, last)
        _merge(found, more, _read(table, "buffers").limits[first:last])
    elif mode != TURBO:
        _draft_from_ngrams(table, found, first, last)


@njit(cache=True, nogil=True)
def _merge_model(table: np.ndarray, count: int) -> None:
    """Adds the draft model's drafts for the first sequences."""
    found = rows_of(_read(table, "found"), 0, count)
    more = rows_of(_read(table, "of_model"), 0, count)
    _merge(found, more, _read(table, "buffers").limits[:count])


@njit(cache=True, nogil=True)
def _merge(found: Proposals, more: Proposals, limits: np.ndarray) -> None:
    merge(
        found.tokens, found.parents, found.path_probs, found.buckets, found.counts, more.tokens,
        more.parents, more.path_probs, more.buckets, more.counts, limits,
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _draft_from_tries(table: np.ndarray, found: Proposals, first: int, last: int) -> None:
    """Turbo's drafts for sequences first .. last-1."""
    params, buffers = _read(table, "trie_params"), _read(table, "buffers")
    work = trie_proposer.new_work(params, _read(table, "accepted")[:_TRIE_BUCKETS], MAX_NODES)
    limits = buffers.limits[first:last].copy()
    for i in range(len(limits)):
        limits[i] = min(limits[i], MAX_TRIE_NODES)
    young, old, static = _read(table, "young"), _read(table, "old"), _read(table, "static")
    trie_proposer.propose_all(
        _read(table, "local").trie, _read(table, "tokens"), buffers.salts[first:last],
        buffers.starts[first:last], buffers.ends[first:last], buffers.namespaces[first:last],
        ((young.trie, young.text), (old.trie, old.text), (static.trie, static.text)),
        params, work, limits, found.tokens, found.parents, found.path_probs, found.buckets,
        found.counts,
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _draft_from_ngrams(table: np.ndarray, found: Proposals, first: int, last: int) -> None:
    """Raw's drafts for those of sequences first .. last-1 that have none."""
    accepted = _read(table, "accepted")
    own = accepted[len(accepted) - _NGRAM_BUCKETS :]
    rates = (own[:, 0] + np.float32(1.0)) / (own[:, 1] + np.float32(2.0))
    rates = rates.reshape((ngram_index.NUM_LEVELS, ngram_index.NUM_DEPTHS))
    path = np.empty(MAX_NODES, np.int32)
    _fill_from_ngrams(table, found, first, last, len(accepted) - _NGRAM_BUCKETS, rates, path)


@njit(**BORROWING)
def _fill_from_ngrams(
    table: np.ndarray,
    found: Proposals,
    first: int,
    last: int,
    first_bucket: int,
    rates: np.ndarray,
    path: np.ndarray,
) -> None:
    """As `_draft_from_ngrams`, with the acceptance rates of its buckets and memory for a path."""
    params, buffers = _read(table, "ngram_params"), _read(table, "buffers")
    young, old, static = _read(table, "young"), _read(table, "old"), _read(table, "static")
    local, tokens = _read(table, "local").ngrams, _read(table, "tokens")
    generations = (
        (young.ngrams, young.text), (old.ngrams, old.text), (static.ngrams, static.text),
    )  # fmt: skip
    for i in range(last - first):
        if found.counts[i] > 0:
            continue
        at = first + i
        draft = found.tokens[i], found.parents[i], found.path_probs[i], found.buckets[i]
        count = ngram_index.propose_one(
            local, tokens, buffers.starts[at], buffers.ends[at], buffers.salts[at],
            buffers.namespaces[at], generations, params, path, buffers.limits[at], rates, draft,
        )  # fmt: skip
        for node in range(count):
            found.buckets[i, node] += first_bucket
        found.counts[i] = count


@njit(cache=True, nogil=True)
def _choose(
    table: np.ndarray,
    count: int,
    number: int,
    num_rows: int,
    idle: float,
    plain_idle: float,
    max_tokens: int,
    target: int,
    depth: int,
) -> tuple[float, int, float, bool]:
    """Chooses nodes and notes which sequence got which. Returns what they gain, how many are to be
    verified, the least path probability of these, 0 if all are, and whether there are KV blocks for
    all that are verified."""
    found, buffers = rows_of(_read(table, "found"), 0, count), _read(table, "buffers")
    states = _read(table, "states")
    rows, kept = buffers.rows[:count], buffers.kept[:count]
    kept[:] = 0
    gain = budget.choose(
        found.path_probs, found.counts, buffers.scales[:count], _read(table, "step_seconds"),
        _read(table, "step_sizes"), num_rows, idle, plain_idle, max_tokens, kept,
    )  # fmt: skip
    if target > 0:
        _keep_to_target(target, depth, states.averages, rows, kept)
    size = kept.sum()
    _hand_over(states, rows, number, found, kept, buffers.token_ids, buffers.parents)
    least = 1.0 if size < found.counts.sum() else 0.0
    has_blocks = True
    for i in range(count):
        has_blocks = has_blocks and kept[i] <= buffers.rooms[i]
        if least > 0.0 and kept[i] > 0:
            least = min(least, found.path_probs[i, kept[i] - 1])
    return gain, size, least, has_blocks


@njit(**BORROWING)
def _keep_to_target(
    target: int, depth: int, averages: np.ndarray, rows: np.ndarray, kept: np.ndarray
) -> None:
    """TACO's target_parallelism: in a step of more than `target` tokens drafts shrink with their
    hits.

    Parents come before their children, so the first nodes of a draft are a draft.
    """
    if len(rows) + kept.sum() <= target:
        return
    best, num_tokens = 0.0, len(rows)
    for row in rows:
        best = max(best, averages[row, HITS])
    for i in range(len(rows)):
        share = averages[rows[i], HITS] / best if best > 0.0 else 1.0
        kept[i] = min(kept[i], min(max(int(depth * share), 1), depth))
        num_tokens += kept[i]
    if num_tokens > target:
        for i in range(len(rows)):
            kept[i] = max(int((kept[i] + 1) * (target / num_tokens)) - 1, 0)


@njit(**BORROWING)
def _hand_over(
    states: SequenceArrays,
    rows: np.ndarray,
    number: int,
    found: Proposals,
    kept: np.ndarray,
    token_ids: np.ndarray,
    parents: np.ndarray,
) -> None:
    """Notes the drafts of proposal `number` and writes their nodes one after the other.

    Args:
        kept: [S] first nodes of each draft that are verified.
        token_ids, parents: [sum of kept] int32, written.
    """
    at = 0
    for i in range(len(rows)):
        state = states.numbers[rows[i]]
        expected = 0.0
        for node in range(kept[i]):
            token_ids[at], parents[at] = found.tokens[i, node], found.parents[i, node]
            expected += found.path_probs[i, node]
            at += 1
        states.averages[rows[i], PROPOSED_HITS] = expected
        state[PROPOSAL], state[PLACE] = number, i
        state[PROPOSAL_END], state[NUM_VERIFIED] = state[END], kept[i]
