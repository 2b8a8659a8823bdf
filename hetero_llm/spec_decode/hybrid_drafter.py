"""Drafts as the scheduler sees them: out of what was said before, and of a draft model's worker.

Every step it copies what sequences have got, looks up what may follow, and hands the drafts over.
While the device works it learns: new tokens go into the sequences' own indexes, outputs in chunks
into the history. TACO-LLM's lookahead cache in behaviour and configuration; the structures are in
raw.py and trie.py.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from hetero_llm.config.lookahead_config import LookaheadConfig
from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.request import Request, Sequence
from hetero_llm.spec_decode.budget import StepCosts
from hetero_llm.spec_decode.draft_model.proposer import DraftModelProposer
from hetero_llm.spec_decode.lookahead.global_cache import History
from hetero_llm.spec_decode.lookahead.indexes import RAW, TURBO, RawSource, Rows, TurboSource
from hetero_llm.spec_decode.lookahead.ngram_index import SIGNATURE_TOKENS
from hetero_llm.spec_decode.lookahead.sequence_state import (
    CLOSED,
    END,
    FOREIGN,
    HEAD,
    INDEXED,
    SPACE,
    TOLD,
    Fresh,
    Live,
)
from hetero_llm.spec_decode.proposal_step import Desk
from hetero_llm.utils.topology import read_topology

_PART = 16  # sequences for which a further thread pays
_CHUNK = 64  # tokens of an output that go into the history together
_PATIENCE = 4  # proposals in vain before nobody is asked for a while
_REST, _LONGEST_REST = 2, 8  # steps of it; twice as many after each further proposal in vain
_LONGEST_WITH_MODEL = 16  # whose worker drafts for each proposal, whether it pays or not


class LookaheadDrafter:
    """See `scheduler.draft_admission.Drafter`. One thread at a time.

    Args:
        config: with eos_token_id, voc_size and max_seq_len filled in.
        width: tokens of the longest sequence.
        capacity: tokens of the history; 0 for none.
        uses_cache: whether drafts come out of the cache; else of the model alone.
        model: a draft model's drafts, to be merged with the cache's.
        most_sequences: larger steps get no drafts.
        clock: seconds since some moment.
    """

    def __init__(
        self,
        config: LookaheadConfig,
        *,
        width: int,
        capacity: int,
        uses_cache: bool = True,
        model: DraftModelProposer | None = None,
        most_sequences: int | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        assert config.max_seq_len is not None and config.eos_token_id is not None
        self._live = Live(width)
        self._learn_from = SIGNATURE_TOKENS - 1 if config.ignore_prompt else None
        self._unlearned: list[NDArray[np.int64]] = []  # rows with new tokens
        self._ended: list[Sequence] = []  # whose last tokens have not been looked at
        uses_raw = uses_cache and config.cache_mode != TURBO
        uses_trie = uses_cache and config.cache_mode != RAW
        self._history = History(config, capacity, uses_raw=uses_raw, uses_trie=uses_trie)
        first = TurboSource.NUM_KINDS
        self._record = np.zeros((first + RawSource.NUM_KINDS, 2), np.float32)
        self._turbo = TurboSource(config, self._record[:first]) if uses_trie else None
        self._raw = RawSource(config, self._record[first:]) if uses_raw else None
        self._sources = [s for s in (self._turbo, self._raw) if s is not None]
        self._model = model
        self._most_sequences = most_sequences
        # A chunk repeats of the one before what any of its contexts reaches back to.
        self._overlap = max(
            config.turbo_match_length + config.copy_length - 1,
            config.match_length + SIGNATURE_TOKENS - 1,
        )
        self._desk = Desk(config, self._record, uses_cache=uses_cache)
        self._tick = 0
        self._costs = StepCosts()
        self._clock = clock
        self._observed: list[tuple[int, float]] = []  # steps that the costs do not know yet
        self._finished = 0.0  # when the last step was; 0 if a proposal has followed
        self._turn = 0.0  # seconds from there to the next proposal, lately
        # Rows of the last proposal and how much of their drafts is verified, until it is told.
        self._verified: tuple[NDArray[np.int64], NDArray[np.int32]] | None = None
        self._in_vain = 0  # proposals since the last one that paid
        self._resting = 0  # steps until the next one
        self._next_rest = _REST
        self._longest_rest = _LONGEST_REST if model is None else _LONGEST_WITH_MODEL
        self._asked = False  # since the last `settle`
        self._threads = min(config.num_threads, read_topology().usable_cores)
        self._pool = ThreadPoolExecutor(max(self._threads - 1, 1), "hetero-lookahead")
        self._compile()

    def _compile(self) -> None:
        """Goes once through everything that is compiled at its first use."""
        live = self._live
        text = live.texts.open(0)
        live.texts.extend(text, [0, 1, 0])
        new = Rows(*np.array([[1], [0], [0], [0], [3], [text.row]], np.int64))
        known = Rows(*np.array([[1], [0], [0], [3], [3], [text.row]], np.int64))
        for source in self._sources:
            source.learn(live.texts.tokens, new, 0)
            source.forget(live.texts.tokens, known)
        live.texts.close(text)
        self._propose([], [], 0)

    @property
    def history(self) -> History:
        """The global cache."""
        return self._history

    @property
    def idle(self) -> bool:
        return self._resting > 0

    def metrics(self) -> dict[str, float]:
        """Counters of the draft model's worker; nothing without one."""
        return {} if self._model is None else self._model.metrics()

    def shut_down(self) -> None:
        """Ends what runs beside this process."""
        if self._model is not None:
            self._model.shut_down()

    @property
    def num_foreign(self) -> int:
        """Sequences left alone for a token beyond voc_size."""
        return self._live.num_foreign

    @property
    def num_bytes(self) -> int:
        """Memory of texts, indexes and history."""
        local = sum(source.num_bytes for source in self._sources)
        return self._live.texts.num_bytes + local + self._history.num_bytes

    def prompts_started(self, sequences: list[Sequence]) -> None:
        if self._ended:  # their rows are free then: the worker has slots for so many only
            self._tidy()
        fresh = self._follow(sequences, [0] * len(sequences))
        self._desk.catch_up(self._live, fresh, proposes=False)

    def propose(self, sequences: list[Sequence], limits: list[int], num_rows: int) -> DraftBatch:
        self._asked = True
        if self._most_sequences is not None and len(sequences) > self._most_sequences:
            self._resting = self._longest_rest
            nothing = np.zeros(0, np.int32)
            return DraftBatch(np.zeros(len(sequences), np.int32), nothing, nothing)
        begin = self._finished or self._clock()
        batch = self._propose(sequences, limits, num_rows)
        # The device has waited since the last step; nobody knows how long if there was none.
        seconds = self._clock() - begin
        self._turn += 0.1 * (min(seconds, 2 * self._turn + 1e-4) - self._turn)
        self._finished = 0.0
        return batch

    def set_step_times(self, profile: list[tuple[int, float]]) -> None:
        """See `scheduler.draft_admission.Priced`."""
        self._costs.price(profile)

    def observe_step(self, num_rows: int, seconds: float) -> None:
        self._observed.append((num_rows, seconds))  # the device waits now
        self._finished = self._clock()

    def close(self, request: Request) -> None:
        self._ended += self._live.close(request)  # the device waits now

    def run_deferred(self) -> None:
        self._resting = max(self._resting - 1, 0)
        for num_rows, seconds in self._observed:
            self._costs.observe(num_rows, seconds)
        self._observed.clear()
        self._tidy()
        if self._model is not None:
            # Who is asked soon is told now, so that it has drafts by then.
            if not self._asked and self._resting <= 1:
                self._keep_up()
            self._model.run_deferred()
        self._asked = False
        # Nobody waits now, and for the next proposal these will be as they are.
        self._desk.price(self._costs)
        self._desk.bind(self._turbo, self._raw, self._history)

    # -- proposing --------------------------------------------------------------------------

    def _propose(self, sequences: list[Sequence], limits: list[int], num_rows: int) -> DraftBatch:
        """Drafts of the nodes that make tokens come fastest, which may be none. After a while
        without any, nobody is asked for some steps: these are launched ahead."""
        desk, model = self._desk, self._model
        fresh = self._follow(sequences, limits)
        desk.catch_up(self._live, fresh, proposes=True)
        self._look_up(fresh.num_rows)
        if model is not None:
            (seconds,) = self._costs.of(num_rows)
            model.propose(fresh.rows, desk.most, seconds, desk.found)
            desk.merge(model.drafts)
        batch, pays = desk.choose(self._costs, num_rows, self._turn)
        self._verified = (fresh.rows, batch.counts) if pays else None
        if pays:
            self._in_vain, self._next_rest = 0, _REST
            return batch
        self._in_vain += 1
        if self._in_vain >= _PATIENCE:
            self._resting = self._next_rest
            self._next_rest = min(2 * self._next_rest, self._longest_rest)
        return batch

    def _follow(self, sequences: list[Sequence], limits: list[int]) -> Fresh:
        """What sequences have got, for whoever wants to know."""
        fresh = self._live.follow(sequences, limits, self._learn_from)
        self._unlearned.append(fresh.rows)
        if self._model is not None:  # the worker drafts while the cache is looked up
            self._model.commit(fresh.rows, fresh.tokens, fresh.sizes, sequences)
        return fresh

    def _keep_up(self) -> None:
        """As `_propose` for sequences that nobody has asked about, without drafts."""
        sequences = [each for each in self._live.sequences if each.request.may_draft]
        most = self._most_sequences
        if sequences and (most is None or len(sequences) <= most):
            fresh = self._follow(sequences, [0] * len(sequences))
            self._desk.catch_up(self._live, fresh, proposes=False)

    def _look_up(self, count: int) -> None:
        """The caches' drafts for so many sequences; large batches are shared by threads."""
        desk = self._desk
        if self._history.changed:
            desk.bind(self._turbo, self._raw, self._history)
        parts = min(self._threads, -(-count // _PART))
        if parts <= 1:
            desk.look_up(0, count)
            return
        edges = [count * part // parts for part in range(parts + 1)]
        calls = [
            self._pool.submit(desk.look_up, first, last)
            for first, last in zip(edges[1:], edges[2:], strict=False)
        ]
        desk.look_up(0, edges[1])
        for call in calls:
            call.result()

    # -- learning ---------------------------------------------------------------------------

    def _tidy(self) -> None:
        """What waits for the device to work: the worker is told what is verified, new tokens are
        learned, ended sequences forgotten."""
        if self._model is not None and self._verified is not None:
            rows, kept = self._verified
            self._model.add_external_nodes(rows, self._desk.found, kept)
        self._verified = None
        ended = self._end() if self._ended else None
        if self._unlearned:
            self._learn()
        if ended is not None:
            self._forget(ended)

    def _learn(self) -> None:
        """Enters new tokens into the local indexes, and outputs in chunks into the history."""
        rows = self._unlearned[0]
        if len(self._unlearned) > 1:
            rows = np.unique(np.concatenate(self._unlearned))
        self._unlearned.clear()
        self._tick += 1
        numbers = self._live.arrays.numbers
        numbers_of = numbers[rows]
        # With ignore_prompt the first tokens of an output are not to be learned.
        new = (numbers_of[:, END] > numbers_of[:, INDEXED]) & (numbers_of[:, CLOSED] == 0)
        if new.any():
            rows = rows[new]
            where = Rows(*self._live.where(rows))
            for source in self._sources:
                source.learn(self._live.texts.tokens, where, self._tick)
            numbers[rows, INDEXED] = where.ends
            for row in rows[where.ends - numbers[rows, TOLD] >= _CHUNK].tolist():
                self._tell(row)

    def _end(self) -> NDArray[np.int64]:
        """Takes in the last tokens of ended sequences. Returns their rows, to be forgotten."""
        fresh = self._live.last(self._ended)
        self._ended.clear()
        self._desk.catch_up(self._live, fresh, proposes=False)
        self._live.arrays.numbers[fresh.rows, CLOSED] = 1
        if self._model is not None:
            self._model.close(fresh.rows.tolist())
        return fresh.rows

    def _forget(self, rows: NDArray[np.int64]) -> None:
        """Ended sequences go into the history and out of everything else."""
        self._tick += 1
        numbers, closed = self._live.arrays.numbers, rows.tolist()
        for row in closed:
            if not numbers[row, FOREIGN]:
                self._tell(row)
        numbers[rows, INDEXED] = np.minimum(numbers[rows, INDEXED], numbers[rows, END])
        for source in self._sources:
            source.forget(self._live.texts.tokens, Rows(*self._live.where(rows)))
        for row in closed:
            self._live.forget(row)

    def _tell(self, row: int) -> None:
        """Gives the history what it has not got of an output, with some context before it."""
        numbers = self._live.arrays.numbers[row]
        head, told, end = numbers[[HEAD, TOLD, END]].tolist()
        if end - told < 2:
            return
        begin = max(head, told - self._overlap)
        tokens = self._live.texts.tokens[begin:end]
        known = told - begin if told > head else 0
        self._history.add(tokens, known, int(numbers[SPACE]), self._tick)
        numbers[TOLD] = end
