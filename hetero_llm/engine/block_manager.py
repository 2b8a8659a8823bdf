"""Block tables and reference counts of the paged KV cache. Bookkeeping only: no tensor, no torch.

A block is free (reference count 0), or held by one or more tables. Free blocks wait in eviction
order, oldest first; those that still hold a published prefix keep it until they are handed out, so
a later request can take them back. Tables share blocks after a prefix hit or a fork; a shared
block is never written: `grow` gives the writer a copy first (copy-on-write).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetero_llm.engine.prefix_cache import PrefixCache, block_key


@dataclass(slots=True)
class _Table:
    blocks: list[int]
    keys: list[bytes]  # of the leading blocks that are full and hashed
    root: bytes
    maybe_shared: bool = False  # forked: the block to be written next may have other readers


@dataclass(slots=True)
class TableChanges:
    """Changes since the last `take_changes`, for the runner: entries and whole-block copies."""

    tables: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    copy_from: list[int] = field(default_factory=list)
    copy_to: list[int] = field(default_factory=list)


class BlockManager:
    """Hands out KV blocks to tables named by an integer (the sequence's slot).

    Args:
        num_blocks: Blocks in the pool.
        block_size: Tokens in a block.
        prefix_cache: None turns prefix caching off.
    """

    def __init__(
        self, num_blocks: int, block_size: int, prefix_cache: PrefixCache | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix = prefix_cache
        self._refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._tables: dict[int, _Table] = {}
        self._changes = TableChanges()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def block_ids(self, table: int) -> tuple[int, ...]:
        return tuple(self._tables[table].blocks)

    def open(self, table: int, token_ids: Sequence[int], root: bytes, reuse: bool = True) -> int:
        """Starts a table and takes every leading block that the prefix cache holds.

        At least the last token is left to compute, since its row gives the next token.

        Returns:
            Number of tokens whose KV is there already (a multiple of the block size).
        """
        assert table not in self._tables
        entry = _Table([], [], root)
        self._tables[table] = entry
        if self._prefix is None or not reuse:
            return 0
        size = self.block_size
        key = root
        for first in range(0, (len(token_ids) - 1) // size * size, size):
            key = block_key(key, token_ids[first : first + size])
            block = self._prefix.lookup(key)
            if block is None:
                break
            self._take(block)
            self._append(table, entry, block)
            entry.keys.append(key)
        return len(entry.blocks) * size

    def grow(self, table: int, num_computed: int, num_tokens: int) -> bool:
        """Makes positions `num_computed .. num_tokens - 1` writable.

        Returns:
            False if there are not enough free blocks; then nothing has changed.
        """
        entry = self._tables[table]
        size = self.block_size
        missing = self.blocks_for(num_tokens) - len(entry.blocks)
        if missing <= 0 and not entry.maybe_shared:
            return True
        shared: list[int] = []
        if entry.maybe_shared:
            first = num_computed // size
            last = min(self.blocks_for(num_tokens), len(entry.blocks))
            shared = [c for c in range(first, last) if self._refs[entry.blocks[c]] > 1]
        if max(missing, 0) + len(shared) > len(self._free):
            return False
        for column in shared:
            self._copy_on_write(table, entry, column)
        for _ in range(missing):
            self._append(table, entry, self._pop_free())
        # Only the partly filled last block of a fork can ever be written while shared.
        entry.maybe_shared = False
        return True

    def commit(self, table: int, token_ids: Sequence[int], num_computed: int) -> None:
        """Publishes every block that is full of computed tokens, for later prefix hits."""
        if self._prefix is None:
            return
        entry = self._tables[table]
        size = self.block_size
        key = entry.keys[-1] if entry.keys else entry.root
        for column in range(len(entry.keys), num_computed // size):
            key = block_key(key, token_ids[column * size : (column + 1) * size])
            entry.keys.append(key)
            self._prefix.insert(key, entry.blocks[column])

    def fork(self, source: int, table: int) -> None:
        """Starts `table` as a reader of all of `source`'s blocks."""
        assert table not in self._tables
        origin = self._tables[source]
        copy = _Table([], list(origin.keys), origin.root, maybe_shared=True)
        self._tables[table] = copy
        origin.maybe_shared = True
        for block in origin.blocks:
            self._refs[block] += 1
            self._append(table, copy, block)

    def close(self, table: int) -> None:
        """Ends a table. Its blocks without other readers become free, the tail to go first:
        a prefix is useless once its head is gone."""
        entry = self._tables.pop(table)
        for block in reversed(entry.blocks):
            self._refs[block] -= 1
            assert self._refs[block] >= 0, "a block was freed twice"
            if self._refs[block] == 0:
                self._free[block] = None
                if self._prefix is None or not self._prefix.holds(block):
                    self._free.move_to_end(block, last=False)

    def take_changes(self) -> TableChanges:
        """Everything the runner has to apply before the next step; forgotten here afterwards."""
        changes, self._changes = self._changes, TableChanges()
        return changes

    def reset_prefix_cache(self) -> None:
        """Forgets all published prefixes; running tables keep their blocks."""
        if self._prefix is not None:
            self._prefix.clear()

    def check_integrity(self) -> None:
        """Asserts that every block is either free or counted exactly by its tables."""
        counted = [0] * self.num_blocks
        for entry in self._tables.values():
            for block in entry.blocks:
                counted[block] += 1
        assert counted == self._refs, "reference counts differ from the tables"
        free = {block for block, refs in enumerate(counted) if refs == 0}
        assert free == set(self._free), "the free list differs from the reference counts"

    def _take(self, block: int) -> None:
        if self._refs[block] == 0:
            del self._free[block]
        self._refs[block] += 1

    def _pop_free(self) -> int:
        block, _ = self._free.popitem(last=False)
        if self._prefix is not None:
            self._prefix.evict(block)
        self._refs[block] = 1
        return block

    def _append(self, table: int, entry: _Table, block: int) -> None:
        self._note(table, len(entry.blocks), block)
        entry.blocks.append(block)

    def _note(self, table: int, column: int, block: int) -> None:
        self._changes.tables.append(table)
        self._changes.columns.append(column)
        self._changes.blocks.append(block)

    def _copy_on_write(self, table: int, entry: _Table, column: int) -> None:
        old = entry.blocks[column]
        new = self._pop_free()
        self._refs[old] -= 1
        entry.blocks[column] = new
        self._note(table, column, new)
        self._changes.copy_from.append(old)
        self._changes.copy_to.append(new)
