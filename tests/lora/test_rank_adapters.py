"""All ranks open and forget what rank 0 does, and hold what their slots hold."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_llm.core.errors import AdapterError
from hetero_llm.core.lora import AdapterLoad, AdapterRef, LoRARequest
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.lora.rank_adapters import NoRankAdapters, RankAdapters

NONE = np.zeros(0, np.int32)


def ref(number: int) -> AdapterRef:
    return AdapterRef(LoRARequest(f"a{number}", number, "/folder"), f"hash {number}", 8)


def step(*loads: tuple[int, int]) -> SchedulerOutput:
    return SchedulerOutput(
        NONE, NONE, NONE, NONE, NONE, (), (), np.zeros((3, 0), np.int32),
        np.zeros((2, 0), np.int32),
        adapter_loads=tuple(AdapterLoad(slot, ref(number)) for slot, number in loads),
    )  # fmt: skip


class Store:
    """A store that reads nothing."""

    def __init__(self) -> None:
        self.num_reads = 0
        self.known: dict[str, AdapterRef] = {}
        self.held: Counter[int] = Counter()

    def open(self, request: LoRARequest) -> AdapterRef:
        if request.lora_name not in self.known:
            self.num_reads += 1
            self.known[request.lora_name] = ref(request.lora_int_id)
        return self.known[request.lora_name]

    def forget(self, name: str) -> None:
        if name not in self.known:
            raise AdapterError("lora_name", name, "unknown")
        del self.known[name]

    def names(self) -> dict[str, AdapterRef]:
        return self.known

    def name_of(self, number: int) -> str | None:
        return f"a{number}"

    def check(self, adapter: AdapterRef) -> None:
        if adapter.name not in self.known:
            raise AdapterError("lora_request", adapter.name, "unknown")

    def hold(self, adapter: AdapterRef) -> None:
        self.held[adapter.request.lora_int_id] += 1

    def release(self, adapter: AdapterRef) -> None:
        number = adapter.request.lora_int_id
        self.held[number] -= 1
        assert self.held[number] >= 0


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), max_size=3), max_size=12),
    st.integers(0, 2),
)
def test_held_are_those_in_slots_and_those_that_steps_in_flight_replace(
    steps: list[list[tuple[int, int]]], most_in_flight: int
) -> None:
    store = Store()
    adapters = RankAdapters(store)  # type: ignore[arg-type]
    slots: dict[int, int] = {}
    in_flight: list[set[int]] = []
    for loads in steps:
        before = set(slots.values())
        adapters.begin(step(*loads))
        slots |= dict(loads)
        in_flight.append(before)
        if len(in_flight) > most_in_flight:
            adapters.end()
            in_flight.pop(0)
        held = {number for number, count in store.held.items() if count}
        assert held >= set(slots.values()).union(*in_flight)
    while in_flight:
        adapters.end()
        in_flight.pop()
    assert +store.held == Counter(slots.values())


def test_opened_and_forgotten_on_a_rank() -> None:
    store = Store()
    adapters = RankAdapters(store)  # type: ignore[arg-type]
    adapters.open(LoRARequest("a1", 1, "/folder"))
    assert set(store.known) == {"a1"}
    adapters.forget("a1")
    assert not store.known


def test_a_rank_without_adapters() -> None:
    none = NoRankAdapters()
    none.begin(step())
    none.end()
    for call in (lambda: none.open(LoRARequest("a1", 1, "/folder")), lambda: none.forget("a1")):
        with pytest.raises(AssertionError):
            call()
