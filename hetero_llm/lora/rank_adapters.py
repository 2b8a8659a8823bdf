"""Adapters of a model that several processes run: every rank has its part of each adapter.

Rank 0 opens adapters and fills slots; its `AdapterStore` lets the other ranks open and forget what
it opens and forgets, before a step needs it.
"""

from __future__ import annotations

from collections import deque

from hetero_llm.core.lora import AdapterRef, LoRARequest
from hetero_llm.core.null_objects import do_nothing
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.lora.store import AdapterStore


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


def _refuse(*_: object) -> None:
    raise AssertionError("adapters are not served")


class NoRankAdapters:
    """In the place of `RankAdapters` where adapters are not served."""

    begin = end = staticmethod(do_nothing)
    open = forget = staticmethod(_refuse)
