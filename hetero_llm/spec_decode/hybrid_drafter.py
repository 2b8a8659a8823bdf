"""The drafter of the lookahead cache and of a draft model: one merged tree for each sequence.

In every step it takes in the sequences' new tokens, looks up what may follow them, and adds the
drafts of the model. While the device works it learns: new tokens go into the local indexes, outputs
in chunks into the global cache. TACO-LLM's lookahead cache in behaviour and configuration: its Raw
cache is `ngram_index`, its Turbo cache `suffix_trie`.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from hetero_llm.config.lookahead_config import LookaheadConfig
from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.request import Request, Sequence
from hetero_llm.spec_decode.budget import StepCosts
from hetero_llm.spec_decode.lookahead.global_cache import GlobalCache
from hetero_llm.spec_decode.lookahead.indexes import (
    RAW,
    TURBO,
    LocalIndex,
    LocalNgramIndex,
    LocalSuffixTrie,
)
from hetero_llm.spec_decode.lookahead.ngram_index import SIGNATURE_TOKENS
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
)
from hetero_llm.spec_decode.proposal_step import ProposalStep
from hetero_llm.spec_decode.proposals import DraftModel, NoDraftModel
from hetero_llm.utils.topology import read_topology

_CHUNK = 64  # tokens of an output that enter the global cache together
_MAX_USELESS = 4  # proposals without a node that pays, after which the drafter pauses
_MIN_PAUSE, _MAX_PAUSE = 2, 8  # steps; twice as many after each further useless proposal
_MAX_PAUSE_WITH_MODEL = 16  # whose worker drafts for each proposal, whether it pays or not


# large: policy of one drafter: what a step may cost, when to pause, what to learn and to share.
class HybridDrafter:
    """See `core.drafter`: a `Drafter` that is `CostAware`, a `PromptObserver` and a
    `BackgroundDrafter`. One thread at a time.

    Args:
        config: with eos_token_id, voc_size and max_seq_len filled in.
        width: tokens of the longest sequence.
        capacity: tokens of the global cache; 0 for none.
        uses_cache: whether drafts come from the cache; else from the model alone.
        model: a draft model, whose drafts are merged with the cache's.
        most_sequences: larger steps get no drafts; None: no limit.
        clock: seconds since some moment.

    Attributes:
        acceptance: [buckets, 2] float32, accepted and tried nodes of each acceptance bucket: the
            trie's, then the n-gram index's. To be read only.
        costs: seconds of steps by their tokens.
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
        clock: Callable[[], float] = perf_counter,
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
        self._model: DraftModel | NoDraftModel = NoDraftModel() if model is None else model
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
        self.costs = StepCosts()
        self._clock = clock
        self._observed: list[tuple[int, float]] = []  # steps that `costs` do not know yet
        self._step_finished = 0.0  # when; 0 if a proposal has followed
        self._turn = 0.0  # moving average of the seconds from there to the end of the proposal
        # Rows of the last proposal and the verified nodes of each, until the model knows them.
        self._verified: tuple[NDArray[np.int64], NDArray[np.int32]] | None = None
        self._num_useless = 0  # proposals since the last one that paid
        self._paused_for = 0  # steps
        self._next_pause = _MIN_PAUSE
        self._max_pause = _MAX_PAUSE if model is None else _MAX_PAUSE_WITH_MODEL
        self._has_proposed = False  # since the last `run_deferred`
        self._compile()

    def _compile(self) -> None:
        """Calls everything that is compiled at its first use."""
        buffer = self.states.buffer
        span = buffer.open()
        buffer.extend(span, [0, 1, 0])
        new = SequenceRows(*np.array([[span.row], [1], [0], [0], [3]], np.int64))
        known = SequenceRows(*np.array([[span.row], [1], [0], [3], [3]], np.int64))
        for index in self._indexes:
            index.learn(buffer.tokens, new, 0)
            index.forget(buffer.tokens, known)
        buffer.close(span.row)
        self._propose([], [], 0)

    @property
    def global_cache(self) -> GlobalCache:
        return self._cache

    @property
    def idle(self) -> bool:
        return self._paused_for > 0

    def metrics(self) -> dict[str, float]:
        """Counters of the draft model's worker; nothing without one."""
        return self._model.metrics()

    def shut_down(self) -> None:
        """Ends the draft model's worker."""
        self._model.shut_down()

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
        new = self._follow(sequences, [0] * len(sequences))
        self._step.take_in(new, proposes=False)

    def propose(self, sequences: list[Sequence], limits: list[int], num_rows: int) -> DraftBatch:
        self._has_proposed = True
        if self._most_sequences is not None and len(sequences) > self._most_sequences:
            self._paused_for = self._max_pause
            nothing = np.zeros(0, np.int32)
            return DraftBatch(np.zeros(len(sequences), np.int32), nothing, nothing)
        begin = self._step_finished or self._clock()
        batch = self._propose(sequences, limits, num_rows)
        # The device has waited since the last step finished. A single long wait counts little.
        seconds = self._clock() - begin
        self._turn += 0.1 * (min(seconds, 2 * self._turn + 1e-4) - self._turn)
        self._step_finished = 0.0
        return batch

    def set_step_times(self, profile: list[tuple[int, float]]) -> None:
        self.costs.price(profile)

    def observe_step(self, num_rows: int, seconds: float) -> None:
        self._observed.append((num_rows, seconds))  # the device waits now
        self._step_finished = self._clock()

    def close(self, request: Request) -> None:
        self._ended += self.states.end_request(request)  # the device waits now

    def run_deferred(self) -> None:
        self._paused_for = max(self._paused_for - 1, 0)
        for num_rows, seconds in self._observed:
            self.costs.observe(num_rows, seconds)
        self._observed.clear()
        self._learn_and_forget()
        if not self._has_proposed and self._paused_for <= 1 and self._proposing_model is not None:
            self._commit_before_proposal()
        self._model.run_deferred()
        self._has_proposed = False
        # Nothing waits for this now, and all of it stays until the next proposal.
        self._step.set_step_times(self.costs)
        self._step.refresh_indexes()

    # -- proposing --------------------------------------------------------------------------

    def _propose(self, sequences: list[Sequence], limits: list[int], num_rows: int) -> DraftBatch:
        """Drafts of the nodes that make tokens come fastest, which may be none. After some
        proposals without any the drafter pauses, so that steps are launched ahead."""
        new = self._follow(sequences, limits)
        batch, pays = self._step.propose(
            new, self.costs, num_rows, self._turn, self._proposing_model
        )
        self._verified = (new.rows, batch.counts) if pays else None
        if pays:
            self._num_useless, self._next_pause = 0, _MIN_PAUSE
            return batch
        self._num_useless += 1
        if self._num_useless >= _MAX_USELESS:
            self._paused_for = self._next_pause
            self._next_pause = min(2 * self._next_pause, self._max_pause)
        return batch

    def _follow(self, sequences: list[Sequence], limits: list[int]) -> NewTokens:
        """The sequences' new tokens, which are sent to the worker: it drafts while the indexes are
        looked up."""
        new = self.states.follow(sequences, limits, self._index_from)
        self._with_new_tokens.append(new.rows)
        self._model.commit(new.rows, new.tokens, new.sizes, sequences)
        return new

    def _commit_before_proposal(self) -> None:
        """Sends the worker the new tokens of all sequences at the end of a pause, so that it has
        drafts by the next proposal."""
        sequences = [each for each in self.states.sequences if each.request.may_draft]
        most = self._most_sequences
        if sequences and (most is None or len(sequences) <= most):
            new = self._follow(sequences, [0] * len(sequences))
            self._step.take_in(new, proposes=False)

    # -- learning ---------------------------------------------------------------------------

    def _learn_and_forget(self) -> None:
        """Sends the worker the verified nodes, indexes new tokens, forgets ended sequences."""
        if self._verified is not None:
            rows, kept = self._verified
            self._model.add_external_nodes(rows, self._step.found, kept)
        self._verified = None
        ended = self._take_in_last_tokens() if self._ended else None
        if self._with_new_tokens:
            self._learn()
        if ended is not None:
            self._forget(ended)

    def _learn(self) -> None:
        """Enters new tokens into the local indexes, and outputs in chunks into the global cache."""
        rows = self._with_new_tokens[0]
        if len(self._with_new_tokens) > 1:
            rows = np.unique(np.concatenate(self._with_new_tokens))
        self._with_new_tokens.clear()
        self._tick += 1
        numbers = self.states.arrays.numbers
        numbers_of = numbers[rows]
        # With ignore_prompt INDEXED may lie behind END: an output's first tokens are left out.
        new = (numbers_of[:, END] > numbers_of[:, INDEXED]) & (numbers_of[:, CLOSED] == 0)
        if new.any():
            rows = rows[new]
            spans = self.states.spans(rows)
            for index in self._indexes:
                index.learn(self.states.buffer.tokens, spans, self._tick)
            numbers[rows, INDEXED] = spans.ends
            for row in rows[spans.ends - numbers[rows, SHARED] >= _CHUNK].tolist():
                self._share(row)

    def _take_in_last_tokens(self) -> NDArray[np.int64]:
        """Takes in the last tokens of ended sequences. Returns their rows, to be forgotten."""
        new = self.states.follow_last(self._ended)
        self._ended.clear()
        self._step.take_in(new, proposes=False)
        self.states.arrays.numbers[new.rows, CLOSED] = 1
        self._model.close(new.rows.tolist())
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
