"""Drafts of a model that runs on the target's own device: chains, drawn with the target's noise.

A proposal is a step over what the draft model has not seen yet, then one row of each sequence for
each further token, launched without waiting: the device knows the token last drawn. Position, seed,
sample index and temperature are the target's, so where both models agree they draw alike.

The draft model has KV blocks of its own. A rejected token's row is written over by the next one; a
chain's last token has never been a row, so after a chain accepted as a whole two are to catch up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetero_llm.config.engine_config import SchedulerConfig
from hetero_llm.core.draft_tree import DraftBatch, chain, join_trees
from hetero_llm.core.model_runner import ModelRunner
from hetero_llm.core.request import Request, Sequence
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import LAST_SAMPLED, AdmittedSequence, SchedulerOutput
from hetero_llm.kv_cache.block_manager import BlockManager
from hetero_llm.kv_cache.prefix_cache import PrefixCache
from hetero_llm.kv_cache.table_changes import TableChanges

_MOST_UNDER_WAY = 2
"""Steps without `finish` beside which another one may be launched; more the runners do not bear
(`gpu.fill_step.RING`)."""
_REST = 8  # steps without asking, after a proposal that could not have any draft


@dataclass(slots=True, eq=False)
class _Text:
    """What the draft model has of a sequence: rows of the first `computed` tokens, of which those
    from `known` on are `ahead`, drafted and not confirmed.

    Attributes:
        published: blocks that others may find.
    """

    sequence: Sequence
    slot: int
    known: int
    computed: int
    ahead: list[int]
    published: int = 0

    def catch_up(self) -> None:
        """Keeps as many of the rows as the sequence has come to confirm; that of its last token is
        always computed, for the draw after it."""
        tokens = self.sequence.token_ids
        for place, token in enumerate(self.ahead, self.known):
            if place >= len(tokens) or tokens[place] != token:
                break
            self.computed = place + 1
        self.ahead = []
        self.known = len(tokens)
        self.computed = min(self.computed, self.known - 1)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one sequence in a step: `count` from `start` on, then a chain of `depth` draws, 0
    while tokens are left; `index` is the sequence's place in the proposal."""

    text: _Text
    index: int
    start: int
    count: int
    depth: int


