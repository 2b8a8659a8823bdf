"""Block tables and reference counts of the paged KV cache. Bookkeeping only: no tensor, no torch.

A block is free (reference count 0), or held by one or more tables. Free blocks wait in eviction
order, oldest first; those that still hold a published prefix keep it until they are handed out, so
a later request can take them back. Tables share blocks after a prefix hit or a fork; a shared
block is never written: `grow` gives the writer a copy first (copy-on-write).

With host memory behind the cache (`block_moves`) a block without readers may also be moving: it is
not free before its copy is over.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from hetero_llm.kv_cache.block_transfers import BlockTransfers, OffloadLimits, parts_of
from hetero_llm.kv_cache.hit_log import HitCounter
from hetero_llm.kv_cache.host_tier import HostHit, HostTier
from hetero_llm.kv_cache.prefix_cache import PrefixCache, block_contents
from hetero_llm.kv_cache.table_changes import TableChanges


@dataclass(slots=True)
class _Table:
    blocks: list[int]
    keys: list[bytes]  # of the leading blocks that are full and hashed
    root: bytes
    packed: bytes = b""  # token bytes of the prompt, or of its beginning
    maybe_shared: bool = False  # forked: blocks still to be written may have other readers
    found: int = 0  # leading blocks that were on the device when the table was opened
    loaded: int = 0  # blocks behind them that come from host memory
    tickets: set[int] = field(default_factory=set)  # loads that fill some of its blocks
    counted: int = 0  # leading blocks that `hits` knows of, in this life of the sequence or another
    used: int = 0  # leading keys whose use was noted
    admitted: bool = False
    stale: bool = False  # older than the cache, which was cleared


class BlockManager:
    """Hands out KV blocks to tables named by an integer (the sequence's slot).

    Args:
        num_blocks: Blocks in the pool.
        block_size: Tokens in a block.
        prefix_cache: None turns prefix caching off.
        tier: host memory for blocks that leave the prefix cache; `limits`: when they go there.

    Attributes:
        num_writable: of each table, how many leading positions need no call of `allocate`.
        hits: where the blocks of all tables came from.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_cache: PrefixCache | None = None,
        *,
        tier: HostTier | None = None,
        limits: OffloadLimits | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix = prefix_cache
        self._refs = array("i", bytes(4 * num_blocks))
        self._all_refs = np.frombuffer(self._refs, np.int32)  # the same memory
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._tables: dict[int, _Table] = {}
        self._last_found: tuple[list[int], NDArray[np.int64]] = [], np.zeros(0, np.int64)
        self.num_writable: dict[int, int] = {}
        self._changes = TableChanges()
        self.hits = HitCounter()
        self._moves: BlockTransfers | None = None
        if tier is not None:
            assert prefix_cache is not None, "host memory holds what the prefix cache knows"
            limits = limits or OffloadLimits(num_blocks)
            self._moves = BlockTransfers(tier, prefix_cache, limits, num_blocks)
        self._steps = 0  # made so far
        self._freed_at = np.zeros(num_blocks, np.int64)  # last step that may touch a free block
        self._copied: set[int] = set()  # by the copies of the step that is being made
        self._closed: list[tuple[_Table, int]] = []  # and the last step that may touch its blocks

    @property
    def num_free(self) -> int:
        self.release_closed()
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def block_ids(self, table: int) -> tuple[int, ...]:
        return tuple(self._tables[table].blocks)

    def match_prefix(
        self,
        table: int,
        token_ids: Sequence[int],
        root: bytes,
        reuse: bool = True,
        packed: bytes = b"",
    ) -> int:
        """Starts a table and takes every leading block that the prefix cache holds.

        At least the last token is left to compute, since its row gives the next token. If its block
        is held too, it is taken all the same: `grow` will give the table a copy to write to.

        Args:
            packed: `token_bytes` of the first tokens, as many as are at hand.

        Returns:
            Number of tokens whose KV is there already: a multiple of the block size, or all but
            the last one.
        """
        assert table not in self._tables
        entry = _Table([], [], root, packed)
        self._tables[table] = entry
        self.num_writable[table] = 0
        if self._prefix is None or not reuse:
            return 0
        size = self.block_size
        blocks, keys = self._prefix.find(root, token_ids, size, packed)
        if self._last_found[0] is not blocks:
            self._last_found = blocks, np.array(blocks, np.int64)
        index, entry.keys = self._last_found[1], keys.copy()
        if (
            self._moves is not None
            and len(index) * size == len(token_ids)
            and self._moves.tickets_of(index[-1:])
        ):  # what is still to come cannot be copied yet
            index = index[:-1]
            entry.keys.pop()
        refs = self._all_refs[index]
        for block in index[refs == 0].tolist():
            self._free.pop(block, None)  # it may be moving
            if self._moves is not None:
                self._moves.taken(block)
        self._all_refs[index] = refs + 1
        self._append(table, entry, blocks[: len(index)])
        entry.found = len(index)
        if self._moves is not None:
            self._join(entry, self._moves.tickets_of(index))
        if len(index) * size < len(token_ids):
            return len(index) * size
        entry.keys.pop()  # of the block that will be a private copy
        entry.maybe_shared = True
        self.num_writable[table] = 0
        return len(token_ids) - 1

    def load(
        self,
        table: int,
        token_ids: Sequence[int],
        compute: Callable[[int, int], float],
        *,
        whole: bool = True,
    ) -> int | None:
        """Lets the blocks behind an opened table's come from host memory, as far as they are there
        and are worth it. To be called before the table grows: once, or a second time for the rest.

        Of a long prefix two parts are loaded on their own, a small and a larger one, so that the
        link is busy while the rest is looked up; the rest then comes layer by layer.

        Args:
            compute: seconds that so many rows take that begin at a position.
            whole: False: of a long prefix those two parts only.

        Returns:
            Number of tokens in the table's blocks now, loading or loaded; None if there are not
            enough free blocks for the whole prompt, then nothing has changed.
        """
        entry, moves, size = self._tables[table], self._moves, self.block_size
        first, last = len(entry.blocks), (len(token_ids) - 1) // size
        held = min(first * size, len(token_ids) - 1)
        if moves is None or first >= last:
            return held
        contents = block_contents(token_ids, size, first, last, entry.packed)
        parts = parts_of(last - first) if not entry.loaded else (last - first,)
        hit = HostHit((), (), ())
        for place, most in enumerate(parts if whole else parts[: max(len(parts) - 1, 1)], 1):
            before = hit.keys or entry.keys
            found = moves.tier.match(before[-1] if before else entry.root, islice(contents, most))
            hit += found
            begin = len(entry.blocks) * size
            rest = len(token_ids) - begin - len(hit.slots) * size
            count = moves.tier.worth_loading(hit, begin, rest) if hit.slots else 0
            if count:
                if self._lacks(self.blocks_for(len(token_ids)) - len(entry.blocks)):
                    moves.tier.release(hit)
                    return None
                blocks = self._pop_for_load(count)
                if blocks is None:
                    break
                behind = begin + count * size
                goes_on = place < len(parts)
                rest_s = None if goes_on else compute(behind, len(token_ids) - behind)
                self._load(table, entry, hit.first(count), blocks, rest_s)
                hit = hit.behind(count)
                held = len(entry.blocks) * size
            # A first part that is not worth it may be so together with what follows.
            if len(found.slots) < most or (count and hit.slots):
                break
        moves.tier.release(hit)
        return held

    def _load(
        self,
        table: int,
        entry: _Table,
        hit: HostHit,
        blocks: list[int],
        compute: float | None,
    ) -> None:
        assert self._moves is not None
        after = int(self._freed_at[blocks].max())
        ticket = self._moves.load(hit, blocks, after, compute)
        self._join(entry, {ticket})
        entry.keys += hit.keys
        entry.loaded += len(blocks)
        self._append(table, entry, blocks)

    def may_load(self, table: int, token_ids: Sequence[int]) -> bool:
        """Whether `load` has anything to look up behind an opened table's blocks, and the room."""
        entry, moves, size = self._tables[table], self._moves, self.block_size
        first, last = len(entry.blocks), (len(token_ids) - 1) // size
        if moves is None or first >= last:
            return False
        (content,) = block_contents(token_ids, size, first, first + 1, entry.packed)
        parent = entry.keys[-1] if entry.keys else entry.root
        missing = self.blocks_for(len(token_ids)) - first
        return moves.tier.holds(parent + content) and not self._lacks(missing)

    def pending(self, table: int) -> set[int]:
        """Loads under way that fill some of a table's blocks."""
        entry = self._tables[table]
        if self._moves is None or not entry.tickets:
            return set()
        return self._moves.under_way(entry.tickets)

    def readers(self, tickets: Iterable[int]) -> set[int]:
        """Tables that these loads filled, or were to fill, in part."""
        wanted = set(tickets)
        return {table for table, entry in self._tables.items() if entry.tickets & wanted}

    def seconds_left(self, table: int) -> float:
        """Until all of a table's blocks are filled; 0.0 if they are."""
        pending = self.pending(table)
        return self._moves.tier.seconds_left(pending) if pending and self._moves else 0.0

    def seconds_ahead(self, table: int) -> float:
        """Until others' loads, those that go first, leave the link to a table's."""
        pending = self.pending(table)
        return self._moves.tier.seconds_ahead(pending) if pending and self._moves else 0.0

    def wait(self, seconds: float) -> None:
        """Sleeps until a copy ends, at most so long."""
        assert self._moves is not None
        self._moves.tier.wait(seconds)

    def poll(self, over: Iterable[int] = ()) -> list[int]:
        """Applies what has ended between device and host memory.

        Args:
            over: tickets of the loads that a finished step waited for.

        Returns:
            Tables with blocks that will never be filled: to be closed.
        """
        if self._moves is None:
            return []
        result = self._moves.poll(over)
        if result.back:
            self._take_back(np.concatenate(result.back))
        if not result.failed:
            return []
        return [t for t, entry in self._tables.items() if entry.tickets & result.failed]

    def offload(self, most: int) -> None:
        """Starts to store blocks that are to be handed out soon. Never waits, and the free list
        stays long enough for most: to be called while the device works.

        Args:
            most: blocks to look at; some microseconds each.
        """
        self.release_closed()
        if self._moves is not None:
            for block in self._moves.store(len(self._free), most):
                del self._free[block]
            self._keep_limit(most)
            for block in self._prefix_or_fail().unpublished(self._moves.take_dropped()):
                if block in self._free:
                    self._free.move_to_end(block, last=False)

    @property
    def is_moving(self) -> bool:
        """Whether any block is on its way, or is going to be."""
        return self._moves is not None and bool(self._moves.moving or self._moves.num_wanted > 0)

    def admit(self, table: int, counted: tuple[int, int] = (0, 0)) -> None:
        """A table's sequence begins to run. The runner is told of its blocks; they count as hits or
        misses, once.

        Args:
            counted: what `counted` told when the sequence lost its earlier table.
        """
        entry = self._tables[table]
        entry.counted, entry.used = counted
        entry.admitted = True
        if self._moves is not None:
            self._changes.runs.append((table, 0, list(entry.blocks)))
        if not entry.counted:
            self.hits.add(entry.found, entry.loaded, 0)
            entry.counted = entry.found + entry.loaded
        self._count_grown(entry)
        self._note_use(entry)

    def counted(self, table: int) -> tuple[int, int]:
        """Blocks and keys of a table that were counted, for the sequence's next `admit`."""
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
            self.release_closed()  # or a table that is over counts as a reader
        shared: list[int] = []
        last = min(self.blocks_for(num_tokens), len(entry.blocks))
        if entry.maybe_shared:
            first = num_computed // size
            shared = [c for c in range(first, last) if self._is_read_only(entry.blocks[c])]
        if self._lacks(max(missing, 0) + len(shared)):
            return False
        for column in shared:
            self._copy_on_write(table, entry, column)
        if entry.maybe_shared:  # blocks grown for rejected drafts may lie behind those looked at
            entry.maybe_shared = any(self._refs[block] > 1 for block in entry.blocks[last:])
        if missing > 0:
            self._append(table, entry, [self._pop_free() for _ in range(missing)])
        elif not entry.maybe_shared:
            self.num_writable[table] = len(entry.blocks) * size
        return True

    def cache_blocks(self, table: int, token_ids: Sequence[int], num_computed: int) -> None:
        """Publishes every block that is full of computed tokens, for later prefix hits."""
        entry = self._tables[table]
        if self._prefix is None or entry.stale:
            return
        first, last = len(entry.keys), num_computed // self.block_size
        if first < last:
            parent = entry.keys[-1] if entry.keys else entry.root
            contents = block_contents(token_ids, self.block_size, first, last, entry.packed)
            entry.keys += self._prefix.publish(parent, contents, entry.blocks[first:last])
            if self._moves is not None:
                self._note_use(entry)
                self._moves.published(entry.keys[first:last], entry.blocks[first:last])

    def fork(self, source: int, table: int) -> None:
        """Starts `table` as a reader of all of `source`'s blocks."""
        assert table not in self._tables
        origin = self._tables[source]
        copy = _Table([], list(origin.keys), origin.root, origin.packed, maybe_shared=True)
        copy.counted, copy.used = len(origin.blocks), len(origin.keys)
        copy.admitted, copy.stale = True, origin.stale
        self._tables[table] = copy
        origin.maybe_shared = True
        self.num_writable[source] = 0
        self._all_refs[origin.blocks] += 1
        self._append(table, copy, list(origin.blocks))

    def free(self, table: int) -> None:
        """Ends a table. Its blocks are free when somebody needs them, or `free_closed` is called:
        of a long prompt they are thousands, and the token that ended it is to be shown first."""
        entry = self._tables.pop(table)
        del self.num_writable[table]
        if self._moves is not None:
            self._moves.leave(entry.tickets)
        self._closed.append((entry, self._steps + bool(self._copied)))

    def release_closed(self) -> None:
        """Gives the blocks of closed tables back. Those without other readers become free, the tail
        to go first: a prefix is useless once its head is gone."""
        closed, self._closed = self._closed, []
        moves = self._moves
        for entry, last_step in closed:
            index = np.array(entry.blocks[::-1], np.int64)
            refs = self._all_refs[index] - 1
            assert (refs >= 0).all(), "a block was freed twice"
            self._all_refs[index] = refs
            index = index[refs == 0]
            freed = self._part_twins(index.tolist())
            if moves is not None:
                self._freed_at[index] = np.maximum(self._freed_at[index], last_step)
                if moves.any_moving:
                    freed = [block for block in freed if not moves.is_moving(block)]
            self._free.update(dict.fromkeys(freed))
            unpublished = freed if self._prefix is None else self._prefix.unpublished(freed)
            for block in unpublished:
                self._free.move_to_end(block, last=False)
            if moves is not None:
                gone = set(unpublished)
                moves.freed([b for b in freed if b not in gone] if gone else freed)

    def _lacks(self, count: int) -> bool:
        """Whether there are not so many free blocks."""
        if count > len(self._free):
            self.release_closed()
        return count > len(self._free)

    def _part_twins(self, freed: list[int]) -> list[int]:
        """Of blocks that lose their last reader some may be twins of free ones, which take their
        place in the order of eviction: before these come those that follow both."""
        if self._prefix is None or not self._prefix.twins:
            return freed
        order: list[int] = []
        for block in freed:
            order.append(block)
            holder = self._prefix.unread(block)
            if holder is not None and holder in self._free:
                del self._free[holder]
                if self._moves is not None:
                    self._moves.taken(holder)
                order.append(holder)
        return order

    def take_changes(self) -> TableChanges:
        """Everything the runner has to apply before the next step; forgotten here afterwards."""
        changes, self._changes = self._changes, TableChanges()
        self._steps += 1
        self._copied.clear()
        return changes

    def launched(self) -> None:
        """The step of the last `take_changes` is on the device's stream."""
        if self._moves is not None:
            self._moves.tier.step_launched(self._steps)

    def tier_metrics(self) -> dict[str, float]:
        """Counters of the memory behind the cache, flat."""
        return {} if self._moves is None else self._moves.tier.metrics()

    def shut_down(self) -> None:
        """Ends all copies and gives the memory behind the cache back."""
        if self._moves is not None:
            self._moves.tier.shut_down()

    def reset_prefix_cache(self) -> None:
        """Forgets all published prefixes; running tables keep their blocks."""
        if self._prefix is not None:
            self._prefix.clear()
            for entry in self._tables.values():
                entry.stale = True
        if self._moves is not None:
            self._moves.forget_published()

    def check_integrity(self) -> None:
        """Asserts that every block is either free or counted exactly by its tables."""
        counted = [0] * self.num_blocks
        for entry in (*self._tables.values(), *(entry for entry, _ in self._closed)):
            for block in entry.blocks:
                counted[block] += 1
        assert counted == self._refs.tolist(), "reference counts differ from the tables"
        free = {block for block, refs in enumerate(counted) if refs == 0}
        if self._moves is not None:
            self._moves.check_integrity(self._free)
            free -= self._moves.moving
        assert free == set(self._free), "the free list differs from the reference counts"
        if self._prefix is not None:
            assert all(counted[block] for block in self._prefix.twins), "a twin without readers"
        for table, entry in self._tables.items():
            held = 0 if entry.maybe_shared else len(entry.blocks) * self.block_size
            assert self.num_writable[table] == held, "room differs from the blocks"

    def _is_read_only(self, block: int) -> bool:
        """Whether others read it now, or may find it later."""
        published = self._prefix is not None and self._prefix.holds(block)
        return self._refs[block] > 1 or published

    def _pop_free(self) -> int:
        block, _ = self._free.popitem(last=False)
        if self._prefix is not None:
            if self._moves is None:
                self._prefix.evict(block)
            else:
                self._moves.evict((block,))
        self._refs[block] = 1
        return block

    def _append(self, table: int, entry: _Table, blocks: list[int]) -> None:
        """`blocks` is not to be changed afterwards."""
        first = len(entry.blocks)
        entry.blocks.extend(blocks)
        self.num_writable[table] = 0 if entry.maybe_shared else len(entry.blocks) * self.block_size
        self._tell(table, entry, first, blocks)
        if entry.admitted:
            self._count_grown(entry)

    def _tell(self, table: int, entry: _Table, first: int, blocks: list[int]) -> None:
        """The runner need not know of a table before its sequence runs: while a long prefix is on
        its way, other sequences' steps are not to carry its thousand blocks."""
        if blocks and (entry.admitted or self._moves is None):
            self._changes.runs.append((table, first, blocks))

    def _copy_on_write(self, table: int, entry: _Table, column: int) -> None:
        old = entry.blocks[column]
        new = self._pop_free()
        self._refs[old] -= 1
        moves = self._moves
        if not self._refs[old] and not (moves is not None and moves.is_moving(old)):
            # Nobody but the prefix cache: it may be handed out in this very step, whose copies
            # come before its rows.
            self._free[old] = None
            if moves is not None and self._prefix_or_fail().holds(old):
                moves.freed([old])
        self._freed_at[old] = self._steps + 1
        self._copied.update((old, new))
        entry.blocks[column] = new
        self._tell(table, entry, column, [new])
        self._changes.copy_from.append(old)
        self._changes.copy_to.append(new)

    # -- host memory ------------------------------------------------------------------------

    def _prefix_or_fail(self) -> PrefixCache:
        assert self._prefix is not None
        return self._prefix

    def _join(self, entry: _Table, tickets: set[int]) -> None:
        assert self._moves is not None
        entry.tickets |= tickets
        self._moves.join(tickets)

    def _take_back(self, blocks: NDArray[np.int64]) -> None:
        """Blocks that do not move any more. Those without readers are handed out before others."""
        free, published = self._free, []
        for block in blocks[self._all_refs[blocks] == 0].tolist()[::-1]:
            free[block] = None
            free.move_to_end(block, last=False)
            if self._prefix_or_fail().holds(block):
                published.append(block)
        assert self._moves is not None
        self._moves.returned(published)

    def _pop_for_load(self, count: int) -> list[int] | None:
        """Free blocks that no step still to be launched touches, in ascending order, so that
        neighbours can be copied together; None if there are not as many."""
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
        assert self._moves is not None
        self._all_refs[blocks] = 1
        for block in blocks:
            del self._free[block]
        self._moves.evict(blocks)
        for block in aside:
            self._free.move_to_end(block)
        return sorted(blocks)

    def _keep_limit(self, most: int) -> None:
        """Free blocks beyond the limit lose their prefix and are handed out first."""
        assert self._moves is not None and self._prefix is not None
        blocks = self._moves.beyond_limit(most)
        self._moves.evict(blocks)
        for block in blocks:
            self._free.move_to_end(block, last=False)

    def _count_grown(self, entry: _Table) -> None:
        grown = len(entry.blocks) - entry.counted
        if grown > 0:
            self.hits.add(0, 0, grown)
            entry.counted = len(entry.blocks)

    def _note_use(self, entry: _Table) -> None:
        """One more request uses the blocks of these keys."""
        if self._moves is not None and entry.admitted and len(entry.keys) > entry.used:
            self._moves.note_use(entry.keys[entry.used :])
            entry.used = len(entry.keys)
