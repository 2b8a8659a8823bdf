"""Which full KV blocks hold which tokens.

A block's key is SHA-256 over (parent key, its tokens as little-endian int32), so a key names the
whole prefix up to and including its block; the root holds what else must match (adapter, salt).
Published blocks are found by what their key is the hash of: parent key and tokens, compared byte
by byte. So a hit hashes nothing, and only blocks that are published for the first time do.

A block is of no use without those before it. Sequences that compute one prefix at the same time
have *twins*: one block is found (its holder), and the others stand by, as long as they have
readers. So what a running sequence publishes always follows something that is published, too.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

_KEY_BYTES = 32  # SHA-256: what a source begins with
_TOKENS_AT_ONCE = 2048
"""Tokens turned into bytes in one go: a prompt that is not cached stops the search early."""


def root_key(extras: tuple[str, ...] = ()) -> bytes:
    """Key before the first block: depends on everything but tokens that makes KV differ."""
    return sha256("\x00".join(("hetero_llm", *extras)).encode()).digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of a full block that follows `parent`."""
    return sha256(parent + token_bytes(token_ids)).digest()


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Tokens as they enter a key: 4 bytes each, little-endian, signed.

    Raises:
        struct.error: a token is no integer of 32 bits.
    """
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def block_contents(
    token_ids: Sequence[int], block_size: int, first: int, last: int, packed: bytes = b""
) -> Iterator[bytes]:
    """The token bytes of blocks `first .. last - 1` of a sequence, one after the other.

    Args:
        packed: `token_bytes` of the first tokens, as many as are at hand.
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
class _LastFound:
    """What was found last, good as long as nothing has been evicted since.

    Attributes:
        matched: token bytes of `blocks`.
    """

    root: bytes
    matched: bytes
    blocks: list[int]
    keys: list[bytes]
    evictions: int


