"""Where masks go, what they hold, and what grammars observe: with a grammar of the tests' own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.grammar import Grammar, GrammarMatcher
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import AdmittedSequence, SchedulerOutput
from hetero_llm.sampling.token_masks import NO_MASK, TokenMasks

VOCAB, END = 70, 69


class Rising:
    """Each token is larger than the one before; the grammar's text is the least first token, and
    it begins behind as many tokens as `begins_after` has. Behind token 66 it is at a limit."""

    def __init__(self, last: int, waits: int) -> None:
        self.last, self.waits = last, waits

    @property
    def error(self) -> str | None:
        return "at a limit" if self.last == 66 else None

    def observe(self, token_id: int) -> None:
        assert self.try_observe(token_id)

    def try_observe(self, token_id: int) -> bool:
        if self.waits:
            self.waits -= 1
            return True
        if token_id <= self.last:
            return False
        self.last = token_id
        return True

    def copy(self) -> GrammarMatcher:
        return Rising(self.last, self.waits)

    def fill_mask(self, mask: NDArray[np.int32]) -> bool:
        if self.waits:
            return False
        allowed = np.arange(32 * len(mask)) > self.last
        allowed[VOCAB:] = False
        mask[:] = np.packbits(allowed & (self.last != 66), bitorder="little").view(np.int32)
        return True


def open_rising(grammar: Grammar, output_ids: Sequence[int]) -> GrammarMatcher:
    matcher = Rising(int(grammar.text), len(grammar.begins_after))
    for token in output_ids:
        matcher.observe(token)
    return matcher


def state(slot: int, token_ids: list[int], prompt: int, text: str | None = "5", waits: int = 0):
    grammar = None if text is None else Grammar(text, (0,) * waits)
    return AdmittedSequence(
        slot, token_ids, prompt, SamplingParams(), 0, 0, end_ids=(END,), grammar=grammar
    )


def masks_of(*states: AdmittedSequence) -> TokenMasks:
    masks = TokenMasks(VOCAB)
    masks.open_matcher = open_rising
    for one in states:
        masks.admit(one)
    return masks


def step_of(work: list[tuple[int, int]], trees: list[list[tuple[int, int]]] | None = None):
    """Sequences as (slot, samples), and the (token, parent) of the nodes of each one's tree."""
    slots, samples = np.array(work, np.int32).T
    none = np.zeros((3, 0), np.int32)
    counts = np.array([len(tree) for tree in trees or [[]] * len(work)], np.int32)
    drafts = None
    if trees is not None:
        nodes = np.array([node for tree in trees for node in tree], np.int32).reshape(-1, 2)
        drafts = DraftBatch(counts, nodes[:, 0].copy(), nodes[:, 1].copy())
    zeros = np.zeros(len(work), np.int32)
    return SchedulerOutput(slots, zeros, 1 + counts, zeros, samples, (), (), none, none[:2], drafts)


def allowed(words: NDArray[np.int32]) -> list[int]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def filled(masks: TokenMasks, step: SchedulerOutput):
    planned = masks.plan(step)
    assert planned is not None
    words = np.full((planned.num_places + 1, masks.num_words), 77, np.int32)
    errors = masks.fill(planned, words)
    assert (words[-1] == 77).all()
    return planned, words, errors


def test_places_follow_the_samples_of_a_step() -> None:
    masks = masks_of(state(0, [1, 2], 2), state(1, [1], 1, None), state(2, [3], 1, "40"))
    planned, words, errors = filled(masks, step_of([(1, 1), (2, 3), (0, 1), (2, 0)]))
    assert planned.places.tolist() == [NO_MASK, 0, 0, 0, 1] and planned.num_places == 2
    assert planned.places.dtype == np.int32 and errors == {}
    assert allowed(words[0]) == list(range(41, VOCAB))
    assert allowed(words[1]) == list(range(6, VOCAB))


def test_a_grammar_is_opened_where_its_first_mask_is_written() -> None:
    """So the launch of a step does not wait until a new grammar is compiled."""
    opened: list[list[int]] = []

    def open_noting(grammar: Grammar, output_ids: Sequence[int]) -> GrammarMatcher:
        opened.append(list(output_ids))
        return open_rising(grammar, output_ids)

    masks = TokenMasks(VOCAB)
    masks.open_matcher = open_noting
    masks.admit(state(0, [1, 2, 7], prompt=2))
    masks.observe(0, 3, 8)
    assert masks.plan(step_of([(0, 1)])) is not None and not opened
    filled(masks, step_of([(0, 1)]))
    masks.observe(0, 4, 9)
    _, words, _ = filled(masks, step_of([(0, 1)]))
    assert opened == [[7, 8]] and allowed(words[0]) == list(range(10, VOCAB))


