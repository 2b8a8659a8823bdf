"""Interface between the host tier's bookkeeping and the copies themselves: `copier.NativeCopier` in
the engine, models of it in tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from hetero_llm.core.transfer_order import TransferOrder


@dataclass(frozen=True, slots=True)
class Done:
    """An ended load or store.

    Attributes:
        ok: every byte arrived; else some may not have.
        seconds: from its start to its end, time in the queue included.
    """

    transfer_id: int
    ok: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class LayerReadyFlag:
    """How the device observes a load: `flags[place]`, int32, is `base` before the first layer has
    landed and `base + n` once n layers have. Layers land in order; the value never decreases."""

    place: int
    base: int


class Copier(Protocol):
    """Copies whole blocks between host and device. No call but `wait` and `close` blocks."""

    @property
    def num_host_blocks(self) -> int:
        """Host blocks that can be used by now: the pool grows in the background."""
        ...

    def can_load(self) -> bool:
        """Whether a layer-ready flag is free for one more load."""
        ...

    def load(self, order: TransferOrder) -> None:
        """Starts a copy from host to device, layer by layer in ascending order."""
        ...

    def store(self, order: TransferOrder) -> None:
        """Starts a copy from device to host."""
        ...

    def abort(self, transfer_id: int) -> None:
        """Submits no further copies of a load."""
        ...

    def layer_ready_flag(self, transfer_id: int) -> LayerReadyFlag | None:
        """Flag of a load; None once its end was polled."""
        ...

    def step_launched(self, number: int) -> None:
        """Marks the current end of the current stream as the end of step `number`."""
        ...

    def seconds_left(self, transfer_ids: Iterable[int]) -> float:
        """Seconds until the last of these loads has landed, by the measured rate."""
        ...

    def load_rate(self) -> float:
        """Bytes a second, host to device."""
        ...

    def poll(self) -> list[Done]:
        """Transfers that have ended since the previous call."""
        ...

    def wait(self, seconds: float) -> None:
        """Sleeps until any transfer ends, for at most `seconds`, without the GIL."""
        ...

    def metrics(self) -> dict[str, float]: ...

    def close(self) -> None:
        """Waits for submitted copies and fails the rest."""
        ...
