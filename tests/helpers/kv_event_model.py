"""A cache as a router sees it: what the events leave of it."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

from hetero_llm.core.kv_events import CPU, GPU
from hetero_llm.kv_cache.kv_event_log import PLAIN, AllCleared, BlocksRemoved, BlocksStored, KvEvent
from hetero_llm.kv_cache.prefix_cache import hash_root


class FollowedCaches:
    """
    Attributes:
        held: hashes of the blocks of each medium.
    """

    def __init__(self, block_size: int, roots: Iterable[bytes] = ()) -> None:
        self.held: dict[str, set[bytes]] = {GPU: set(), CPU: set()}
        self._width = 4 * block_size
        self._roots = {hash_root(), *roots}
        self.num_events = 0

    def apply(self, events: Iterable[KvEvent]) -> None:
        """Every event changes something, and a chain's hashes are those of its tokens."""
        for event in events:
            self.num_events += 1
            if isinstance(event, AllCleared):
                for held in self.held.values():
                    held.clear()
            elif isinstance(event, BlocksRemoved):
                assert event.block_hashes
                for block_hash in event.block_hashes:
                    self.held[event.medium].remove(block_hash)
            else:
                self._store(event)

    def _store(self, event: BlocksStored) -> None:
        held = self.held[event.medium]
        parents = self._roots if event.parent_hash is None else {event.parent_hash}
        if event.parent_hash is None and event.root is PLAIN:
            parents = {hash_root()}
        for block_hash, tokens in zip(event.block_hashes, event.tokens, strict=True):
            assert len(tokens) == self._width
            assert block_hash in {sha256(parent + tokens).digest() for parent in parents}
            assert block_hash not in held, "stored twice"
            held.add(block_hash)
            parents = {block_hash}
