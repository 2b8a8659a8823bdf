"""Events that say which KV blocks later prompts can find, as they come and go: for routers that
follow the caches of several engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

GPU, CPU = "GPU", "CPU"
"""Where a block is, in vLLM's words: on the device that computes, which may be a CPU, or in host
memory behind it."""


class KvEvents(Protocol):
    """Called by the thread of the step loop, in the order of the changes.

    A block is named by its hash; its lookup key is the parent's hash and its tokens
    (`kv_cache.prefix_cache`).

    Attributes:
        is_on: events are published; if not, callers may leave the calls out.
    """

    is_on: bool

    def stored(self, medium: str, entries: Sequence[tuple[bytes, bytes]]) -> None:
        """Blocks can be found now: (lookup key, hash) of each, none of which that medium had."""

    def removed(self, medium: str, block_hashes: Iterable[bytes]) -> None:
        """Blocks cannot be found on this medium any more, on which they were."""

    def cleared(self) -> None:
        """No block can be found on any medium any more."""


class NoKvEvents:
    """The null object of an engine that publishes no events."""

    is_on = False

    def stored(self, medium: str, entries: Sequence[tuple[bytes, bytes]]) -> None:
        pass

    def removed(self, medium: str, block_hashes: Iterable[bytes]) -> None:
        pass

    def cleared(self) -> None:
        pass
