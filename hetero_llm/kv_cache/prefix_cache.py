"""Which full KV blocks hold which tokens.

A block's hash is SHA-256 over its parent's hash and its tokens as little-endian int32, so it
identifies the whole prefix up to and including the block. The root hash, parent of the first block,
covers what else must match (adapter, salt). Cached blocks are looked up by the hashed bytes
themselves, the *lookup key* parent hash + token bytes: a hit needs no SHA-256, and only blocks
cached for the first time are hashed.

A block is useless without its ancestors. Where sequences compute one prefix at the same time, one
of the equal blocks is the *canonical* one, which later requests find; the others are *duplicates*,
kept in reserve as long as they are referenced. So the parent of whatever a running sequence caches
is always cached, too.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

from hetero_llm.core.kv_events import GPU, KvEvents, NoKvEvents

_HASH_BYTES = 32
"""Of SHA-256. A lookup key begins with the parent's hash."""
_TOKENS_AT_ONCE = 2048
"""Tokens converted to bytes in one go: a lookup that misses stops early."""


def hash_root(extras: tuple[str, ...] = ()) -> bytes:
    """Hash before the first block, over everything but tokens that makes KV differ. The length of
    each extra comes before it, so none can imitate several."""
    parts = [b"hetero_llm"]
    for extra in map(str.encode, extras):
        parts += [struct.pack("<Q", len(extra)), extra]
    return sha256(b"".join(parts)).digest()


