"""The drafter of the lookahead cache and of a draft model: one merged tree for each sequence.

In every step it takes in the sequences' new tokens, looks up what may follow them, and adds the
drafts of the model. While the device works it learns: new tokens go into the local indexes, outputs
in chunks into the global cache. TACO-LLM's lookahead cache in behaviour and configuration: its Raw
cache is `ngram_index`, its Turbo cache `suffix_trie`.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from hetero_llm.config.lookahead_config import LookaheadConfig
from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.drafter import FIRST_END_ID, SteadyStep, StepReport
from hetero_llm.core.request import Request, Sequence
from hetero_llm.core.step_times import StepTimes
from hetero_llm.spec_decode.lookahead.global_cache import GlobalCache
from hetero_llm.spec_decode.lookahead.indexes import (
    RAW,
    TURBO,
    LocalIndex,
    LocalNgramIndex,
    LocalSuffixTrie,
)
from hetero_llm.spec_decode.lookahead.ngram_index import SIGNATURE_TOKENS
from hetero_llm.spec_decode.lookahead.recurrence import LAST_TOKENS, recurs
from hetero_llm.spec_decode.lookahead.sequence_state import (
    CLOSED,
    END,
    INDEXED,
    NAMESPACE,
    OUT_OF_VOCAB,
    SHARED,
    SHARED_START,
    NewTokens,
    SequenceRows,
    SequenceStates,
    namespace_salt,
)
from hetero_llm.spec_decode.proposal_account import ProposalAccount, ProposalTerms
from hetero_llm.spec_decode.proposal_step import ProposalStep
from hetero_llm.spec_decode.proposals import DraftModel, NoDraftModel
from hetero_llm.utils.topology import read_topology

_CHUNK = 64  # tokens of an output that enter the global cache together
_MOST_CHECKED = 8  # sequences whose texts are checked for what recurs
_TABLE_AGE = 8  # times that a table of step times is used


# large: policy of one drafter: what a step may cost, when to pause, what to learn and to share.
class HybridDrafter:
    """See `core.drafter`: a `Drafter` that is an `ArrayDrafter`, `CostAware`, a `PromptObserver`,
    a `SleepingDrafter` and a `BackgroundDrafter`. One thread at a time.

    Args:
        config: with eos_token_id, voc_size and max_seq_len filled in.
        width: tokens of the longest sequence.
        capacity: tokens of the global cache; 0 for none.
        uses_cache: whether drafts come from the cache; else from the model alone.
        model: a draft model, whose drafts are merged with the cache's.
        most_sequences: larger steps get no drafts; None: no limit.

    Attributes:
        acceptance: [buckets, 2] float32, accepted and tried nodes of each acceptance bucket: the
            trie's, then the n-gram index's. To be read only.
        account: what proposals cost and gain.
        model: see Args; without one a null object.
        num_to_sleep: see `core.drafter.SleepingDrafter`.
        states: of the running sequences. To be read only.
    """

    def __init__(
        self,
        config: LookaheadConfig,
        *,
        width: int,
        capacity: int,
        uses_cache: bool = True,
        model: DraftModel | None = None,
        most_sequences: int | None = None,
    ) -> None:
        assert config.max_seq_len is not None and config.eos_token_id is not None
        self.states = SequenceStates(width)
        self._index_from = SIGNATURE_TOKENS - 1 if config.ignore_prompt else None
        self._with_new_tokens: list[NDArray[np.int64]] = []  # rows whose tokens are to be indexed
        self._ended: list[Sequence] = []  # whose last tokens have not been taken in
        uses_ngrams = uses_cache and config.cache_mode != TURBO
        uses_trie = uses_cache and config.cache_mode != RAW
        self._cache = GlobalCache(config, capacity, uses_ngrams=uses_ngrams, uses_trie=uses_trie)
        trie_buckets = LocalSuffixTrie.NUM_BUCKETS
        self.acceptance = np.zeros((trie_buckets + LocalNgramIndex.NUM_BUCKETS, 2), np.float32)
        self._indexes: list[LocalIndex] = []
        if uses_trie:
            self._indexes.append(LocalSuffixTrie(config, self.acceptance[:trie_buckets]))
        if uses_ngrams:
            self._indexes.append(LocalNgramIndex(config, self.acceptance[trie_buckets:]))
        self._proposing_model = model
        self.model: DraftModel | NoDraftModel = NoDraftModel() if model is None else model
        self._most_sequences = most_sequences
        # A chunk repeats as many tokens of the one before as any context or phrase reaches back.
        self._overlap = max(
            config.turbo_match_length + config.copy_length - 1,
            config.match_length + SIGNATURE_TOKENS - 1,
        )
        num_threads = min(config.num_threads, read_topology().usable_cores)
        self._step = ProposalStep(
            config, self.states, self._indexes, self._cache, self.acceptance,
            num_threads=num_threads,
        )  # fmt: skip
        self._tick = 0
        self.account = ProposalAccount()
        self.num_to_sleep = 0
        self._next_terms = self.account.terms(0, 0)  # of the proposal that `rows_of` announced
        # Rows of the last proposal and the verified nodes of each, until the model knows them.
        self._verified: tuple[NDArray[np.int64], NDArray[np.int32]] | None = None
        self._has_proposed = False  # since the last `run_deferred`
        self._tabled, self._table_age = self.step_times, _TABLE_AGE  # known to the budget
        self._compile()

    def _compile(self) -> None:
        """Calls everything that is compiled at its first use."""
        buffer = self.states.buffer
        span = buffer.open()
        buffer.extend(span, [0, 1, 0])
        known = SequenceRows(*np.array([[span.row], [1], [0], [3], [3]], np.int64))
        for index in self._indexes:
            index.forget(buffer.tokens, known)
        buffer.close(span.row)
        self._propose([], self.states.follow([], [], None), 0)
        none = np.zeros(0, np.int64)
        self._step.learn(none, _CHUNK, 0)
        no_tokens = self.states.follow([], [], None)
        self._step.rehearse(no_tokens, _CHUNK, 1, self.account.idle_of(1), 0)
        recurs(np.zeros(8, np.int32), 1, [part.grams for part in self._cache.generations], 1 << 60)
        self.propose_next([], none.reshape(0, FIRST_END_ID), none, none, 1)
        self.account = ProposalAccount()

    @property
    def global_cache(self) -> GlobalCache:
        return self._cache

    @property
    def idle(self) -> bool:
        return self.account.paused

    @property
    def step_times(self) -> StepTimes:
        """Predicts verify steps by their tokens."""
        return self.account.step_times

    def metrics(self) -> dict[str, float]:
        """Counters of the draft model's worker; nothing without one."""
        return self.model.metrics()

    def shut_down(self) -> None:
        """Ends the draft model's worker."""
        self.model.shut_down()

    @property
    def num_out_of_vocab(self) -> int:
        """Sequences that got no drafts for a token beyond voc_size."""
        return self.states.num_out_of_vocab

    @property
    def num_bytes(self) -> int:
        """Memory of tokens, indexes and global cache."""
        local = sum(index.num_bytes for index in self._indexes)
        return self.states.buffer.num_bytes + local + self._cache.num_bytes

    def prompts_started(self, sequences: list[Sequence]) -> None:
        if self._ended:  # the worker has no more slots than there are running sequences
            self._learn_and_forget()
        self._follow(sequences)
        for _ in sequences:
            self.account.begin_text(self.states.num_followed)

    def propose(self, sequences: list[Sequence], limits: list[int], num_rows: int) -> DraftBatch:
        if not self._may_propose(len(sequences)):
            nothing = np.zeros(0, np.int32)
            return DraftBatch(np.zeros(len(sequences), np.int32), nothing, nothing)
        new = self.states.follow(sequences, limits, self._index_from)
        return self._propose(sequences, new, num_rows)

    def rows_of(self, sequences: list[Sequence]) -> NDArray[np.int64] | None:
        most = self._most_sequences
        if most is not None and len(sequences) > most:
            return None
        rows = self.states.rows_of(sequences)
        if rows is not None:
            self._step.prepare(len(rows))
            self._next_terms = self.account.terms(len(rows), len(rows))
        return rows

    def propose_next(
        self,
        sequences: list[Sequence],
        numbers: NDArray[np.int64],
        token_ids: NDArray[np.int64],
        sizes: NDArray[np.int64],
        most_nodes: int,
    ) -> SteadyStep | None:
        taken_in = self._step.take_in_next(numbers, token_ids, sizes, most_nodes)
        if taken_in is None:
            return None
        rows, going_on = taken_in.rows, taken_in.going_on
        if self._proposing_model is not None:
            if going_on is not None:
                token_ids = token_ids[np.repeat(np.isin(np.arange(len(sizes)), going_on), sizes)]
                sizes = sizes[going_on]
                sequences = [sequences[index] for index in going_on.tolist()]
            self.model.commit(rows, token_ids, sizes, sequences)
        terms = self._next_terms
        if len(rows) != terms.num_rows:
            terms = self.account.terms(len(rows), len(rows))
        drafts = self._draft(rows, terms)
        return SteadyStep(
            going_on, taken_in.num_computed_tokens, taken_in.token_ids, drafts,
            self._step.has_blocks,
        )  # fmt: skip

    def set_step_times(self, profile: list[tuple[int, float]], launches_ahead: bool = True) -> None:
        self.account.set_step_times(profile, launches_ahead)
        self.account.rehearses = self._proposing_model is None

    def observe_step(self, report: StepReport) -> None:
        self.account.observe_step(report)

    def close(self, request: Request) -> None:
        self._ended += self.states.end_request(request)  # the device waits now

    def run_deferred(self) -> None:
        account = self.account
        account.run_deferred()
        if account.paused and not self._has_work:
            self.num_to_sleep = account.num_to_sleep
            return
        self._learn_and_forget()
        if account.ends_pause and not self._has_proposed and self.states.num_followed:
            self._end_pause()
        self.model.run_deferred()
        self._has_proposed = False
        if account.ends_pause:  # nothing waits now, and it stays until the next proposal
            self._enter_step_times()
            self._step.refresh_indexes()
        if account.paused and not self._has_work:
            self.num_to_sleep = account.num_to_sleep

    def wake(self, num_steps: int) -> None:
        self.num_to_sleep = 0
        self.account.wake(num_steps)

    @property
    def _has_work(self) -> bool:
        """Whether a step within a pause has to be followed by deferred work."""
        if self._proposing_model is not None:  # its worker is watched, whatever happens
            return True
        return bool(self._ended or self._with_new_tokens or self._verified)

    # -- proposing --------------------------------------------------------------------------

    def _may_propose(self, num_sequences: int) -> bool:
        """Whether steps with `num_sequences` sequences get drafts; else the drafter pauses."""
        if self._most_sequences is None or num_sequences <= self._most_sequences:
            return True
        self._has_proposed = True
        self.account.pause()
        return False

    def _propose(self, sequences: list[Sequence], new: NewTokens, num_rows: int) -> DraftBatch:
        """Takes in new tokens and drafts."""
        self.model.commit(new.rows, new.tokens, new.sizes, sequences)
        self._step.take_in(new, proposes=True)
        # Before a proposal through `propose_next`, deferred work has done this.
        self._enter_step_times()
        return self._draft(new.rows, self.account.terms(len(new.rows), num_rows))

    def _draft(self, rows: NDArray[np.int64], terms: ProposalTerms) -> DraftBatch:
        """Drafts for the sequences of these rows, whose tokens are taken in: of the nodes that make
        tokens come fastest, which may be none. Where proposals have not paid lately the drafter
        pauses, so that steps are launched ahead."""
        self._has_proposed = True
        self._with_new_tokens.append(rows)
        batch, gain = self._step.propose(rows, terms, self._proposing_model)
        self._verified = (rows, batch.counts) if len(batch.token_ids) else None
        self.account.note_gain(gain, terms.num_rows, terms.idle)
        return batch

    def _enter_step_times(self) -> None:
        """Lets the budget know what steps take: they change slowly, and a table of them is made
        anew in 5 us, or in 50 with the cold caches behind a step."""
        self._table_age += 1
        times = self.step_times
        if self._tabled is not times or self._table_age >= _TABLE_AGE:
            self._step.set_step_times(times)
            self._tabled, self._table_age = times, 0

    def _follow(self, sequences: list[Sequence]) -> None:
        """Takes in the sequences' new tokens without a proposal."""
        new = self.states.follow(sequences, [0] * len(sequences), self._index_from)
        self._with_new_tokens.append(new.rows)
        self.model.commit(new.rows, new.tokens, new.sizes, sequences)
        self._step.take_in(new, proposes=False)

    def _end_pause(self) -> None:
        """Takes in what sequences have got in a pause. A draft model is sent it, so that it has
        drafts by the next proposal; without one, and where the engine waits for a proposal anyway,
        the pause continues if drafts from the indexes would not have paid."""
        sequences = [each for each in self.states.sequences if each.request.may_draft]
        most = self._most_sequences
        if not sequences or (most is not None and len(sequences) > most):
            return
        if self._proposing_model is not None:
            self._follow(sequences)
            return
        if self.account.launches_ahead:
            return  # a batch of 32 on an H200 gained 1.15 with rehearsals and debts, 1.22 without
        begun, account = perf_counter(), self.account
        begins_text, account.begins_text = account.begins_text, False
        if all(len(each.token_ids) == each.num_prompt_tokens for each in sequences):
            return
        if not self._any_recurs(sequences):
            account.note_nothing_recurs(perf_counter() - begun)
            return
        if begins_text:
            account.note_text_recurs()
            return
        limits = [0] * len(sequences)
        new = self.states.follow(sequences, limits, self._index_from)
        if not len(new.tokens):
            return
        self._enter_step_times()
        self._tick += 1
        count = len(sequences)
        idle = self.account.idle_of(count)
        saved, due = self._step.rehearse(new, _CHUNK, count, idle, self._tick)
        for row in due.tolist():
            self._share(row)
        if saved is not None:
            self.account.note_rehearsal(saved, count, perf_counter() - begun)

    def _any_recurs(self, sequences: list[Sequence]) -> bool:
        """Whether the text of one of the sequences, of some if they are many, has come to tokens
        that it or a cached text held before."""
        filters = [generation.grams for generation in self._cache.generations]
        for sequence in sequences[-_MOST_CHECKED:]:
            tokens = np.array(sequence.token_ids[-LAST_TOKENS:], np.int32)
            num_output = len(sequence.token_ids) - sequence.num_prompt_tokens
            if recurs(tokens, num_output, filters, namespace_salt(sequence.request.root_hash)):
                return True
        return False

    # -- learning ---------------------------------------------------------------------------

    def _learn_and_forget(self) -> None:
        """Sends the worker the verified nodes, indexes new tokens, forgets ended sequences."""
        if self._verified is not None:
            rows, kept = self._verified
            self.model.add_external_nodes(rows, self._step.found, kept)
        self._verified = None
        ended = self._take_in_last_tokens() if self._ended else None
        if self._with_new_tokens:
            self._learn()
        if ended is not None:
            self._forget(ended)

    def _learn(self) -> None:
        """Enters new tokens into the local indexes, and outputs in chunks into the global cache."""
        self._tick += 1
        for rows in self._with_new_tokens:
            for row in self._step.learn(rows, _CHUNK, self._tick).tolist():
                self._share(row)
        self._with_new_tokens.clear()

    def _take_in_last_tokens(self) -> NDArray[np.int64]:
        """Takes in the last tokens of ended sequences. Returns their rows, to be forgotten."""
        new = self.states.follow_last(self._ended)
        self._ended.clear()
        self._step.take_in(new, proposes=False)
        self.states.arrays.numbers[new.rows, CLOSED] = 1
        self.model.close(new.rows.tolist())
        return new.rows

    def _forget(self, rows: NDArray[np.int64]) -> None:
        """Moves ended sequences from the local indexes to the global cache and frees their rows."""
        self._tick += 1
        numbers, closed = self.states.arrays.numbers, rows.tolist()
        for row in closed:
            if not numbers[row, OUT_OF_VOCAB]:
                self._share(row)
        numbers[rows, INDEXED] = np.minimum(numbers[rows, INDEXED], numbers[rows, END])
        spans = self.states.spans(rows)
        for index in self._indexes:
            index.forget(self.states.buffer.tokens, spans)
        for row in closed:
            self.states.close(row)

    def _share(self, row: int) -> None:
        """Adds what is new of an output to the global cache, with some context before it."""
        numbers = self.states.arrays.numbers[row]
        shared_start, shared, end = numbers[[SHARED_START, SHARED, END]].tolist()
        if end - shared < 2:
            return
        begin = max(shared_start, shared - self._overlap)
        tokens = self.states.buffer.tokens[begin:end]
        num_known = shared - begin if shared > shared_start else 0
        self._cache.add(tokens, num_known, int(numbers[NAMESPACE]), self._tick)
        numbers[SHARED] = end

    # -- tests ------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Asserts that sequences, rows and indexes agree; to be called after `run_deferred`."""
        assert not self._with_new_tokens and not self._ended
        self.states.check_integrity()
        if not self.states.sequences:
            assert all(index.num_entries == 0 for index in self._indexes)
