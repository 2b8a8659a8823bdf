"""The contract between the block manager and the memory behind it: blocks that leave the device's
prefix cache live on in host memory and come back, layer by layer, when a prompt wants them.

Words: a *ticket* is one load or one store, numbered from 1 upwards; a *slot* here is a place for
one block in host memory; a *step's number* counts the engine's steps from 1 in the order of their
launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class HostHit:
    """Blocks that host memory holds, in the order of the prompt. Their slots stay as they are until
    `HostTier.load` or `HostTier.release` is called with the hit.

    Attributes:
        slots: of each block.
        sources: what each block is found by: parent key + token bytes (see engine.prefix_cache).
        keys: of each block.
    """

    slots: tuple[int, ...]
    sources: tuple[bytes, ...]
    keys: tuple[bytes, ...]

    def first(self, count: int) -> HostHit:
        return HostHit(self.slots[:count], self.sources[:count], self.keys[:count])

    def behind(self, count: int) -> HostHit:
        return HostHit(self.slots[count:], self.sources[count:], self.keys[count:])

    def __add__(self, more: HostHit) -> HostHit:
        """Both; `more` follows."""
        return HostHit(self.slots + more.slots, self.sources + more.sources, self.keys + more.keys)


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """A block of the device whose content is to be kept: nobody writes to it, and it is not handed
    out before its store is over."""

    block: int
    source: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class TierEvents:
    """What is over since the last poll. Lists of tickets, each named once.

    Attributes:
        loaded: all layers are on the device.
        failed: loads of which some bytes never came, aborted ones included; nothing is written to
            their blocks any more.
        stored: stores, whether they succeeded or not: their blocks are not read any more.
    """

    loaded: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)


class HostTier(Protocol):
    """Called by the thread of the step loop alone; nothing but `wait` ever waits."""

    def match(self, parent: bytes, contents: Iterable[bytes]) -> HostHit:
        """The leading blocks after `parent` that host memory holds, up to the first that it does
        not; reads `contents` (token bytes of one block after the other) no further than needed.
        Their slots are pinned and count as used."""
        ...

    def release(self, hit: HostHit) -> None:
        """Gives back a hit, or the end of one, that is not going to be loaded."""
        ...

    def load(
        self, hit: HostHit, blocks: NDArray[np.int64], after_step: int, compute: float | None
    ) -> int:
        """Starts copying a hit to the device's blocks; the slots are unpinned when it is over.

        Args:
            blocks: [N], one for each slot; nobody else uses them before the load is over.
            after_step: number of the last step that may still read or write one of them; 0: none.
            compute: seconds that the rows behind the hit are expected to take; 0: unknown; None:
                more of the same prefix is loaded behind it, which nobody waits for any less.

        Returns:
            The ticket.
        """
        ...

    def abort(self, ticket: int) -> None:
        """Stops a load that nobody wants any more. It ends as failed, or as loaded, once what was
        already submitted has drained."""
        ...

    def store(self, victims: Sequence[EvictionCandidate]) -> tuple[int, int]:
        """Starts copying blocks to host memory, in order, as many as there is room for.

        Returns:
            How many of the first victims were taken, and their ticket (0 if none has to be copied).
            Of those, blocks that host memory holds already need no copy; a ticket's blocks are all
            victims taken.
        """
        ...

    def holds(self, source: bytes) -> bool:
        """Whether the block found by `source` is in host memory, or on its way."""
        ...

    def wants(self, key: bytes) -> bool:
        """Whether a block was used often enough to be kept when it leaves the device."""
        ...

    def note_use(self, uses: Mapping[bytes, int]) -> None:
        """How many requests have begun that use these blocks, since it was told last."""
        ...

    def left(self, entries: Iterable[tuple[bytes, bytes]]) -> None:
        """Published blocks left the device: source and key of each. Of those that are not in host
        memory, what follows them there is useless."""
        ...

    def take_lost(self) -> list[tuple[bytes, bytes]]:
        """Blocks that host memory has given up since the last call: source and key. If they are
        on the device no longer, what follows them there is useless."""
        ...

    def step_launched(self, number: int) -> None:
        """All device work of this step is on the current stream."""
        ...

    def seconds_left(self, tickets: Iterable[int]) -> float:
        """How long loads will take from now on, by the bytes ahead of their end and the measured
        rate; 0.0 for those that are over."""
        ...

    def seconds_ahead(self, tickets: Iterable[int]) -> float:
        """The part of `seconds_left` that other loads take."""
        ...

    def worth_loading(self, hit: HostHit, start: int, rest: int) -> int:
        """How many of a hit's first blocks are brought faster than they are computed.

        Args:
            start: tokens before the hit. rest: tokens of the prompt behind it.
        """
        ...

    def poll(self, over: Iterable[int] = ()) -> TierEvents:
        """What has ended. Loads named in `over`, whose gates have let a finished step through, are
        waited for (microseconds), so that none of them is still open afterwards."""
        ...

    def wait(self, seconds: float) -> None:
        """Sleeps until something ends, at most so long."""
        ...

    def clear(self) -> None:
        """Forgets all blocks; loads and stores that are under way still end."""
        ...

    def metrics(self) -> dict[str, float]:
        """Counters since start, flat."""
        ...

    def shut_down(self) -> None:
        """Ends all copies and gives the memory back."""
        ...
