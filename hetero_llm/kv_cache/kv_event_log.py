"""Collects the changes of the caches between two publications, as runs of consecutive blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hetero_llm.core.kv_events import CPU, GPU
from hetero_llm.kv_cache.prefix_cache import hash_root

_HASH_BYTES = 32  # a lookup key begins with the parent's hash
_MOST_ROOTS = 1 << 16
_BIT = {GPU: 1, CPU: 2}


@dataclass(frozen=True, slots=True)
class RootInfo:
    """What blocks below a root hash depend on besides tokens.

    Attributes:
        lora_id, lora_name: of the adapter; None: the model alone.
        extra: names all else (a salt, images) without showing it; empty: nothing else.
    """

    lora_id: int | None = None
    lora_name: str | None = None
    extra: str = ""


PLAIN = RootInfo()


@dataclass(slots=True)
class BlocksStored:
    """A chain of blocks that can be found now.

    Attributes:
        parent_hash: of the first block's parent; None: it has none.
        block_hashes: of each block.
        tokens: of all blocks, int32, little-endian.
        root: of the chain.
    """

    medium: str
    parent_hash: bytes | None
    root: RootInfo
    block_hashes: list[bytes] = field(default_factory=list)
    tokens: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class BlocksRemoved:
    medium: str
    block_hashes: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class AllCleared:
    pass


KvEvent = BlocksStored | BlocksRemoved | AllCleared


class KvEventLog:
    """A `KvEvents` that keeps events until they are taken. `name_root` comes before blocks with
    that root."""

    is_on = True

    def __init__(self) -> None:
        self._events: list[KvEvent] = []
        self._roots: OrderedDict[bytes, RootInfo] = OrderedDict([(hash_root(), PLAIN)])
        # Blocks with other roots: what they depend on, and the media that have them (bits).
        self._below: dict[bytes, tuple[RootInfo, int]] = {}

    def name_root(self, root_hash: bytes, root: RootInfo) -> None:
        """Says what a root hash stands for."""
        self._roots[root_hash] = root
        self._roots.move_to_end(root_hash)
        if len(self._roots) > _MOST_ROOTS:
            self._roots.popitem(last=False)
            self._roots[hash_root()] = PLAIN

    def stored(self, medium: str, entries: Sequence[tuple[bytes, bytes]]) -> None:
        for lookup_key, block_hash in entries:
            parent_hash = lookup_key[:_HASH_BYTES]
            root, is_first = self._root_of(parent_hash)
            if root is not PLAIN:
                _, media = self._below.get(block_hash, (root, 0))
                self._below[block_hash] = root, media | _BIT[medium]
            last = self._events[-1] if self._events else None
            follows = (
                isinstance(last, BlocksStored)
                and last.medium == medium
                and last.block_hashes[-1] == parent_hash
            )
            if not follows:
                last = BlocksStored(medium, None if is_first else parent_hash, root)
                self._events.append(last)
            assert isinstance(last, BlocksStored)
            last.block_hashes.append(block_hash)
            last.tokens.append(lookup_key[_HASH_BYTES:])

    def _root_of(self, parent_hash: bytes) -> tuple[RootInfo, bool]:
        """What a block below this parent depends on, and whether the parent is a root."""
        root = self._roots.get(parent_hash)
        if root is not None:
            return root, True
        return self._below.get(parent_hash, (PLAIN, 0))[0], False

    def removed(self, medium: str, block_hashes: Iterable[bytes]) -> None:
        for block_hash in block_hashes:
            if block_hash in self._below:
                root, media = self._below[block_hash]
                self._below[block_hash] = root, media & ~_BIT[medium]
                if not media & ~_BIT[medium]:
                    del self._below[block_hash]
            last = self._events[-1] if self._events else None
            if not (isinstance(last, BlocksRemoved) and last.medium == medium):
                last = BlocksRemoved(medium)
                self._events.append(last)
            last.block_hashes.append(block_hash)

    def cleared(self) -> None:
        self._below.clear()
        self._events.append(AllCleared())

    def take(self) -> list[KvEvent]:
        """Returns and clears the events since the last call."""
        events, self._events = self._events, []
        return events
