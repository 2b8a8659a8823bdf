"""Proposes chains of a draft model that runs on the target's device.

A proposal is one step over the tokens that the draft model has not computed yet, then one step with
one token of each sequence for each further draft token. These are launched without waiting for the
result of the one before, since the device keeps the last sampled token. Position, seed, sample
index and temperature are the target's: the same noise is used, so where both models agree they
sample the same token.

The draft model has KV blocks of its own. KV of a rejected token is overwritten by the next one. The
last token of a chain has no KV yet, so after a fully accepted chain two tokens must be computed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetero_llm.config.engine_config import SchedulerConfig
from hetero_llm.core.draft_tree import DraftBatch, chain, join_trees
from hetero_llm.core.drafter import StepReport
from hetero_llm.core.model_runner import ModelRunner
from hetero_llm.core.request import Request, Sequence
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import LAST_SAMPLED, AdmittedSequence, SchedulerOutput
from hetero_llm.kv_cache.block_manager import BlockManager
from hetero_llm.kv_cache.prefix_cache import PrefixCache
from hetero_llm.kv_cache.table_changes import TableChanges

_MAX_IN_FLIGHT = 2
"""Maximum unfinished steps beside another launch; limited by the runner's input ring
(`gpu.fill_step.RING`)."""
_IDLE_STEPS = 8  # steps without a proposal after one that cannot have any draft


@dataclass(slots=True, eq=False)
class _DraftState:
    """What the draft model has computed of a sequence.

    Attributes:
        slot: its request slot.
        known: number of confirmed tokens when the draft model last saw the sequence.
        computed: number of first tokens that have KV; those from `known` on are `unconfirmed`.
        unconfirmed: drafted tokens with KV that are not known to be accepted.
        num_cached: number of blocks in the prefix cache.
    """

    sequence: Sequence
    slot: int
    known: int
    computed: int
    unconfirmed: list[int]
    num_cached: int = 0

    def catch_up(self) -> None:
        """Keep the KV of draft tokens that were accepted. The last token is always computed again,
        since its logits sample the first draft token."""
        tokens = self.sequence.token_ids
        for place, token in enumerate(self.unconfirmed, self.known):
            if place >= len(tokens) or tokens[place] != token:
                break
            self.computed = place + 1
        self.unconfirmed = []
        self.known = len(tokens)
        self.computed = min(self.computed, self.known - 1)


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens of one sequence in a step: `count` from position `start` on, then a chain of `depth`
    tokens, 0 while more tokens are missing. `index`: the sequence's index in the proposal."""

    state: _DraftState
    index: int
    start: int
    count: int
    depth: int