def test_there_is_nothing_to_plan_without_a_guided_sample() -> None:
    assert TokenMasks(VOCAB).plan(step_of([(0, 1)])) is None
    masks = masks_of(state(0, [1], 1), state(1, [1], 1, None))
    assert masks.plan(step_of([(1, 1), (0, 0)])) is None
    assert masks.plan(step_of([(0, 1)]), lambda slot: slot != 0) is None
    masks.admit(state(0, [1], 1, None))
    assert masks.plan(step_of([(0, 1)])) is None and not len(masks) and 0 not in masks


def test_every_node_of_a_tree_has_a_mask_of_its_own() -> None:
    masks = masks_of(state(0, [1], 1, None), state(3, [1, 10], 1, "5"))
    tree = [(20, -1), (9, -1), (30, 0), (25, 2), (40, 1), (END, 0), (50, 5)]
    planned, words, errors = filled(masks, step_of([(0, 1), (3, 1), (0, 1)], [[(1, -1)], tree, []]))
    assert planned.places.tolist() == [NO_MASK, NO_MASK, *range(8), NO_MASK] and errors == {}
    assert [allowed(row)[:1] for row in words[:8]] == [
        [11],
        [21],
        [],  # 9 is refused
        [31],
        [],  # 25 is refused behind 30
        [],  # its parent is refused
        [],  # nothing follows the end
        [],
    ]
    # What the nodes took in has left the sequence alone.
    assert allowed(filled(masks, step_of([(3, 1)]))[1][0]) == list(range(11, VOCAB))


def test_the_grammar_begins_at_a_node() -> None:
    masks = masks_of(state(0, [1], 1, "5", waits=2))
    _, words, _ = filled(masks, step_of([(0, 1)], [[(3, -1), (2, 0), (8, 1)]]))
    everything = list(range(96))
    assert [allowed(row) for row in words[:4]] == [
        everything,
        everything,
        list(range(6, VOCAB)),
        list(range(9, VOCAB)),
    ]


def test_a_step_s_tokens_are_observed_up_to_the_end() -> None:
    masks = masks_of(state(0, [1], 1), state(1, [1], 1, None), state(2, [1], 1), state(3, [1], 1))
    step = step_of([(0, 1), (1, 1), (2, 2), (3, 1)], [[(7, -1)], [], [], [(END, -1)]])
    planned = masks.plan(step)
    assert planned is not None
    masks.observe_sampled(planned, [7, 9, 1, 20, 30, END, 3], [2, 1, 2, 2])
    assert masks.mask(0)[0] is not None
    assert allowed(masks.mask(0)[0]) == list(range(10, VOCAB))
    assert allowed(masks.mask(2)[0]) == list(range(6, VOCAB))  # it forks: its token is not chosen
    assert allowed(masks.mask(3)[0]) == []  # the token behind the end was not observed
    assert masks.ends_at(3, END) and not masks.ends_at(1, END) and not masks.ends_at(3, 7)


def test_observing_a_token_again_changes_nothing_another_one_cuts() -> None:
    masks = masks_of(state(0, [1, 2, 10, 20], 2))
    masks.observe(0, 3, 20)
    masks.observe(0, 0, 1)  # a chunk of one token of a sequence that is computed anew
    masks.observe(1, 7, 3)  # a slot without a grammar
    assert allowed(masks.mask(0)[0])[0] == 21
    masks.observe(0, 4, 30)
    assert allowed(masks.mask(0)[0])[0] == 31
    masks.observe(0, 3, 15)  # the tokens from here on were dropped
    assert allowed(masks.mask(0)[0])[0] == 16
    with pytest.raises(AssertionError):
        masks.observe(0, 7, 40)


def test_a_grammar_at_its_limit_is_an_error_of_its_slot() -> None:
    masks = masks_of(state(0, [1, 66], 1), state(1, [1, 8], 1))
    planned, words, errors = filled(masks, step_of([(0, 1), (1, 1)], [[(67, -1)], [(66, -1)]]))
    assert errors == {0: "at a limit"} and not words[:2].any()
    assert allowed(words[2]) == list(range(9, VOCAB)) and not words[3].any()
    masks.observe_sampled(planned, [0, 9], [1, 1])  # the invalid token is not observed
    assert masks.mask(0)[1] == "at a limit" and masks.mask(1)[1] is None
    masks = masks_of(state(0, [1, VOCAB - 1], 1))
    assert filled(masks, step_of([(0, 1)]))[2] == {0: "the grammar allows no further token"}
