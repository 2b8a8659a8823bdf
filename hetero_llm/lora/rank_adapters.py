"""Adapters of a model that several processes run: every rank has its part of each adapter.

The engine's process opens adapters and fills slots; what it opens and forgets the other ranks open
and forget, too, before a step needs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Protocol

from hetero_llm.core.lora import AdapterRef, LoRARequest
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.lora.store import AdapterStore


class OtherRanks(Protocol):
    """Those that open and forget what this process does."""

    def open_adapter(self, request: LoRARequest) -> None: ...

    def forget_adapter(self, name: str) -> None: ...


class ParallelAdapters:
    """The store of rank 0, whose changes the other ranks make, too.

    Args:
        store: of this process.
        ranks: the others.
    """

    def __init__(self, store: AdapterStore, ranks: OtherRanks) -> None:
        self._store = store
        self._ranks = ranks

    def open(self, request: LoRARequest) -> AdapterRef:
        """See `AdapterStore`."""
        before = self._store.num_reads
        ref = self._store.open(request)
        if self._store.num_reads != before:
            self._ranks.open_adapter(request)
        return ref

    def forget(self, name: str) -> None:
        """See `AdapterStore`."""
        self._store.forget(name)
        self._ranks.forget_adapter(name)

    def names(self) -> Mapping[str, AdapterRef]:
        """See `AdapterStore`."""
        return self._store.names()

    def name_of(self, number: int) -> str | None:
        """See `AdapterStore`."""
        return self._store.name_of(number)

    def check(self, adapter: AdapterRef) -> None:
        """See `AdapterStore`."""
        self._store.check(adapter)


class RankAdapters:
    """Keeps the adapters in the slots of a rank in its host memory. Call `begin` and `end` for each
    step, in order.

    Args:
        store: of this rank.
    """

    def __init__(self, store: AdapterStore) -> None:
        self.store = store
        self._in_slots: dict[int, AdapterRef] = {}
        self._replaced: deque[list[AdapterRef]] = deque()

    def open(self, request: LoRARequest) -> None:
        """See `AdapterStore`."""
        self.store.open(request)

    def forget(self, name: str) -> None:
        """See `AdapterStore`."""
        self.store.forget(name)

    def begin(self, step: SchedulerOutput) -> None:
        """Holds the adapters that a step loads, before it is launched.

        Raises:
            AdapterError: the files of one have gone or changed.
        """
        replaced = []
        for load in step.adapter_loads:
            self.store.hold(load.adapter)
            before = self._in_slots.get(load.slot)
            if before is not None:
                replaced.append(before)
            self._in_slots[load.slot] = load.adapter
        self._replaced.append(replaced)

    def end(self) -> None:
        """The oldest step is finished: what it has replaced is not copied any more."""
        for adapter in self._replaced.popleft():
            self.store.release(adapter)


class NoRankAdapters:
    """In the place of `RankAdapters` where adapters are not served."""

    def begin(self, step: SchedulerOutput) -> None:
        pass

    def end(self) -> None:
        pass

    def open(self, request: LoRARequest) -> None:
        raise AssertionError("adapters are not served")

    def forget(self, name: str) -> None:
        raise AssertionError("adapters are not served")
