"""The masks of steps on a device: their places, the order of the thread's work, late masks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from hetero_llm.core.grammar import Grammar, GrammarMatcher
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import AdmittedSequence, SchedulerOutput
from hetero_llm.gpu.token_masks import DeviceTokenMasks, StepMasks
from hetero_llm.sampling.token_masks import TokenMasks

VOCAB, CAPACITY = 64, 4


@dataclass
class Counting:
    """The next token is the number of tokens so far; the first mask waits for `begin`."""

    begin: threading.Event
    count: int = 0
    error: str | None = None

    def observe(self, token_id: int) -> None:
        assert token_id == self.count
        self.count += 1

    def try_observe(self, token_id: int) -> bool:
        raise NotImplementedError

    def copy(self) -> GrammarMatcher:
        raise NotImplementedError

    def fill_mask(self, mask: NDArray[np.int32]) -> bool:
        assert self.begin.wait(120)
        mask[:] = 0
        mask[self.count // 32] = 1 << self.count % 32
        return True


def always(slot: int) -> bool:
    return True


def step_of(*slots: int) -> SchedulerOutput:
    ones, none = np.ones(len(slots), np.int32), np.zeros((3, 0), np.int32)
    return SchedulerOutput(
        np.array(slots, np.int32), 0 * ones, ones, 0 * ones, ones, (), (), none, none[:2]
    )


@pytest.fixture
def begin() -> threading.Event:
    return threading.Event()


@pytest.fixture
def masks(begin: threading.Event) -> DeviceTokenMasks:
    grammars = TokenMasks(VOCAB)

    def open_matcher(grammar: Grammar, output_ids: Sequence[int]) -> GrammarMatcher:
        return Counting(begin, len(output_ids))

    grammars.open_matcher = open_matcher
    for slot in range(CAPACITY):
        grammar = None if slot == 3 else Grammar("counting")
        grammars.admit(AdmittedSequence(slot, [9], 1, SamplingParams(), 0, 0, grammar=grammar))
    return DeviceTokenMasks(grammars, VOCAB, CAPACITY, pin=False, most_looks=3)


def allowed(masks: DeviceTokenMasks, step: StepMasks, sample: int) -> list[int]:
    words = masks.places.words[int(step.places[sample])].numpy()
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def ready(masks: DeviceTokenMasks, step: StepMasks) -> list[bool]:
    places = [int(place) for place in step.places if place >= 0]
    return [bool(masks.places.ready[place]) for place in places]


def test_masks_of_a_step_follow_the_tokens_of_the_one_before(
    masks: DeviceTokenMasks, begin: threading.Event
) -> None:
    first = masks.plan(step_of(1, 3, 0), always)
    assert first is not None and masks.plan(step_of(3), always) is None
    assert first.places[1] == -1 and len(set(first.places.tolist())) == 3
    masks.start_fill(first)
    arrived = threading.Event()

    def wait() -> tuple[list[int], list[int]]:
        assert arrived.wait(120)
        return [0, 33, 0], [1, 1, 1]

    masks.launched(first, wait)
    second = masks.plan(step_of(0, 1), always)  # launched ahead
    assert second is not None and set(second.places).isdisjoint(first.places)
    masks.start_fill(second)
    masks.launched(second, lambda: ([1, 1], [1, 1]))
    assert ready(masks, first) == [False, False]
    begin.set()
    assert first.filled is not None
    first.filled.result()
    assert ready(masks, first) == [True, True] and ready(masks, second) == [False, False]
    assert [allowed(masks, first, sample) for sample in (0, 2)] == [[0], [0]]
    arrived.set()
    assert masks.finish(first) == {} and masks.finish(second) == {}
    assert ready(masks, second) == [True, True]
    assert [allowed(masks, second, sample) for sample in (0, 1)] == [[1], [1]]


def test_the_engine_observes_a_step_behind_which_none_was_launched(
    masks: DeviceTokenMasks, begin: threading.Event
) -> None:
    begin.set()
    waited: list[tuple[int, int]] = []

    def wait(number: int) -> tuple[list[int], list[int]]:
        waited.append((number, threading.get_ident()))
        return [number], [1]

    steps = []
    for number in range(3):
        step = masks.plan(step_of(0), always)
        assert step is not None
        masks.start_fill(step)
        masks.launched(step, partial(wait, number))
        if number == 0:
            assert masks.finish(step) == {}
        steps.append(step)
    assert steps[2].filled is not None
    steps[2].filled.result()
    assert [masks.finish(step) for step in steps[1:]] == [{}, {}]
    assert allowed(masks, steps[2], 0) == [2]
    # The second one's tokens are needed for the masks of the third; each step is waited for once.
    assert [number for number, _ in waited] == [0, 1, 2]
    assert waited[0][1] == waited[2][1] == threading.get_ident() != waited[1][1]


def test_places_are_cleared_when_they_are_taken_again(
    masks: DeviceTokenMasks, begin: threading.Event
) -> None:
    begin.set()
    seen = []
    for number in range(7):
        step = masks.plan(step_of(0, 1, 2), always)
        assert step is not None
        assert ready(masks, step) == [False] * 3
        assert not masks.places.gave_up[list(step.places)].any()
        masks.start_fill(step)
        masks.launched(step, lambda number=number: ([number] * 3, [1] * 3))
        if number == 2:
            masks.places.gave_up[int(step.places[1])] = 1  # as the kernel does
            assert masks.finish(step) == {1: "its token mask was not ready in time"}
        else:
            assert masks.finish(step) == {}
        seen.append(tuple(step.places.tolist()))
    assert len(set(seen)) == 3 and seen[:3] == seen[3:6]


def test_only_steps_with_room_are_served(masks: DeviceTokenMasks) -> None:
    assert masks.fits(CAPACITY) and not masks.fits(CAPACITY + 1)
    free = DeviceTokenMasks(TokenMasks(VOCAB), VOCAB, CAPACITY, pin=False)
    assert free.fits(CAPACITY + 1)
    assert masks.plan(step_of(0, 1), lambda slot: False) is None


def test_a_fault_of_the_thread_reaches_the_engine(
    masks: DeviceTokenMasks, begin: threading.Event
) -> None:
    begin.set()
    step = masks.plan(step_of(0), always)
    assert step is not None
    masks.start_fill(step)
    masks.launched(step, lambda: ([5], [1]))  # not the token that the grammar allows
    with pytest.raises(AssertionError):
        masks.finish(step)
