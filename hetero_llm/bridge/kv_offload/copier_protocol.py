"""What joins bookkeeping and copies: `copier.NativeCopier` in the engine, models of it in tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class Done:
    """A load or store that is over. `ok`: every byte arrived; else some may not have. `seconds`
    from its beginning to its end, waits in the queue included."""

    ticket: int
    ok: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Gate:
    """How the device learns of a load's progress: `flags[place]`, int32, is `base` before the first
    layer has landed and `base + n` once n layers have; layers land in order. It never goes back."""

    place: int
    base: int


class Copier(Protocol):
    """Moves whole blocks between host slots and device blocks. All calls return at once."""

    @property
    def num_slots(self) -> int:
        """Host slots that can be used by now: the pool grows in the background."""
        ...

    def can_load(self) -> bool:
        """Whether there is a place for one more load's gate."""
        ...

    def load(
        self,
        ticket: int,
        slots: np.ndarray,
        blocks: np.ndarray,
        after_step: int,
        compute: float | None,
    ) -> None:
        """Host to device, [n] int64 each, layer by layer in ascending order.

        Args:
            after_step, compute: as in `kv_cache.host_tier.HostTier.load`.
        """
        ...

    def store(self, ticket: int, blocks: np.ndarray, slots: np.ndarray, after_step: int) -> None:
        """Device to host, [n] int64 each, after the device work of step `after_step`."""
        ...

    def abort(self, ticket: int) -> None:
        """Submits no more of a load."""
        ...

    def gate(self, ticket: int) -> Gate | None:
        """Of a load; None if it is over and was polled."""
        ...

    def step_launched(self, number: int) -> None:
        """Notes the current stream's end as that of step `number`."""
        ...

    def step_done(self, number: int) -> bool:
        """Whether the device work of a step noted before is over."""
        ...

    def seconds_left(self, tickets: Iterable[int]) -> float:
        """Until the last of these loads has landed, by the measured rate."""
        ...

    def load_rate(self) -> float:
        """Bytes a second, host to device."""
        ...

    def poll(self) -> list[Done]:
        """What is over and has not been told yet."""
        ...

    def wait(self, seconds: float) -> None:
        """Until something is over, at most so long; without the GIL."""
        ...

    def metrics(self) -> dict[str, float]: ...

    def close(self) -> None:
        """Ends all copies (those submitted are waited for) and frees the host memory."""
        ...