def hash_block(parent_hash: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of the full block with `token_ids` behind `parent_hash`."""
    return sha256(parent_hash + token_bytes(token_ids)).digest()


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Tokens as they are hashed: 4 bytes each, little-endian, signed.

    Raises:
        struct.error: a token is no integer of 32 bits.
    """
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def block_contents(
    token_ids: Sequence[int], block_size: int, first: int, last: int, packed: bytes = b""
) -> Iterator[bytes]:
    """Yields the token bytes of blocks `first .. last - 1` of a sequence.

    Args:
        packed: `token_bytes` of some of the first tokens, to save converting them.
    """
    width = 4 * block_size
    ready = min(len(packed) // width, last)
    for at in range(first * width, ready * width, width):
        yield packed[at : at + width]
    piece = max(_TOKENS_AT_ONCE // block_size, 1)
    for start in range(max(first, ready), last, piece):
        end = min(start + piece, last)
        content = token_bytes(token_ids[start * block_size : end * block_size])
        assert len(content) == (end - start) * width, "a block that is not full"
        for at in range(0, len(content), width):
            yield content[at : at + width]


@dataclass(slots=True)
class _LastMatch:
    """The previous lookup's result; valid until a block is evicted.

    Attributes:
        matched: token bytes of `blocks`.
    """

    root_hash: bytes
    matched: bytes
    blocks: list[int]
    block_hashes: list[bytes]
    evictions: int


class PrefixCache:
    """Map between prefixes and blocks, both ways. Reference counts are the block manager's.

    The dictionaries hold only bytes and integers, which the garbage collector never visits.

    Args:
        events: called when a prefix can be found, and when it cannot any more; None: no events.
    """

    def __init__(self, events: KvEvents | None = None) -> None:
        self._events: KvEvents = events or NoKvEvents()
        self._block_of: dict[bytes, int] = {}  # by lookup key
        self._lookup_key_of: dict[int, bytes] = {}  # the other way round
        self._hash_of: dict[int, bytes] = {}
        self._child_of: dict[bytes, int] = {}  # by parent hash: one of its child blocks
        self._more_children: dict[bytes, set[int]] = {}  # the others, where prompts diverge
        self._duplicate_key: dict[int, bytes] = {}  # duplicate block to its lookup key
        self._duplicates_of: dict[bytes, set[int]] = {}  # the other way round
        self._evictions = 0
        self._last: _LastMatch | None = None

    def find(
        self, root_hash: bytes, token_ids: Sequence[int], block_size: int, packed: bytes = b""
    ) -> tuple[list[int], list[bytes]]:
        """`match` for a sequence's full blocks. Requests with one long prefix come in bursts, so
        the tokens are first compared with those of the previous lookup, which is much faster.

        Args:
            packed: `token_bytes` of some of the first tokens; only these are compared.

        Returns:
            The blocks found and their hashes. The lists are shared with later calls: not to be
            changed.
        """
        last, width = self._last, 4 * block_size
        known = 0
        if last is not None and last.evictions == self._evictions and last.root_hash == root_hash:
            known = _num_common(packed, last.matched, width)
        blocks = last.blocks[:known] if last is not None else []
        hashes = last.block_hashes[:known] if last is not None else []
        contents = block_contents(
            token_ids, block_size, known, len(token_ids) // block_size, packed
        )
        more, more_hashes = self.match(hashes[-1] if hashes else root_hash, contents)
        if last is not None and not more and known == len(last.blocks):
            return last.blocks, last.block_hashes
        blocks += more
        hashes += more_hashes
        kept = min(len(blocks), len(packed) // width)
        whole = kept == len(blocks)
        self._last = _LastMatch(
            root_hash,
            packed[: kept * width],
            blocks if whole else blocks[:kept],
            hashes if whole else hashes[:kept],
            self._evictions,
        )
        return blocks, hashes

    def match(self, parent_hash: bytes, contents: Iterable[bytes]) -> tuple[list[int], list[bytes]]:
        """Looks up the blocks that follow `parent_hash`, up to the first that is not cached.

        Args:
            contents: token bytes of one block after the other; read no further than needed.

        Returns:
            The blocks found and their hashes.
        """
        block_of, hash_of = self._block_of, self._hash_of
        blocks: list[int] = []
        hashes: list[bytes] = []
        for content in contents:
            block = block_of.get(parent_hash + content)
            if block is None:
                break
            parent_hash = hash_of[block]
            blocks.append(block)
            hashes.append(parent_hash)
        return blocks, hashes

    def cache(
        self, parent_hash: bytes, contents: Iterable[bytes], blocks: Iterable[int]
    ) -> list[bytes]:
        """Caches consecutive blocks, the first one behind `parent_hash`. A block whose prefix
        another block already holds becomes a duplicate.

        Args:
            contents: token bytes of each block.

        Returns:
            The hash of each block.
        """
        hashes: list[bytes] = []
        new: list[tuple[bytes, bytes]] = []
        notes = self._events.is_on
        for content, block in zip(contents, blocks, strict=True):
            lookup_key = parent_hash + content
            canonical = self._block_of.get(lookup_key)
            if canonical is None:
                assert block not in self._hash_of, "a block is cached once"
                block_hash = sha256(lookup_key).digest()
                self._block_of[lookup_key] = block
                self._lookup_key_of[block] = lookup_key
                self._hash_of[block] = block_hash
                if self._child_of.setdefault(parent_hash, block) != block:
                    self._more_children.setdefault(parent_hash, set()).add(block)
                if notes:
                    new.append((lookup_key, block_hash))
                parent_hash = block_hash
            else:
                parent_hash = self._hash_of[canonical]
                if canonical != block:
                    self._add_duplicate(lookup_key, block)
            hashes.append(parent_hash)
        if new:
            self._events.stored(GPU, new)
        return hashes

    def cache_hashed(
        self, lookup_keys: Iterable[bytes], block_hashes: Iterable[bytes], blocks: Iterable[int]
    ) -> None:
        """Caches consecutive blocks whose `entry` is known from earlier. A block whose prefix
        another block already holds becomes a duplicate."""
        new = self._insert_hashed(lookup_keys, block_hashes, blocks)
        if new and self._events.is_on:
            self._events.stored(GPU, new)

    def _insert_hashed(
        self, lookup_keys: Iterable[bytes], block_hashes: Iterable[bytes], blocks: Iterable[int]
    ) -> list[tuple[bytes, bytes]]:
        """Returns `entry` of the blocks that are no duplicates."""
        new: list[tuple[bytes, bytes]] = []
        block_of, lookup_key_of, hash_of, child_of = (
            self._block_of, self._lookup_key_of, self._hash_of, self._child_of,
        )  # fmt: skip
        parent_hash = b""
        for lookup_key, block_hash, block in zip(lookup_keys, block_hashes, blocks, strict=True):
            parent_hash, before = block_hash, parent_hash or lookup_key[:_HASH_BYTES]
            if lookup_key in block_of:
                self._add_duplicate(lookup_key, block)
                continue
            assert block not in hash_of, "a block is cached once"
            block_of[lookup_key] = block
            lookup_key_of[block] = lookup_key
            hash_of[block] = block_hash
            if child_of.setdefault(before, block) != block:
                self._more_children.setdefault(before, set()).add(block)
            new.append((lookup_key, block_hash))
        return new

    def entry(self, block: int) -> tuple[bytes, bytes]:
        """Lookup key and hash of a cached block."""
        return self._lookup_key_of[block], self._hash_of[block]

    def evict(self, blocks: Iterable[int]) -> list[tuple[bytes, bytes]]:
        """Forgets blocks before they are written anew; those not cached are skipped. A duplicate
        of an evicted block, if there is one, becomes canonical.

        Returns:
            `entry` of each evicted block that no duplicate replaces.
        """
        evicted = []
        for block in blocks:
            block_hash = self._hash_of.pop(block, None)
            if block_hash is None:
                if block in self._duplicate_key:
                    self._remove_duplicate(block)
                continue
            self._evictions += 1
            lookup_key = self._lookup_key_of.pop(block)
            del self._block_of[lookup_key]
            parent_hash = lookup_key[:_HASH_BYTES]
            if parent_hash in self._more_children:
                self._remove_child(parent_hash, block)
            else:
                del self._child_of[parent_hash]
            if lookup_key in self._duplicates_of:
                successor = min(self._duplicates_of[lookup_key])
                self._remove_duplicate(successor)
                self._insert_hashed([lookup_key], [block_hash], [successor])
            else:
                evicted.append((lookup_key, block_hash))
        if evicted and self._events.is_on:
            self._events.removed(GPU, [block_hash for _, block_hash in evicted])
        return evicted

    def released(self, block: int) -> int | None:
        """Called when `block` lost its last reference. A canonical block is replaced by one of its
        duplicates, which are referenced. A duplicate is forgotten; its canonical block, which
        counts as just used, is returned."""
        if block in self._duplicate_key:
            return self._block_of[self._remove_duplicate(block)]
        if self._duplicates_of and self._lookup_key_of.get(block) in self._duplicates_of:
            self.evict((block,))
        return None

    def has_key(self, lookup_key: bytes) -> bool:
        """Whether a block is cached under this lookup key."""
        return lookup_key in self._block_of

    def children(self, block_hash: bytes) -> list[int]:
        """Cached blocks whose parent has this hash."""
        first = self._child_of.get(block_hash)
        return [] if first is None else [first, *self._more_children.get(block_hash, ())]

    def hashes(self) -> list[bytes]:
        """Hashes of all canonical blocks."""
        return list(self._hash_of.values())

    def blocks(self) -> list[int]:
        """All canonical blocks."""
        return list(self._hash_of)

    def is_cached(self, block: int) -> bool:
        """Whether `block` is a canonical block."""
        return block in self._hash_of

    def uncached(self, blocks: Iterable[int]) -> list[int]:
        """Those of `blocks` that are not cached, in their order."""
        return [block for block in blocks if block not in self._hash_of]

    def clear(self) -> None:
        """Forgets all blocks."""
        self._evictions += 1
        self._block_of.clear()
        self._lookup_key_of.clear()
        self._hash_of.clear()
        self._child_of.clear()
        self._more_children.clear()
        self._duplicate_key.clear()
        self._duplicates_of.clear()
        self._events.cleared()

    @property
    def duplicates(self) -> Collection[int]:
        """Blocks that replace an equal canonical block once that one is gone."""
        return self._duplicate_key.keys()

    def check_integrity(self) -> None:
        """Asserts that all maps agree and hashes are right; slow."""
        lookup_keys = self._lookup_key_of
        assert self._block_of == {key: block for block, key in lookup_keys.items()}
        hashes = {block: sha256(key).digest() for block, key in lookup_keys.items()}
        assert hashes == self._hash_of, "a hash is not that of its lookup key"
        children: dict[bytes, set[int]] = {}
        for block, lookup_key in lookup_keys.items():
            children.setdefault(lookup_key[:_HASH_BYTES], set()).add(block)
        assert {parent: set(self.children(parent)) for parent in self._child_of} == children

    def _remove_child(self, parent_hash: bytes, block: int) -> None:
        """Removes one of several children."""
        more = self._more_children[parent_hash]
        if self._child_of[parent_hash] == block:
            self._child_of[parent_hash] = more.pop()
        else:
            more.remove(block)
        if not more:
            del self._more_children[parent_hash]

    def _add_duplicate(self, lookup_key: bytes, block: int) -> None:
        self._duplicate_key[block] = lookup_key
        self._duplicates_of.setdefault(lookup_key, set()).add(block)

    def _remove_duplicate(self, block: int) -> bytes:
        """Returns the duplicate's lookup key."""
        lookup_key = self._duplicate_key.pop(block)
        duplicates = self._duplicates_of[lookup_key]
        duplicates.remove(block)
        if not duplicates:
            del self._duplicates_of[lookup_key]
        return lookup_key

    def __len__(self) -> int:
        return len(self._hash_of)


def _num_common(one: bytes, other: bytes, width: int) -> int:
    """Number of leading pieces of `width` bytes that are equal."""
    low, high = 0, min(len(one), len(other)) // width
    if one.startswith(other[: high * width]):
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[: middle * width]):
            low = middle
        else:
            high = middle - 1
    return low