class ChainDrafter:
    """See `scheduler.draft_admission.Drafter` and `PromptObserver`.

    Args:
        runner: of the draft model; nobody else uses it.
        limits: of the draft model's steps and texts; slots and their number are the target's.
        num_blocks: of its KV cache. A sequence for which none are left gets no draft.
        num_tokens: of a chain.
        most_sequences: larger steps get no drafts; None: no limit.
    """

    def __init__(
        self,
        runner: ModelRunner[Any],
        limits: SchedulerConfig,
        num_blocks: int,
        *,
        num_tokens: int,
        most_sequences: int | None = None,
    ) -> None:
        assert limits.max_num_batched_tokens >= 2 * limits.max_num_seqs, "two rows to catch up"
        self._runner = runner
        self._limits = limits
        self._num_tokens = num_tokens
        self._most_sequences = most_sequences
        self._blocks = BlockManager(num_blocks, limits.block_size, PrefixCache())
        self._texts: dict[Sequence, _Text] = {}
        self._holders: dict[int, _Text] = {}  # by slot
        self._admitted: list[AdmittedSequence] = []
        self._under_way: deque[Any] = deque()
        self._unpublished: list[_Text] = []
        self._resting = 0

    @property
    def idle(self) -> bool:
        return self._resting > 0

    def prompts_started(self, sequences: list[Sequence]) -> None:
        """Runs the prompts as far as nobody has to wait for it; proposals run the rest."""
        texts = [self._text_of(sequence) for sequence in sequences if sequence.request_slot >= 0]
        if self._most_sequences is not None and len(self._texts) > self._most_sequences:
            return
        while len(self._under_way) < _MOST_UNDER_WAY:
            parts: list[_Part] = []
            budget = self._limits.max_num_batched_tokens
            for text in texts:
                if text is not None and budget:
                    part = self._part(text, -1, text.known - text.computed, budget, 0)
                    budget -= self._take(part, parts)
            if not parts:
                return
            self._launch(self._first_step(parts))

    def propose(self, sequences: list[Sequence], limits: list[int], num_rows: int) -> DraftBatch:
        if self._most_sequences is not None and len(sequences) > self._most_sequences:
            return self._nothing(len(sequences))
        texts = [self._text_of(sequence) for sequence in sequences]
        if not any(texts):
            return self._nothing(len(sequences))
        missing: list[tuple[int, int, _Text]] = []
        for index, text in enumerate(texts):
            if text is not None:
                text.catch_up()
                missing.append((text.known - text.computed, index, text))
        # Whoever has little to catch up goes first, so that prompts hold nobody up.
        missing.sort(key=lambda item: item[:2])
        parts: list[_Part] = []
        budget = self._limits.max_num_batched_tokens
        for count, index, text in missing:
            depth = min(self._num_tokens, limits[index], self._limits.max_model_len - text.known)
            if budget:
                budget -= self._take(self._part(text, index, count, budget, depth), parts)
        drafts = self._draft(parts)
        return join_trees(
            chain(np.array(drafts.get(index, ()), np.int32)) for index in range(len(sequences))
        )

    def close(self, request: Request) -> None:
        for sequence in request.sequences:
            text = self._texts.get(sequence)
            if text is not None:
                self._drop(text)

    def observe_step(self, num_rows: int, seconds: float) -> None:
        pass

    def run_deferred(self) -> None:
        self._resting = max(self._resting - 1, 0)
        size = self._limits.block_size
        for text in self._unpublished:
            full = min(text.known, text.computed) // size
            if full > text.published and self._holders.get(text.slot) is text:
                self._blocks.cache_blocks(text.slot, text.sequence.token_ids, full * size)
                text.published = full
        self._unpublished.clear()

    def reset_prefix_cache(self) -> None:
        """Forgets the prompts of earlier sequences."""
        self._blocks.reset_prefix_cache()

    # -- texts ------------------------------------------------------------------------------

    def _text_of(self, sequence: Sequence) -> _Text | None:
        """What is held of a running sequence; None if it is too long to be drafted for."""
        text = self._texts.get(sequence)
        too_long = len(sequence.token_ids) >= self._limits.max_model_len
        if text is not None:
            if text.slot == sequence.request_slot and not too_long:
                return text
            self._drop(text)
        if too_long:
            return None
        before = self._holders.get(sequence.request_slot)
        if before is not None:  # preempted meanwhile
            self._drop(before)
        slot, tokens = sequence.request_slot, sequence.token_ids
        computed = self._blocks.match_prefix(slot, tokens, sequence.request.root_hash)
        text = _Text(sequence, slot, len(tokens), computed, [], computed // self._limits.block_size)
        self._texts[sequence] = self._holders[slot] = text
        self._admitted.append(_slot_state(sequence))
        return text

    def _drop(self, text: _Text) -> None:
        self._blocks.free(text.slot)
        del self._texts[text.sequence], self._holders[text.slot]

    def _grow(self, text: _Text, length: int) -> bool:
        """Whether there are blocks for so many tokens; what preempted sequences held is free."""
        if self._blocks.allocate(text.slot, text.computed, length):
            return True
        gone = [t for t in self._texts.values() if t.sequence.request_slot != t.slot]
        for other in gone:
            self._drop(other)
        return bool(gone) and self._blocks.allocate(text.slot, text.computed, length)

    # -- steps ------------------------------------------------------------------------------

    @staticmethod
    def _part(text: _Text, index: int, missing: int, budget: int, depth: int) -> _Part:
        """As many of the missing rows as fit, and a chain if these are all."""
        count = min(missing, budget)
        return _Part(text, index, text.computed, count, depth if count == missing else 0)

    def _take(self, part: _Part, parts: list[_Part]) -> int:
        """Adds a part to a step if there are rows and blocks for it; returns its rows."""
        text, length = part.text, part.start + part.count + max(part.depth - 1, 0)
        if not part.count or not self._grow(text, length):
            return 0
        parts.append(part)
        text.computed = part.start + part.count
        if text.computed // self._limits.block_size > text.published:
            self._unpublished.append(text)
        return part.count

    def _draft(self, parts: list[_Part]) -> dict[int, list[int]]:
        """Runs the parts and their chains; the tokens of each chain by its place."""
        if not parts:
            return {}
        while self._under_way:  # prompts' chunks, which draw nothing
            self._finish()
        # The longest chains come first: those of each further step are the first ones.
        parts.sort(key=lambda part: -part.depth)
        depths = np.array([part.depth for part in parts])
        slots = np.array([part.text.slot for part in parts], np.int32)
        ends = np.array([part.start + part.count for part in parts], np.int32)
        drawn = self._launch(self._first_step(parts))
        if not depths[0]:
            return {}
        for done in range(1, int(depths[0])):
            going = int((depths > done).sum())
            drawn += self._launch(
                _step(
                    slots[:going],
                    ends[:going] + np.int32(done - 1),
                    np.ones(going, np.int32),
                    np.full(going, LAST_SAMPLED, np.int32),
                    np.ones(going, np.int32),
                )
            )
        while self._under_way:
            drawn.append(self._finish())
        drafts: dict[int, list[int]] = {}
        for place, part in enumerate(parts):
            if part.depth:
                tokens = [drawn[level][place] for level in range(part.depth)]
                drafts[part.index] = tokens
                part.text.ahead = tokens[:-1]
        return drafts

    def _first_step(self, parts: list[_Part]) -> SchedulerOutput:
        """The step of the parts' rows, with all that has changed for the runner."""
        tokens: list[int] = []
        for part in parts:
            tokens += part.text.sequence.token_ids[part.start : part.start + part.count]
        admitted = tuple(self._admitted)
        self._admitted.clear()
        return _step(
            np.array([part.text.slot for part in parts], np.int32),
            np.array([part.start for part in parts], np.int32),
            np.array([part.count for part in parts], np.int32),
            np.array(tokens, np.int32),
            np.array([part.depth > 0 for part in parts], np.int32),
            admitted,
            self._blocks.take_changes(),
        )

    def _launch(self, step: SchedulerOutput) -> list[list[int]]:
        """Launches a step; returns the tokens of the one that had to be finished for it, if any."""
        finished: list[list[int]] = []
        if len(self._under_way) > _MOST_UNDER_WAY:
            finished.append(self._finish())
        self._under_way.append(self._runner.launch(step))
        return finished

    def _finish(self) -> list[int]:
        """The tokens of the oldest step under way."""
        return self._runner.finish(self._under_way.popleft()).token_ids

    def _nothing(self, num_sequences: int) -> DraftBatch:
        """No drafts, and none for a while: steps are launched ahead meanwhile."""
        self._resting = _REST
        return join_trees([None] * num_sequences)


def _slot_state(sequence: Sequence) -> AdmittedSequence:
    """A sequence as the draft model samples it: what looks back is left to the target, so that
    users' processors are asked once."""
    request = sequence.request
    given = request.params
    params = SamplingParams(
        temperature=given.temperature, top_p=given.top_p, top_k=given.top_k, min_p=given.min_p
    )
    return AdmittedSequence(
        sequence.request_slot,
        sequence.token_ids,
        sequence.num_prompt_tokens,
        params,
        request.seed,
        sequence.index,
    )


def _step(
    slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    token_ids: np.ndarray,
    num_samples: np.ndarray,
    admitted: tuple[AdmittedSequence, ...] = (),
    changes: TableChanges | None = None,
) -> SchedulerOutput:
    changes = changes or TableChanges()
    return SchedulerOutput(
        request_slots=slots,
        num_computed_tokens=starts,
        num_scheduled_tokens=counts,
        token_ids=token_ids,
        num_samples=num_samples,
        prompt_logprob_spans=(),
        admitted=admitted,
        block_table_writes=changes.writes(),
        block_copies=np.array((changes.copy_from, changes.copy_to), np.int32),
    )