class ChainDrafter:
    """See `core.drafter.Drafter` and `core.drafter.PromptObserver`.

    Args:
        runner: the draft model's runner; not shared.
        limits: limits of the draft model's steps and sequences; request slots are the target's.
        num_blocks: KV blocks of the draft model. Sequences that find none free get no draft.
        num_tokens: length of a chain.
        most_sequences: steps with more sequences get no drafts; None: no limit.

    Attributes:
        runner, limits: see Args.
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
        self.runner = runner
        self.limits = limits
        self._num_tokens = num_tokens
        self._most_sequences = most_sequences
        self._blocks = BlockManager(num_blocks, limits.block_size, PrefixCache())
        self._states: dict[Sequence, _DraftState] = {}
        self._by_slot: dict[int, _DraftState] = {}  # by request slot
        self._admitted: list[AdmittedSequence] = []
        self._in_flight: deque[Any] = deque()
        self._uncached: list[_DraftState] = []
        self._idle_steps = 0

    @property
    def idle(self) -> bool:
        return self._idle_steps > 0

    @property
    def num_sequences(self) -> int:
        """Sequences that have state here."""
        return len(self._states)

    @property
    def num_blocks(self) -> int:
        """KV blocks of the draft model."""
        return self._blocks.num_blocks

    def check_integrity(self) -> None:
        """Assert that every block is free or owned, and all are free without sequences."""
        self._blocks.check_integrity()
        assert set(self._by_slot.values()) == set(self._states.values())
        assert self._states or self._blocks.num_free == self._blocks.num_blocks

    def prompts_started(self, sequences: list[Sequence]) -> None:
        """Launch prompt chunks that no proposal has to wait for; proposals compute the rest."""
        states = [self._state_of(sequence) for sequence in sequences if sequence.request_slot >= 0]
        if self._most_sequences is not None and len(self._states) > self._most_sequences:
            return
        while len(self._in_flight) < _MAX_IN_FLIGHT:
            parts: list[_Part] = []
            budget = self.limits.max_num_batched_tokens
            for state in states:
                if state is not None and budget:
                    part = self._part(state, -1, state.known - state.computed, budget, 0)
                    budget -= self._add_part(part, parts)
            if not parts:
                return
            self._launch(self._first_step(parts))

    def propose(self, sequences: list[Sequence], limits: list[int], num_rows: int) -> DraftBatch:
        if self._most_sequences is not None and len(sequences) > self._most_sequences:
            return self._nothing(len(sequences))
        states = [self._state_of(sequence) for sequence in sequences]
        if not any(states):
            return self._nothing(len(sequences))
        missing: list[tuple[int, int, _DraftState]] = []
        for index, state in enumerate(states):
            if state is not None:
                state.catch_up()
                missing.append((state.known - state.computed, index, state))
        # Sequences with few missing tokens first, so that long prompts do not delay them.
        missing.sort(key=lambda item: item[:2])
        parts: list[_Part] = []
        budget = self.limits.max_num_batched_tokens
        for count, index, state in missing:
            depth = min(self._num_tokens, limits[index], self.limits.max_model_len - state.known)
            if budget:
                budget -= self._add_part(self._part(state, index, count, budget, depth), parts)
        drafts = self._draft(parts)
        return join_trees(
            chain(np.array(drafts.get(index, ()), np.int32)) for index in range(len(sequences))
        )

    def close(self, request: Request) -> None:
        for sequence in request.sequences:
            state = self._states.get(sequence)
            if state is not None:
                self._drop(state)

    def observe_step(self, report: StepReport) -> None:
        pass

    def run_deferred(self) -> None:
        self._idle_steps = max(self._idle_steps - 1, 0)
        size = self.limits.block_size
        for state in self._uncached:
            full = min(state.known, state.computed) // size
            if full > state.num_cached and self._by_slot.get(state.slot) is state:
                self._blocks.cache_blocks(state.slot, state.sequence.token_ids, full * size)
                state.num_cached = full
        self._uncached.clear()

    def reset_prefix_cache(self) -> None:
        """Drop cached prompts of earlier sequences."""
        self._blocks.reset_prefix_cache()

    # -- sequences --------------------------------------------------------------------------

    def _state_of(self, sequence: Sequence) -> _DraftState | None:
        """State of a running sequence; None if it is too long for the draft model."""
        state = self._states.get(sequence)
        too_long = len(sequence.token_ids) >= self.limits.max_model_len
        if state is not None:
            if state.slot == sequence.request_slot and not too_long:
                return state
            self._drop(state)
        if too_long:
            return None
        before = self._by_slot.get(sequence.request_slot)
        if before is not None:  # of a preempted sequence
            self._drop(before)
        slot, tokens = sequence.request_slot, sequence.token_ids
        computed = self._blocks.match_prefix(slot, tokens, sequence.request.root_hash)
        state = _DraftState(
            sequence, slot, len(tokens), computed, [], computed // self.limits.block_size
        )
        self._states[sequence] = self._by_slot[slot] = state
        self._admitted.append(_slot_state(sequence))
        return state

    def _drop(self, state: _DraftState) -> None:
        self._blocks.free(state.slot)
        del self._states[state.sequence], self._by_slot[state.slot]

    def _allocate(self, state: _DraftState, length: int) -> bool:
        """Allocate blocks for `length` tokens, if need be those of preempted sequences. Returns
        whether there were enough."""
        if self._blocks.allocate(state.slot, state.computed, length):
            return True
        gone = [t for t in self._states.values() if t.sequence.request_slot != t.slot]
        for other in gone:
            self._drop(other)
        return bool(gone) and self._blocks.allocate(state.slot, state.computed, length)

    # -- steps ------------------------------------------------------------------------------

    @staticmethod
    def _part(state: _DraftState, index: int, missing: int, budget: int, depth: int) -> _Part:
        """As many missing tokens as fit into the budget, and a chain if these are all."""
        count = min(missing, budget)
        return _Part(state, index, state.computed, count, depth if count == missing else 0)

    def _add_part(self, part: _Part, parts: list[_Part]) -> int:
        """Add a part to a step if there are tokens and blocks for it. Returns its token count."""
        state, length = part.state, part.start + part.count + max(part.depth - 1, 0)
        if not part.count or not self._allocate(state, length):
            return 0
        parts.append(part)
        state.computed = part.start + part.count
        if state.computed // self.limits.block_size > state.num_cached:
            self._uncached.append(state)
        return part.count

    def _draft(self, parts: list[_Part]) -> dict[int, list[int]]:
        """Run the parts and their chains. Returns the tokens of each chain by `_Part.index`."""
        if not parts:
            return {}
        while self._in_flight:  # prompt chunks, which sample nothing
            self._finish()
        # Longest chains first: those that continue are always a prefix of the parts.
        parts.sort(key=lambda part: -part.depth)
        depths = np.array([part.depth for part in parts])
        slots = np.array([part.state.slot for part in parts], np.int32)
        ends = np.array([part.start + part.count for part in parts], np.int32)
        sampled = self._launch(self._first_step(parts))
        if not depths[0]:
            return {}
        for done in range(1, int(depths[0])):
            going = int((depths > done).sum())
            sampled += self._launch(
                _step(
                    slots[:going],
                    ends[:going] + np.int32(done - 1),
                    np.ones(going, np.int32),
                    np.full(going, LAST_SAMPLED, np.int32),
                    np.ones(going, np.int32),
                )
            )
        while self._in_flight:
            sampled.append(self._finish())
        drafts: dict[int, list[int]] = {}
        for place, part in enumerate(parts):
            if part.depth:
                tokens = [sampled[level][place] for level in range(part.depth)]
                drafts[part.index] = tokens
                part.state.unconfirmed = tokens[:-1]
        return drafts

    def _first_step(self, parts: list[_Part]) -> SchedulerOutput:
        """The step that computes the parts, with admissions and block table changes."""
        tokens: list[int] = []
        for part in parts:
            tokens += part.state.sequence.token_ids[part.start : part.start + part.count]
        admitted = tuple(self._admitted)
        self._admitted.clear()
        return _step(
            np.array([part.state.slot for part in parts], np.int32),
            np.array([part.start for part in parts], np.int32),
            np.array([part.count for part in parts], np.int32),
            np.array(tokens, np.int32),
            np.array([part.depth > 0 for part in parts], np.int32),
            admitted,
            self._blocks.take_changes(),
        )

    def _launch(self, step: SchedulerOutput) -> list[list[int]]:
        """Launch a step. Returns the tokens of the step that had to be finished before, if any."""
        finished: list[list[int]] = []
        if len(self._in_flight) > _MAX_IN_FLIGHT:
            finished.append(self._finish())
        self._in_flight.append(self.runner.launch(step))
        return finished

    def _finish(self) -> list[int]:
        """Wait for the oldest launched step; returns its tokens."""
        return self.runner.finish(self._in_flight.popleft()).token_ids

    def _nothing(self, num_sequences: int) -> DraftBatch:
        """No drafts, and none for the next steps, so that the engine can launch ahead."""
        self._idle_steps = _IDLE_STEPS
        return join_trees([None] * num_sequences)


def _slot_state(sequence: Sequence) -> AdmittedSequence:
    """A sequence as the draft model samples it: without penalties and logits processors, which
    depend on earlier tokens; the target applies them."""
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
