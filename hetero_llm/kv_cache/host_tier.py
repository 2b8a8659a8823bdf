"""What the block manager requires of host memory: blocks evicted from the device's prefix cache are
kept there and are loaded back, layer by layer, for later prompts.

A *transfer id* names one load or one store; ids are numbered from 1 upwards. A *host block* is the
place of one KV block in host memory. A *step number* counts the engine's steps from 1 in the order
of their launch. A *lookup key* is what a block is found by, parent hash + token bytes; its *block
hash* is the SHA-256 of that (see `prefix_cache`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class HostHit:
    """Consecutive blocks of a prompt that host memory holds. The host blocks stay pinned until
    `HostTier.load` or `HostTier.release` is called with the hit.

    Attributes:
        host_blocks, lookup_keys, block_hashes: one entry for each block, in the prompt's order.
    """

    host_blocks: tuple[int, ...] = ()
    lookup_keys: tuple[bytes, ...] = ()
    block_hashes: tuple[bytes, ...] = ()

    def first(self, count: int) -> HostHit:
        """The first `count` blocks."""
        return HostHit(
            self.host_blocks[:count], self.lookup_keys[:count], self.block_hashes[:count]
        )

    def after(self, count: int) -> HostHit:
        """All but the first `count` blocks."""
        return HostHit(
            self.host_blocks[count:], self.lookup_keys[count:], self.block_hashes[count:]
        )

    def __add__(self, more: HostHit) -> HostHit:
        """Both hits as one; `more` follows this one in the prompt."""
        return HostHit(
            self.host_blocks + more.host_blocks,
            self.lookup_keys + more.lookup_keys,
            self.block_hashes + more.block_hashes,
        )


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """A device block to be stored before it is handed out anew; nothing writes to it meanwhile."""

    block: int
    lookup_key: bytes
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class TierEvents:
    """What happened since the previous poll. Each transfer id is listed once.

    Attributes:
        loaded: loads whose layers are all on the device.
        failed: loads of which some bytes never arrived, aborted ones included. Nothing is written
            to their blocks any more.
        stored: finished stores, successful or not: their blocks are not read any more.
    """

    loaded: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)


class HostTier(Protocol):
    """Called by the thread of the step loop only. No method but `wait` blocks for longer than
    microseconds."""

    def match(self, parent_hash: bytes, contents: Iterable[bytes]) -> HostHit:
        """Looks up the blocks that follow `parent_hash`, up to the first that host memory does not
        hold, and pins them. A match counts as a use for the eviction order.

        Args:
            contents: token bytes of one block after the other; read no further than needed.
        """
        ...

    def release(self, hit: HostHit) -> None:
        """Unpins a hit, or the end of one, that will not be loaded."""
        ...

    def load(
        self, hit: HostHit, blocks: NDArray[np.int64], after_step: int, compute: float | None
    ) -> int:
        """Starts copying a hit to the device and returns the transfer id. The host blocks are
        unpinned when the load has ended.

        Args:
            blocks: [N] device blocks, one for each host block; nothing else may use them before
                the load has ended.
            after_step: number of the last step that may still read or write one of them; 0: none.
            compute: expected seconds to compute the tokens behind the hit; 0: unknown; None: the
                next part of the same prefix is loaded right after this one.
        """
        ...

    def abort(self, transfer_id: int) -> None:
        """Stops a load that is no longer needed. Copies already submitted still run; the load then
        ends as failed, or as loaded if it was complete."""
        ...

    def store(self, candidates: Sequence[EvictionCandidate]) -> tuple[int, int]:
        """Starts copying blocks to host memory, in order, as far as there is room.

        Returns:
            How many of the first candidates were taken, and the transfer id, 0 if none has to be
            copied. Taken blocks that host memory holds already are not copied, but belong to the
            transfer too.
        """
        ...

    def holds(self, lookup_key: bytes) -> bool:
        """Whether a block is in host memory or being stored."""
        ...

    def wants(self, block_hash: bytes) -> bool:
        """Whether a block was used by enough requests to be stored when the device evicts it."""
        ...

    def add_use_counts(self, uses: Mapping[bytes, int]) -> None:
        """Adds to the use counts of blocks: block hash to the number of requests that have begun
        to use it since the previous call."""
        ...

    def device_evicted(self, entries: Iterable[tuple[bytes, bytes]]) -> None:
        """Notes that the device evicted blocks: (lookup key, block hash) of each. Of those that are
        not in host memory, the descendants there are dropped."""
        ...

    def take_host_evicted(self) -> list[tuple[bytes, bytes]]:
        """Returns and clears the blocks that host memory evicted: (lookup key, block hash). If the
        device does not hold them either, their descendants there are unreachable."""
        ...

    def step_launched(self, number: int) -> None:
        """Called after all device work of step `number` was put on the current stream."""
        ...

    def seconds_left(self, transfer_ids: Iterable[int]) -> float:
        """Seconds until the last of these loads ends, by the bytes queued up to its end and the
        measured rate; 0.0 if all have ended."""
        ...

    def seconds_ahead(self, transfer_ids: Iterable[int]) -> float:
        """The part of `seconds_left` spent on other loads, which run before these."""
        ...

    def worth_loading(self, hit: HostHit, start: int, rest: int) -> int:
        """How many of a hit's first blocks are loaded in less time than computing them takes.

        Args:
            start: tokens before the hit. rest: tokens of the prompt behind it.
        """
        ...

    def poll(self, finished: Iterable[int] = ()) -> TierEvents:
        """Collects ended transfers.

        Args:
            finished: loads that a finished step read. Their last layer-ready flag is set, so their
                end is waited for (microseconds); none of them is under way afterwards.
        """
        ...

    def wait(self, seconds: float) -> None:
        """Sleeps until any transfer ends, for at most `seconds`."""
        ...

    def clear(self) -> None:
        """Forgets all blocks; transfers under way still end."""
        ...

    def metrics(self) -> dict[str, float]:
        """Counters since start, by name."""
        ...

    def shut_down(self) -> None:
        """Ends all copies and frees the host memory."""
        ...
