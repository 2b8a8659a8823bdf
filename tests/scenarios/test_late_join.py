"""When a sequence whose prefix is on its way joins a step: by times that the test sets."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step_times import StepTimes
from hetero_llm.scheduler.kv_loads import KVLoadQueue
from tests.helpers.harness import make_request, make_sequence

CACHED = 16
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@dataclass
class Link:
    """Block manager, transfers and tier in one: seconds of each load, in the order of copies."""

    seconds: dict[int, float]
    waiting: dict[int, set[int]] = field(default_factory=dict)  # slot to transfer_ids

    def load(self, slot: int, token_ids: list[int], compute: Any, *, whole: bool) -> int:
        return CACHED

    def pending(self, slot: int) -> set[int]:
        return {transfer_id for transfer_id in self.waiting[slot] if transfer_id in self.seconds}

    @property
    def tier(self) -> Link:
        return self

    def seconds_left(self, pending: Collection[int]) -> float:
        last = max(pending, default=-1)
        return sum(seconds for transfer_id, seconds in self.seconds.items() if transfer_id <= last)

    def seconds_ahead(self, pending: Collection[int]) -> float:
        return self.seconds_left(pending) - sum(self.seconds[each] for each in pending)

    def allocate(self, slot: int, computed: int, end: int) -> bool:
        return True


def step_of(rows: int) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=np.array([rows]), num_computed_tokens=np.array([0]), kv_loads=()
    )


def make(link: Link, rows: dict[int, int], waiting: dict[int, set[int]]) -> KVLoadQueue:
    """Sequences by slot: their rows behind the prefix, and the loads that they wait for. A step of
    8 rows takes 8 ms, one of 1024 takes 28."""
    times = StepTimes()
    loads: Any = KVLoadQueue(link, link, 4, times)  # type: ignore[arg-type]
    for size, seconds in ((8, 0.008), (1024, 0.028)):
        loads.take_joined([size])
        loads.observe(step_of(size), seconds)
    for slot, count in rows.items():
        link.waiting[slot] = waiting[slot]
        sequence = make_sequence(make_request(str(slot), [1] * (CACHED + count), ONE, 4096))
        assert loads.begin(sequence, slot, 0, alone=True).under_way
    return loads


def joined(loads: KVLoadQueue, *, running: int = 0, budget: int = 4096) -> list[int]:
    """Slots that join a step which has so many rows already."""
    found = []
    for loading, together in loads.candidates():
        slot = loading.sequence.request_slot
        if loads.join(loading, running + min(together, budget), budget, alone=not running):
            found.append(slot)
    return found


@pytest.mark.parametrize(("load", "joins"), [(0.020, True), (0.022, False)])
def test_a_load_has_to_hide_under_all_layers_but_the_first(load: float, joins: bool) -> None:
    """1000 rows and 24 running ones take 28 ms, three layers of four 21 ms."""
    loads = make(Link({1: load}), {0: 1000}, {0: {1}})
    assert joined(loads, running=24) == [0] * joins


def test_what_goes_before_a_load_hides_under_nothing() -> None:
    """Together their rows would take longer than both loads; but the second's first layer comes
    only when the first load is over, and the step would stand still so long."""
    link = Link({1: 0.015, 2: 0.015})
    loads = make(link, {0: 1024, 1: 1024}, {0: {1}, 1: {2}})
    assert joined(loads) == [0]
    del link.seconds[1]
    assert joined(loads) == [1]


def test_while_a_step_runs_the_next_one_may_begin_to_wait() -> None:
    link = Link({1: 0.015, 2: 0.015})
    loads = make(link, {0: 1024, 1: 1024}, {0: {1}, 1: {2}})
    assert joined(loads) == [0]
    assert loads.take_joined([1024]) == (1,)
    assert joined(loads) == [1]


def test_who_waits_for_one_load_joins_together() -> None:
    """8 rows alone would not hide it: they take 8 ms, and 20 times 1.5 as many do."""
    link = Link({1: 0.015})
    few = make(link, {0: 8}, {0: {1}})
    assert joined(few) == []
    many = make(link, {slot: 50 for slot in range(20)}, {slot: {1} for slot in range(20)})
    assert joined(many) == list(range(20))


def test_whose_prefix_is_there_counts_for_those_who_wait() -> None:
    link = Link({1: 0.015})
    loads = make(link, {0: 8}, {0: {1}})
    assert joined(loads) == []
    link.seconds[2] = 0.0001
    loads = make(link, {0: 8, 1: 1000}, {0: {1}, 1: {2}})
    del link.seconds[2]
    assert joined(loads) == [0, 1]


def test_a_nap_lasts_until_somebody_may_join() -> None:
    naps: list[float] = []
    link: Any = Link({1: 0.0125, 2: 0.5})
    link.wait = naps.append
    loads = make(link, {0: 8, 1: 8}, {0: {1}, 1: {2}})
    loads.nap()
    assert naps == [pytest.approx(0.001)], "a millisecond at most"
    link.seconds[1] = 0.0112
    loads.nap()
    assert naps[1] == pytest.approx(0.0112 - 0.75 * 0.008 * 1.5 - 0.002)