class PrefixCache:
    """Map between prefixes and blocks, both ways. Says nothing about who uses a block.

    The dictionaries hold nothing but bytes and integers, which the garbage collector never visits.
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}  # by parent key + token bytes
        self._source_of: dict[int, bytes] = {}  # block to its entry in `_block_of`
        self._key_of: dict[int, bytes] = {}
        self._child_of: dict[bytes, int] = {}  # by parent key: one of the blocks that follow it
        self._more_of: dict[bytes, set[int]] = {}  # the others, where prompts part
        self._twin_of: dict[int, bytes] = {}  # unpublished block to what it could be found by
        self._twins: dict[bytes, set[int]] = {}  # the other way round
        self._evictions = 0
        self._last: _LastFound | None = None

    def find(
        self, root: bytes, token_ids: Sequence[int], block_size: int, packed: bytes = b""
    ) -> tuple[list[int], list[bytes]]:
        """`match` of a sequence's full blocks. Requests with one long prefix come in bursts, so
        what begins like the sequence before is compared with that, which is much faster.

        Args:
            packed: `token_bytes` of the first tokens, as many as are at hand: what is compared.

        Returns:
            The blocks found and their keys, neither to be changed: who begins like the sequence
            before and goes on otherwise gets the same lists.
        """
        last, width = self._last, 4 * block_size
        known = 0
        if last is not None and last.evictions == self._evictions and last.root == root:
            known = _num_common(packed, last.matched, width)
        blocks = last.blocks[:known] if last is not None else []
        keys = last.keys[:known] if last is not None else []
        contents = block_contents(
            token_ids, block_size, known, len(token_ids) // block_size, packed
        )
        more, more_keys = self.match(keys[-1] if keys else root, contents)
        if last is not None and not more and known == len(last.blocks):
            return last.blocks, last.keys
        blocks += more
        keys += more_keys
        kept = min(len(blocks), len(packed) // width)
        whole = kept == len(blocks)
        self._last = _LastFound(
            root,
            packed[: kept * width],
            blocks if whole else blocks[:kept],
            keys if whole else keys[:kept],
            self._evictions,
        )
        return blocks, keys

    def match(self, root: bytes, contents: Iterable[bytes]) -> tuple[list[int], list[bytes]]:
        """Looks up the leading blocks of a sequence, up to the first that is not published.

        Args:
            root: `root_key` of the sequence.
            contents: token bytes of one block after the other; read no further than needed.

        Returns:
            The blocks found and their keys.
        """
        block_of, key_of = self._block_of, self._key_of
        blocks: list[int] = []
        keys: list[bytes] = []
        parent = root
        for content in contents:
            block = block_of.get(parent + content)
            if block is None:
                break
            parent = key_of[block]
            blocks.append(block)
            keys.append(parent)
        return blocks, keys

    def publish(
        self, parent: bytes, contents: Iterable[bytes], blocks: Iterable[int]
    ) -> list[bytes]:
        """Publishes blocks that follow each other, the first one after `parent`.

        A block whose prefix another block already holds stays unpublished: a twin.

        Args:
            parent: key of the block before, or the root key.
            contents: token bytes of each block.

        Returns:
            The key of each block.
        """
        keys: list[bytes] = []
        for content, block in zip(contents, blocks, strict=True):
            source = parent + content
            holder = self._block_of.get(source)
            if holder is None:
                assert block not in self._key_of, "a block is published once"
                key = sha256(source).digest()
                self._block_of[source] = block
                self._source_of[block] = source
                self._key_of[block] = key
                if self._child_of.setdefault(parent, block) != block:
                    self._more_of.setdefault(parent, set()).add(block)
                parent = key
            else:
                parent = self._key_of[holder]
                if holder != block:
                    self._add_twin(source, block)
            keys.append(parent)
        return keys

    def adopt(self, sources: Iterable[bytes], keys: Iterable[bytes], blocks: Iterable[int]) -> None:
        """Publishes blocks that follow each other, whose entries are known: what `entry` told of
        them once.

        A block whose prefix another block already holds stays unpublished: a twin.
        """
        block_of, source_of, key_of, child_of = (
            self._block_of, self._source_of, self._key_of, self._child_of,
        )  # fmt: skip
        parent = b""
        for source, key, block in zip(sources, keys, blocks, strict=True):
            parent, before = key, parent or source[:_KEY_BYTES]
            if source in block_of:
                self._add_twin(source, block)
                continue
            assert block not in key_of, "a block is published once"
            block_of[source] = block
            source_of[block] = source
            key_of[block] = key
            if child_of.setdefault(before, block) != block:
                self._more_of.setdefault(before, set()).add(block)

    def entry(self, block: int) -> tuple[bytes, bytes]:
        """What a published block is found by (parent key + token bytes), and its key."""
        return self._source_of[block], self._key_of[block]

    def evict(self, block: int) -> tuple[bytes, bytes] | None:
        """Forgets `block` before it is written anew; harmless if it was never published. If it has
        a twin, that one is found from now on.

        Returns:
            Its `entry`, if it had one by which nothing is found any more.
        """
        key = self._key_of.pop(block, None)
        if key is None:
            if block in self._twin_of:
                self._end_twin(block)
            return None
        self._evictions += 1
        source = self._source_of.pop(block)
        del self._block_of[source]
        parent = source[:_KEY_BYTES]
        if parent in self._more_of:
            self._leave(parent, block)
        else:
            del self._child_of[parent]
        if source in self._twins:
            heir = min(self._twins[source])
            self._end_twin(heir)
            self.adopt([source], [key], [heir])
            return None
        return source, key

    def unread(self, block: int) -> int | None:
        """`block` lost its last reader. If it has twins, one of them is found instead. If it is a
        twin, it stands by no longer: returns the block that is found, which counts as used now."""
        if block in self._twin_of:
            return self._block_of[self._end_twin(block)]
        if self._twins and self._source_of.get(block) in self._twins:
            self.evict(block)
        return None

    def finds(self, source: bytes) -> bool:
        """Whether a block is found by `source`."""
        return source in self._block_of

    def children(self, key: bytes) -> list[int]:
        """Published blocks that follow the one with this key."""
        first = self._child_of.get(key)
        return [] if first is None else [first, *self._more_of.get(key, ())]

    def holds(self, block: int) -> bool:
        """Whether a published prefix is in `block`."""
        return block in self._key_of

    def unpublished(self, blocks: Iterable[int]) -> list[int]:
        """Those of `blocks` that hold no published prefix, in their order."""
        return [block for block in blocks if block not in self._key_of]

    def clear(self) -> None:
        self._evictions += 1
        self._block_of.clear()
        self._source_of.clear()
        self._key_of.clear()
        for links in (self._child_of, self._more_of, self._twin_of, self._twins):
            links.clear()

    @property
    def twins(self) -> Collection[int]:
        """Blocks that stand by, to be found once another one is gone."""
        return self._twin_of.keys()

    def _leave(self, parent: bytes, block: int) -> None:
        """A block follows its parent no longer; others do."""
        more = self._more_of[parent]
        if self._child_of[parent] == block:
            self._child_of[parent] = more.pop()
        else:
            more.remove(block)
        if not more:
            del self._more_of[parent]

    def _add_twin(self, source: bytes, block: int) -> None:
        self._twin_of[block] = source
        self._twins.setdefault(source, set()).add(block)

    def _end_twin(self, block: int) -> bytes:
        """What it could have been found by."""
        source = self._twin_of.pop(block, b"")
        if source:
            twins = self._twins[source]
            twins.remove(block)
            if not twins:
                del self._twins[source]
        return source

    def __len__(self) -> int:
        return len(self._key_of)


def _num_common(one: bytes, other: bytes, width: int) -> int:
    """How many leading pieces of `width` bytes are the same."""
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
