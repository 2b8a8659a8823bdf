"""Token masks of request slots whose output follows a grammar.

`TokenMasks` owns the state of each slot's grammar. A step is served in three calls:

1. `plan` gives a place to the mask of every sample: of the last token of a sequence, or of every
   token of its draft tree. It needs no state, so a device may be launched before the masks exist.
2. `fill` writes the masks, once the tokens up to each sequence's last known one are observed.
3. `observe_sampled` takes in what the step has sampled.

The state of the grammar belongs to each node of a tree: a node has a copy of its parent's state
that has taken in the node's token. A node that the grammar refuses has a mask that allows nothing:
its parent's mask does not allow its token, so it is never accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_llm.core.grammar import Grammar, GrammarMatcher, OpenMatcher
from hetero_llm.core.step import AdmittedSequence, SchedulerOutput

NO_MASK = -1
"""Place of a sample that may take any token."""


@dataclass(slots=True, eq=False)
class GuidedSlot:
    """The grammar of a sequence in a request slot.

    Attributes:
        matcher: its state, opened by the first use: a thread that fills masks beside a
            step may have to wait until the grammar is compiled, the launch of the step does not.
        token_ids: prompt and output as observed so far.
        end_ids: tokens that end the sequence.
        error: why its grammar can no longer be followed; None: it can.
    """

    slot: int
    grammar: Grammar
    matcher: GrammarMatcher | None
    token_ids: list[int]
    num_prompt_tokens: int
    end_ids: frozenset[int]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class GuidedSamples:
    """The samples of one guided sequence in a step.

    Attributes:
        index: of the sequence in the step.
        first, count: places of its masks.
        num_samples: how often the sequence samples after its last token; 1 with a draft.
        node_ids, parents: tokens and parents (-1: the sequence's last token) of its draft; empty
            without one. Place `first + 1 + i` is that of node i.
    """

    guided: GuidedSlot
    index: int
    first: int
    count: int
    num_samples: int
    node_ids: tuple[int, ...]
    parents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlannedMasks:
    """Where the masks of a step go.

    Attributes:
        places: [N] int32 of each sample of the step, `NO_MASK` for none. Samples of a sequence
            without a draft share a mask.
        num_places: how many masks there are.
        parts: the guided sequences that sample.
    """

    places: NDArray[np.int32]
    num_places: int
    parts: tuple[GuidedSamples, ...]


class TokenMasks:
    """The grammars of request slots.

    Args:
        vocab_size: number of logits.

    Attributes:
        open_matcher: opens the grammars of admitted sequences; to be set before one has any.
        num_words: int32 words of a mask.
    """

    def __init__(self, vocab_size: int) -> None:
        self.open_matcher: OpenMatcher | None = None
        self.num_words = -(-vocab_size // 32)
        self._slots: dict[int, GuidedSlot] = {}

    def __len__(self) -> int:
        """Slots whose sequences follow a grammar, those of ended sequences included."""
        return len(self._slots)

    def __contains__(self, slot: int) -> bool:
        return slot in self._slots

    def admit(self, state: AdmittedSequence) -> None:
        """Sets the slot of a sequence that enters it; replaces what the slot held."""
        slot = state.request_slot
        self._slots.pop(slot, None)
        if state.grammar is None:
            return
        token_ids = list(state.token_ids)
        self._slots[slot] = GuidedSlot(
            slot,
            state.grammar,
            None,
            token_ids,
            state.num_prompt_tokens,
            frozenset(state.end_ids),
        )

    def observe(self, slot: int, position: int, token_id: int) -> None:
        """Takes in the token at a position. One that is known already changes nothing, unless it is
        another one: then the output is cut before it."""
        guided = self._slots.get(slot)
        if guided is not None:
            self._observe(guided, position, token_id)

    def ends_at(self, slot: int, token_id: int) -> bool:
        """Whether the token ends the slot's guided sequence: its grammar sees none behind it."""
        guided = self._slots.get(slot)
        return guided is not None and token_id in guided.end_ids

    def mask(self, slot: int) -> tuple[NDArray[np.int32] | None, str | None]:
        """The mask of the slot's next token, None if it may take any, and why its grammar cannot be
        followed, None if it can."""
        words = np.zeros(self.num_words, np.int32)
        guided = self._slots[slot]
        _, begun = self._fill_root(guided, words)
        return (words if begun else None), guided.error

    def plan(
        self, step: SchedulerOutput, serves: Callable[[int], bool] | None = None
    ) -> PlannedMasks | None:
        """Gives a place to each mask of a step; None if no guided sequence samples.

        Args:
            serves: which request slots get masks; None: all that follow a grammar.
        """
        if not self._slots:
            return None
        slots, num_samples = step.request_slots.tolist(), step.num_samples.tolist()
        if self._slots.keys().isdisjoint(slots):
            return None
        drafts = step.drafts
        nodes = [0] * len(slots) if drafts is None else drafts.counts.tolist()
        parts: list[GuidedSamples] = []
        places: list[int] = []
        taken = first_node = 0
        for index, (slot, samples, count) in enumerate(zip(slots, num_samples, nodes, strict=True)):
            guided = self._slots.get(slot)
            size = 1 + count if count else samples
            if guided is None or not size or (serves is not None and not serves(slot)):
                places += [NO_MASK] * size
            else:
                own = slice(first_node, first_node + count)
                node_ids = () if drafts is None else tuple(drafts.token_ids[own].tolist())
                parents = () if drafts is None else tuple(drafts.parents[own].tolist())
                masks = 1 + count
                parts.append(GuidedSamples(guided, index, taken, masks, samples, node_ids, parents))
                places += range(taken, taken + masks) if count else [taken] * samples
                taken += masks
            first_node += count
        if not parts:
            return None
        return PlannedMasks(np.array(places, np.int32), taken, tuple(parts))

    def fill(self, planned: PlannedMasks, words: NDArray[np.int32]) -> dict[int, str]:
        """Writes the masks of a step.

        Args:
            words: [>= num_places, num_words] int32; the masks are written to the first rows.

        Returns:
            By request slot, why a grammar cannot be followed; the sequence's masks then allow
            nothing.
        """
        errors: dict[int, str] = {}
        for part in planned.parts:
            guided = part.guided
            rows = words[part.first : part.first + part.count]
            matcher, begun = self._fill_root(guided, rows[0])
            if guided.error is not None:
                rows.fill(0)
                errors[guided.slot] = guided.error
                continue
            if not begun:
                rows[0].fill(-1)
            if part.node_ids:
                _fill_nodes(part, matcher, rows)
        return errors

    def observe_sampled(
        self, planned: PlannedMasks, token_ids: Sequence[int], num_tokens: Sequence[int]
    ) -> None:
        """Takes in the tokens of a finished step, up to the one that ends a sequence. Those of a
        prompt that forks are left to the admission of the forks and to the next step's inputs.

        Args:
            planned: of the step.
            token_ids, num_tokens: see `ModelRunnerOutput`; the latter for each sequence.
        """
        ends = np.cumsum(num_tokens).tolist()
        for part in planned.parts:
            guided = part.guided
            if part.num_samples != 1 or guided.error is not None:
                continue
            end = ends[part.index]
            for token in token_ids[end - num_tokens[part.index] : end]:
                self._observe(guided, len(guided.token_ids), token)
                if token in guided.end_ids:
                    break

    def _observe(self, guided: GuidedSlot, position: int, token_id: int) -> None:
        known = guided.token_ids
        if position < len(known):
            if known[position] == token_id:
                return
            del known[position:]
            guided.matcher = None
        assert position == len(known), "a token before it has not been observed"
        known.append(token_id)
        if guided.matcher is not None:
            guided.matcher.observe(token_id)

    def _fill_root(
        self, guided: GuidedSlot, words: NDArray[np.int32]
    ) -> tuple[GrammarMatcher, bool]:
        """Writes the mask of a slot's next token, and the slot's error if no token may come next.

        Returns:
            The slot's matcher, which has taken in the output tokens known; what its `fill_mask` has
            returned.
        """
        if guided.matcher is None:
            assert self.open_matcher is not None, "a grammar, but nothing opens it"
            output_ids = guided.token_ids[guided.num_prompt_tokens :]
            guided.matcher = self.open_matcher(guided.grammar, output_ids)
        matcher = guided.matcher
        begun = matcher.fill_mask(words)
        if guided.error is None and begun and not words.any():
            guided.error = matcher.error or "the grammar allows no further token"
        return matcher, begun


def _fill_nodes(part: GuidedSamples, root: GrammarMatcher, rows: NDArray[np.int32]) -> None:
    """Writes the masks of a draft's nodes behind that of their root, whose state is given."""
    states: list[GrammarMatcher | None] = [root]
    for node, (token, parent) in enumerate(zip(part.node_ids, part.parents, strict=True), 1):
        above = states[parent + 1]
        state = None
        if above is not None and token not in part.guided.end_ids:
            state = above.copy()
            if not state.try_observe(token):
                state = None
        states.append(state)
        if state is None:
            rows[node].fill(0)
        elif not state.fill_mask(rows[node]):
            rows[node].fill(-1)
