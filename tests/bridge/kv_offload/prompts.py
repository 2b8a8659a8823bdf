"""Keys of short prompts over few tokens, as `kv_cache.prefix_cache` makes them."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from itertools import product

from hetero_llm.kv_cache.host_tier import EvictionCandidate

Path = tuple[int, ...]
"""One token for each block."""


def root(salt: str = "") -> bytes:
    return sha256(salt.encode()).digest()


def content(token: int) -> bytes:
    """Token bytes of a block."""
    return bytes([token]) * 16


@cache
def lookup_key_of(path: Path, salt: str = "") -> bytes:
    return hash_of(path[:-1], salt) + content(path[-1])


@cache
def hash_of(path: Path, salt: str = "") -> bytes:
    return sha256(lookup_key_of(path, salt)).digest() if path else root(salt)


def candidate(path: Path, block: int = 0, salt: str = "") -> EvictionCandidate:
    return EvictionCandidate(block, lookup_key_of(path, salt), hash_of(path, salt))


def all_paths(tokens: int, depth: int) -> list[Path]:
    """Every prompt of up to `depth` blocks over so many tokens."""
    return [
        path for length in range(1, depth + 1) for path in product(range(tokens), repeat=length)
    ]
