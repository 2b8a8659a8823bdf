"""Block tables and reference counts of the paged KV cache. Bookkeeping only: no tensor, no torch.

A block is free (reference count 0) or referenced by one or more tables. Free blocks wait in
eviction order, oldest first; those with a cached prefix keep it until they are handed out, so that
a later request can take them back. Tables share blocks after a prefix hit or a fork. A shared block
is never written: `allocate` gives the writer a copy first (copy-on-write).

With host memory behind the cache (`block_transfers`) a block without references may also be in
transfer; it becomes free when its copy has ended.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from hetero_llm.kv_cache.block_transfers import BlockTransfers, NoTransfers
from hetero_llm.kv_cache.hit_log import HitCounter
from hetero_llm.kv_cache.host_tier import HostHit
from hetero_llm.kv_cache.prefix_cache import PrefixCache, block_contents
from hetero_llm.kv_cache.table_changes import TableChanges


@dataclass(frozen=True, slots=True)
class LoadParts:
    """Parts in which a long prefix is looked up in host memory and loaded, so that the link is busy
    while the rest is looked up: looking a block up takes 1 to 3 microseconds, copying it 40.

    Attributes:
        min_blocks: a shorter prefix is one part.
        first: the first part is one block in `first`.
        growth: the second part is `growth` times the first; the rest is the third.
    """

    min_blocks: int = 512
    first: int = 64
    growth: int = 8

    def sizes(self, count: int) -> tuple[int, ...]:
        """Blocks of each part of a prefix of `count` blocks."""
        if count < self.min_blocks:
            return (count,)
        first = count // self.first
        return first, self.growth * first, count - (1 + self.growth) * first


@dataclass(slots=True)
class _Table:
    """
    Attributes:
        hashes: of the leading blocks that are full and hashed.
        packed: token bytes of the prompt, or of its beginning.
        maybe_shared: after a fork: blocks still to be written may be referenced by other tables.
        found: leading blocks that were on the device when the table was started.
        loaded: blocks behind them that come from host memory.
        counted: leading blocks counted in `hits` so far, for an earlier table of the sequence too.
        used: leading blocks whose use was counted.
        admitted: the sequence runs.
        stale: older than the last reset of the prefix cache.
    """

    blocks: list[int]
    hashes: list[bytes]
    root_hash: bytes
    packed: bytes = b""
    maybe_shared: bool = False
    found: int = 0
    loaded: int = 0
    counted: int = 0
    used: int = 0
    admitted: bool = False
    stale: bool = False


# large: tables, free list and reference counts change together
class BlockManager:
    """Hands out KV blocks to tables, which are named by their sequence's request slot.

    Args:
        num_blocks: Blocks in the pool.
        block_size: Tokens in a block.
        prefix_cache: None turns prefix caching off.
        transfers: to and from host memory, over the same `prefix_cache`; None: no host memory.
        load_parts: how a long prefix is loaded.

    Attributes:
        prefix_cache: see Args; without prefix caching an empty one.
        transfers: see Args; without host memory a null object.
        num_writable: of each table, how many leading positions are writable without `allocate`.
        hits: where the blocks of all tables came from.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_cache: PrefixCache | None = None,
        transfers: BlockTransfers | None = None,
        *,
        load_parts: LoadParts | None = None,
    ) -> None:
        assert transfers is None or prefix_cache is not None, "offload stores cached blocks"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._caches_prefixes = prefix_cache is not None
        self.prefix_cache = PrefixCache() if prefix_cache is None else prefix_cache
        self.transfers: BlockTransfers | NoTransfers = transfers or NoTransfers(self.prefix_cache)
        self._load_parts = load_parts or LoadParts()
        self._refs = array("i", bytes(4 * num_blocks))
        self._all_refs = np.frombuffer(self._refs, np.int32)  # the same memory
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._tables: dict[int, _Table] = {}
        self._last_found: tuple[list[int], NDArray[np.int64]] = [], np.zeros(0, np.int64)
        self.num_writable: dict[int, int] = {}
        self._changes = TableChanges()
        self.hits = HitCounter()
        self._steps = 0  # taken by `take_changes`
        self._freed_at = np.zeros(num_blocks, np.int64)  # last step that may touch a free block
        self._copied: set[int] = set()  # blocks in the copies of the step being made
        self._closed: list[tuple[_Table, int]] = []  # and the last step that may touch its blocks

    @property
    def num_free(self) -> int:
        self.release_closed()
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def block_ids(self, table: int) -> tuple[int, ...]:
        return tuple(self._tables[table].blocks)

    # -- tables -----------------------------------------------------------------------------

    def match_prefix(
        self,
        table: int,
        token_ids: Sequence[int],
        root_hash: bytes,
        reuse: bool = True,
        packed: bytes = b"",
    ) -> int:
        """Starts a table with every leading block that the prefix cache holds.

        At least the last token is left to compute, since its logits give the next token. If its
        block is cached too it is taken all the same: `allocate` will replace it by a copy.

        Args:
            reuse: False: take no block.
            packed: `token_bytes` of some of the first tokens, to save converting them.

        Returns:
            Number of tokens with KV: a multiple of the block size, or all but the last one.
        """
        assert table not in self._tables
        entry = _Table([], [], root_hash, packed)
        self._tables[table] = entry
        self.num_writable[table] = 0
        if not reuse or not self._caches_prefixes:
            return 0
        size = self.block_size
        blocks, hashes = self.prefix_cache.find(root_hash, token_ids, size, packed)
        if self._last_found[0] is not blocks:
            self._last_found = blocks, np.array(blocks, np.int64)
        index, entry.hashes = self._last_found[1], hashes.copy()
        if len(index) * size == len(token_ids) and self.transfers.is_loading(blocks[-1]):
            index = index[:-1]  # a block still to be filled cannot be copied yet
            entry.hashes.pop()
        refs = self._all_refs[index]
        free = index[refs == 0].tolist()
        for block in free:
            self._free.pop(block, None)  # it may be in transfer
        self.transfers.mark_used(free)
        self._all_refs[index] = refs + 1
        self._append(table, entry, blocks[: len(index)])
        entry.found = len(index)
        self.transfers.join(table, index)
        if len(index) * size < len(token_ids):
            return len(index) * size
        entry.hashes.pop()  # of the block that will be replaced by a copy
        entry.maybe_shared = True
        self.num_writable[table] = 0
        return len(token_ids) - 1

    def fork(self, source: int, table: int) -> None:
        """Starts `table` with references to all of `source`'s blocks."""
        assert table not in self._tables
        origin = self._tables[source]
        copy = _Table([], list(origin.hashes), origin.root_hash, origin.packed, maybe_shared=True)
        copy.counted, copy.used = len(origin.blocks), len(origin.hashes)
        copy.admitted, copy.stale = True, origin.stale
        self._tables[table] = copy
        origin.maybe_shared = True
        self.num_writable[source] = 0
        self._all_refs[origin.blocks] += 1
        self._append(table, copy, list(origin.blocks))

    def admit(self, table: int, counted: tuple[int, int] = (0, 0)) -> None:
        """Called when a table's sequence begins to run, where there is host memory: sends its
        blocks to the runner and counts them as hits or misses, once.

        Args:
            counted: result of `counted` for the sequence's earlier table.
        """
        entry = self._tables[table]
        entry.counted, entry.used = counted
        entry.admitted = True
        self._changes.runs.append((table, 0, list(entry.blocks)))
        if not entry.counted:
            self.hits.add(entry.found, entry.loaded, 0)
            entry.counted = entry.found + entry.loaded
        self._count_grown(entry)
        self._count_use(entry)

    def counted(self, table: int) -> tuple[int, int]:
        """Numbers of blocks and hashes of a table counted so far, for the sequence's next
        `admit`."""
        entry = self._tables[table]
        return entry.counted, entry.used

    def allocate(self, table: int, num_computed: int, num_tokens: int) -> bool:
        """Makes positions `num_computed .. num_tokens - 1` writable.

        Returns:
            False if there are not enough free blocks; then nothing has changed.
        """
        entry = self._tables[table]
        size = self.block_size
        missing = self.blocks_for(num_tokens) - len(entry.blocks)
        if missing <= 0 and not entry.maybe_shared:
            return True
        if entry.maybe_shared:
            self.release_closed()  # or closed tables count as references
        shared: list[int] = []
        last = min(self.blocks_for(num_tokens), len(entry.blocks))
        if entry.maybe_shared:
            first = num_computed // size
            shared = [c for c in range(first, last) if self._is_read_only(entry.blocks[c])]
        if self._lacks(max(missing, 0) + len(shared)):
            return False
        for column in shared:
            self._copy_on_write(table, entry, column)
        if entry.maybe_shared:  # blocks allocated for rejected drafts may lie behind `last`
            entry.maybe_shared = any(self._refs[block] > 1 for block in entry.blocks[last:])
        if missing > 0:
            self._append(table, entry, [self._pop_free() for _ in range(missing)])
        elif not entry.maybe_shared:
            self.num_writable[table] = len(entry.blocks) * size
        return True

    def cache_blocks(self, table: int, token_ids: Sequence[int], num_computed: int) -> None:
        """Caches every block that is full of computed tokens, for later prefix hits."""
        entry = self._tables[table]
        if entry.stale or not self._caches_prefixes:
            return
        first, last = len(entry.hashes), num_computed // self.block_size
        if first < last:
            parent_hash = entry.hashes[-1] if entry.hashes else entry.root_hash
            contents = block_contents(token_ids, self.block_size, first, last, entry.packed)
            blocks = entry.blocks[first:last]
            entry.hashes += self.prefix_cache.cache(parent_hash, contents, blocks)
            self._count_use(entry)
            self.transfers.write_through(blocks)

    def free(self, table: int) -> None:
        """Ends a table. Its blocks become free with the next `release_closed`: a long prompt has
        thousands, and the token that ended it should not wait for them."""
        entry = self._tables.pop(table)
        del self.num_writable[table]
        self.transfers.leave(table)
        self._closed.append((entry, self._steps + bool(self._copied)))

    def release_closed(self) -> None:
        """Gives the blocks of ended tables back. Those without other references become free, the
        tail to be handed out first: a prefix is useless once its head is gone."""
        closed, self._closed = self._closed, []
        for entry, last_step in closed:
            index = np.array(entry.blocks[::-1], np.int64)
            refs = self._all_refs[index] - 1
            assert (refs >= 0).all(), "a block was freed twice"
            self._all_refs[index] = refs
            index = index[refs == 0]
            freed = self._release_duplicates(index.tolist())
            self._freed_at[index] = np.maximum(self._freed_at[index], last_step)
            if self.transfers.is_active:
                freed = [block for block in freed if not self.transfers.in_transfer(block)]
            self._free.update(dict.fromkeys(freed))
            uncached = self.prefix_cache.uncached(freed)
            for block in uncached:
                self._free.move_to_end(block, last=False)
            self.transfers.mark_free(freed, uncached)

    def _release_duplicates(self, freed: list[int]) -> list[int]:
        """Adds to the blocks that lost their last reference the free canonical blocks of the
        duplicates among them. These take the duplicates' place in the eviction order, so that
        descendants of either are evicted first."""
        if not self.prefix_cache.duplicates:
            return freed
        order: list[int] = []
        for block in freed:
            order.append(block)
            canonical = self.prefix_cache.released(block)
            if canonical is not None and canonical in self._free:
                del self._free[canonical]
                self.transfers.mark_used((canonical,))
                order.append(canonical)
        return order

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes; running tables keep their blocks."""
        self.transfers.clear()
        self.prefix_cache.clear()
        for entry in self._tables.values():
            entry.stale = True

    def num_readers(self, block: int) -> int:
        """Number of tables that hold a block, closed ones that a step may still read included."""
        return self._refs[block]

    # -- steps ------------------------------------------------------------------------------

    def take_changes(self) -> TableChanges:
        """Returns and clears what the runner has to apply before the next step."""
        changes, self._changes = self._changes, TableChanges()
        self._steps += 1
        self._copied.clear()
        return changes

    def pack_changes(self) -> None:
        """Called while nothing waits, to make less of the next `take_changes` to be done later."""
        self._changes.pack()

    def launched(self) -> None:
        """Called when the step of the last `take_changes` is on the device's stream."""
        self.transfers.step_launched(self._steps)

    # -- host memory ------------------------------------------------------------------------

    def load(
        self,
        table: int,
        token_ids: Sequence[int],
        compute: Callable[[int, int], float],
        *,
        whole: bool = True,
    ) -> int | None:
        """Starts loading the blocks behind a new table's from host memory, as far as they are
        there and worth it. Called before the table's first `allocate`: once, or a second time for
        the rest.

        Of a long prefix a small and a larger part are loaded first, so that the link is busy while
        the rest is looked up.

        Args:
            compute: (count, start) -> seconds to compute `count` tokens behind `start` others.
            whole: False: load only those two parts of a long prefix.

        Returns:
            Number of tokens in the table's blocks, loading ones included; None if there are not
            enough free blocks for the whole prompt, then the rest was not loaded.
        """
        entry, size = self._tables[table], self.block_size
        first, last = len(entry.blocks), (len(token_ids) - 1) // size
        held = min(first * size, len(token_ids) - 1)
        if first >= last:
            return held
        transfers = self._with_tier()
        tier = transfers.tier
        contents = block_contents(token_ids, size, first, last, entry.packed)
        parts = self._load_parts.sizes(last - first) if not entry.loaded else (last - first,)
        hit = HostHit()
        for number, most in enumerate(parts if whole else parts[: max(len(parts) - 1, 1)], 1):
            before = hit.block_hashes or entry.hashes
            found = tier.match(before[-1] if before else entry.root_hash, islice(contents, most))
            hit += found
            begin = len(entry.blocks) * size
            rest = len(token_ids) - begin - len(hit.host_blocks) * size
            count = tier.worth_loading(hit, begin, rest) if hit.host_blocks else 0
            if count:
                if self._lacks(self.blocks_for(len(token_ids)) - len(entry.blocks)):
                    tier.release(hit)
                    return None
                blocks = self._pop_for_load(count)
                if blocks is None:
                    break
                after = begin + count * size
                is_last = number == len(parts)
                rest_s = compute(len(token_ids) - after, after) if is_last else None
                part = hit.first(count)
                transfers.load(table, part, blocks, int(self._freed_at[blocks].max()), rest_s)
                entry.hashes += part.block_hashes
                entry.loaded += count
                self._append(table, entry, blocks)
                hit = hit.after(count)
                held = len(entry.blocks) * size
            # A first part that is not worth loading may be so together with the next one.
            if len(found.host_blocks) < most or (count and hit.host_blocks):
                break
        if hit.host_blocks:
            tier.release(hit)
        return held

    def may_load(self, table: int, token_ids: Sequence[int]) -> bool:
        """Whether `load` would find a block behind a new table's, and room for the prompt."""
        entry, size = self._tables[table], self.block_size
        first, last = len(entry.blocks), (len(token_ids) - 1) // size
        if first >= last:
            return False
        (content,) = block_contents(token_ids, size, first, first + 1, entry.packed)
        parent_hash = entry.hashes[-1] if entry.hashes else entry.root_hash
        missing = self.blocks_for(len(token_ids)) - first
        return self._with_tier().tier.holds(parent_hash + content) and not self._lacks(missing)

    def take_back(self, transferred: list[NDArray[np.int64]]) -> None:
        """Called with the blocks of ended transfers: those without references become free, to be
        handed out before others."""
        if not transferred:
            return
        blocks = np.concatenate(transferred)
        free = blocks[self._all_refs[blocks] == 0].tolist()[::-1]
        for block in free:
            self._free[block] = None
            self._free.move_to_end(block, last=False)
        self._with_tier().mark_free_first([b for b in free if self.prefix_cache.is_cached(b)])

    def offload(self, most: int) -> None:
        """Starts to store blocks that are to be handed out soon. Never waits; at least three
        quarters of the free list stay: to be called while the device works.

        Args:
            most: blocks to look at, some microseconds each.
        """
        self.release_closed()
        for block in self.transfers.store(len(self._free), most):
            del self._free[block]
        over_limit = self.transfers.over_limit(most)
        if over_limit:
            self.transfers.evict(over_limit)
            for block in over_limit:
                self._free.move_to_end(block, last=False)
        dropped = self.transfers.take_dropped()
        for block in self.prefix_cache.uncached(dropped) if dropped else ():
            if block in self._free:
                self._free.move_to_end(block, last=False)

    def _with_tier(self) -> BlockTransfers:
        assert isinstance(self.transfers, BlockTransfers), "there is no host memory"
        return self.transfers

    def _pop_for_load(self, count: int) -> list[int] | None:
        """Takes free blocks that no step still to be launched touches, in ascending order, so that
        neighbours can be copied together; None if there are fewer than `count`."""
        blocks = list(islice(self._free, count))
        aside: list[int] = []
        if (self._freed_at[blocks] > self._steps).any():
            blocks = []
            for block in self._free:
                if len(blocks) == count:
                    break
                (blocks if self._freed_at[block] <= self._steps else aside).append(block)
        if len(blocks) < count:
            return None
        self._all_refs[blocks] = 1
        for block in blocks:
            del self._free[block]
        self.transfers.evict(blocks)
        for block in aside:
            self._free.move_to_end(block)
        return sorted(blocks)

    # -- blocks -----------------------------------------------------------------------------

    def _lacks(self, count: int) -> bool:
        """Whether there are fewer than `count` free blocks."""
        if count > len(self._free):
            self.release_closed()
        return count > len(self._free)

    def _is_read_only(self, block: int) -> bool:
        """Whether other tables reference it, or may find it later."""
        return self._refs[block] > 1 or self.prefix_cache.is_cached(block)

    def _pop_free(self) -> int:
        block, _ = self._free.popitem(last=False)
        self.transfers.evict((block,))
        self._refs[block] = 1
        return block

    def _append(self, table: int, entry: _Table, blocks: list[int]) -> None:
        """`blocks` must not be changed afterwards."""
        first = len(entry.blocks)
        entry.blocks.extend(blocks)
        self.num_writable[table] = 0 if entry.maybe_shared else len(entry.blocks) * self.block_size
        if blocks:
            self._send(table, entry, first, blocks)
        if entry.admitted:
            self._count_grown(entry)

    def _send(self, table: int, entry: _Table, first: int, blocks: list[int]) -> None:
        if entry.admitted or not self.transfers.defers_tables:
            self._changes.runs.append((table, first, blocks))

    def _copy_on_write(self, table: int, entry: _Table, column: int) -> None:
        old = entry.blocks[column]
        new = self._pop_free()
        self._refs[old] -= 1
        if not self._refs[old] and not self.transfers.in_transfer(old):
            # It may be handed out in this very step, whose copies run before it writes.
            self._free[old] = None
            if self.prefix_cache.is_cached(old):
                self.transfers.mark_free((old,))
        self._freed_at[old] = self._steps + 1
        self._copied.update((old, new))
        entry.blocks[column] = new
        self._send(table, entry, column, [new])
        self._changes.copy_from.append(old)
        self._changes.copy_to.append(new)

    # -- counting ---------------------------------------------------------------------------

    def _count_grown(self, entry: _Table) -> None:
        grown = len(entry.blocks) - entry.counted
        if grown > 0:
            self.hits.add(0, 0, grown)
            entry.counted = len(entry.blocks)

    def _count_use(self, entry: _Table) -> None:
        """Counts the sequence as a user of the blocks hashed since the previous call."""
        if entry.admitted and len(entry.hashes) > entry.used:
            self.transfers.count_use(entry.hashes[entry.used :])
            entry.used = len(entry.hashes)

    def check_integrity(self) -> None:
        """Asserts that every block is either free or referenced exactly by its tables."""
        counted = [0] * self.num_blocks
        for entry in (*self._tables.values(), *(entry for entry, _ in self._closed)):
            for block in entry.blocks:
                counted[block] += 1
        assert counted == self._refs.tolist(), "reference counts differ from the tables"
        free = {block for block, refs in enumerate(counted) if refs == 0}
        self.transfers.check_integrity(self._free)
        free -= self.transfers.blocks_in_transfer
        assert free == set(self._free), "the free list differs from the reference counts"
        assert all(counted[b] for b in self.prefix_cache.duplicates), (
            "a duplicate without references"
        )
        for table, entry in self._tables.items():
            held = 0 if entry.maybe_shared else len(entry.blocks) * self.block_size
            assert self.num_writable[table] == held, "room differs from the blocks"
