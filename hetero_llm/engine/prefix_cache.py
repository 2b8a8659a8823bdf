"""Which full KV blocks hold which tokens.

A block's key is SHA-256 over (parent key, its tokens), so a key names the whole prefix up to and
including its block; the root holds what else must match (adapter, salt). Collisions cannot be
found, hence no token comparison on a hit.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256


def root_key(extras: tuple[str, ...] = ()) -> bytes:
    """Key before the first block: depends on everything but tokens that makes KV differ."""
    return sha256("\x00".join(("hetero_llm", *extras)).encode()).digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of a full block that follows `parent`."""
    return sha256(parent + array("q", token_ids).tobytes()).digest()


class PrefixCache:
    """Two-way map between keys and blocks. Says nothing about who uses a block."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def lookup(self, key: bytes) -> int | None:
        return self._block_of.get(key)

    def insert(self, key: bytes, block: int) -> bool:
        """Publishes `block` under `key`; False if another block already holds the same tokens."""
        if key in self._block_of:
            return False
        assert block not in self._key_of, "a block is published once"
        self._block_of[key] = block
        self._key_of[block] = key
        return True

    def evict(self, block: int) -> None:
        """Forgets `block` before it is written anew; harmless if it was never published."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]

    def holds(self, block: int) -> bool:
        return block in self._key_of

    def clear(self) -> None:
        self._block_of.clear()
        self._key_of.clear()

    def __len__(self) -> int:
        return len(self._key_of)
