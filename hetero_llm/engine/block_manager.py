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

from hetero_llm.engine.prefix_cache import PrefixCache, block_contents


@dataclass(slots=True)
class _Table:
    blocks: list[int]
    keys: list[bytes]  # of the leading blocks that are full and hashed
    root: bytes
    maybe_shared: bool = False  # forked: blocks still to be written may have other readers


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

    Attributes:
        room: of each open table, how many leading positions `grow` need not be asked for.
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
        self.room: dict[int, int] = {}
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

        At least the last token is left to compute, since its row gives the next token. If its block
        is held too, it is taken all the same: `grow` will give the table a copy to write to.

        Returns:
            Number of tokens whose KV is there already: a multiple of the block size, or all but
            the last one.
        """
        assert table not in self._tables
        entry = _Table([], [], root)
        self._tables[table] = entry
        self.room[table] = 0
        if self._prefix is None or not reuse:
            return 0
        size = self.block_size
        contents = block_contents(token_ids, size, 0, len(token_ids) // size)
        blocks, entry.keys = self._prefix.match(root, contents)
        refs, free = self._refs, self._free
        for block in blocks:
            if not refs[block]:
                del free[block]
            refs[block] += 1
        self._append(table, entry, blocks)
        if len(blocks) * size < len(token_ids):
            return len(blocks) * size
        entry.keys.pop()  # of the block that will be a private copy
        entry.maybe_shared = True
        self.room[table] = 0
        return len(token_ids) - 1

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
        last = min(self.blocks_for(num_tokens), len(entry.blocks))
        if entry.maybe_shared:
            first = num_computed // size
            shared = [c for c in range(first, last) if self._is_read_only(entry.blocks[c])]
        if max(missing, 0) + len(shared) > len(self._free):
            return False
        for column in shared:
            self._copy_on_write(table, entry, column)
        if entry.maybe_shared:  # blocks grown for rejected drafts may lie behind those looked at
            entry.maybe_shared = any(self._refs[block] > 1 for block in entry.blocks[last:])
        if missing > 0:
            self._append(table, entry, [self._pop_free() for _ in range(missing)])
        elif not entry.maybe_shared:
            self.room[table] = len(entry.blocks) * size
        return True

    def commit(self, table: int, token_ids: Sequence[int], num_computed: int) -> None:
        """Publishes every block that is full of computed tokens, for later prefix hits."""
        if self._prefix is None:
            return
        entry = self._tables[table]
        first, last = len(entry.keys), num_computed // self.block_size
        if first < last:
            parent = entry.keys[-1] if entry.keys else entry.root
            contents = block_contents(token_ids, self.block_size, first, last)
            entry.keys += self._prefix.publish(parent, contents, entry.blocks[first:last])

    def fork(self, source: int, table: int) -> None:
        """Starts `table` as a reader of all of `source`'s blocks."""
        assert table not in self._tables
        origin = self._tables[source]
        copy = _Table([], list(origin.keys), origin.root, maybe_shared=True)
        self._tables[table] = copy
        origin.maybe_shared = True
        self.room[source] = 0
        for block in origin.blocks:
            self._refs[block] += 1
        self._append(table, copy, origin.blocks)

    def close(self, table: int) -> None:
        """Ends a table. Its blocks without other readers become free, the tail to go first:
        a prefix is useless once its head is gone."""
        entry = self._tables.pop(table)
        del self.room[table]
        refs = self._refs
        freed: list[int] = []
        for block in reversed(entry.blocks):
            refs[block] -= 1
            assert refs[block] >= 0, "a block was freed twice"
            if not refs[block]:
                freed.append(block)
        for block in freed:
            self._free[block] = None
        for block in freed if self._prefix is None else self._prefix.unpublished(freed):
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
        for table, entry in self._tables.items():
            held = 0 if entry.maybe_shared else len(entry.blocks) * self.block_size
            assert self.room[table] == held, "room differs from the blocks"

    def _is_read_only(self, block: int) -> bool:
        """Whether others read it now, or may find it later."""
        published = self._prefix is not None and self._prefix.holds(block)
        return self._refs[block] > 1 or published

    def _pop_free(self) -> int:
        block, _ = self._free.popitem(last=False)
        if self._prefix is not None:
            self._prefix.evict(block)
        self._refs[block] = 1
        return block

    def _append(self, table: int, entry: _Table, blocks: list[int]) -> None:
        first = len(entry.blocks)
        entry.blocks.extend(blocks)
        self.room[table] = 0 if entry.maybe_shared else len(entry.blocks) * self.block_size
        changes = self._changes
        changes.tables.extend([table] * len(blocks))
        changes.columns.extend(range(first, len(entry.blocks)))
        changes.blocks.extend(blocks)

    def _copy_on_write(self, table: int, entry: _Table, column: int) -> None:
        old = entry.blocks[column]
        new = self._pop_free()
        self._refs[old] -= 1
        if not self._refs[old]:  # nobody but the prefix cache: it may be handed out in this very
            self._free[old] = None  # step, whose copies come before its rows
        entry.blocks[column] = new
        self._changes.tables.append(table)
        self._changes.columns.append(column)
        self._changes.blocks.append(new)
        self._changes.copy_from.append(old)
        self._changes.copy_to.append(new)
