"""Which device blocks are being copied from or to host memory, and which are to be stored next.

A block without references is either in the block manager's free list or in transfer, never both. So
nothing writes to a block while it is copied, and only steps that wait for its transfer id read one
before it is filled.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from hetero_llm.core.null_objects import do_nothing, never, no_items
from hetero_llm.kv_cache.host_tier import EvictionCandidate, HostHit, HostTier
from hetero_llm.kv_cache.prefix_cache import PrefixCache

_MAX_STORING = 2048
"""Blocks in stores under way: they cannot be handed out meanwhile."""
_LONG_QUEUE = 8192
"""Blocks with use counts not yet sent to the tier. Beyond it more are sent at a time, and stores
are chosen by counts that are slightly out of date."""


@dataclass(frozen=True, slots=True)
class OffloadLimits:
    """
    Attributes:
        reserve: free blocks kept ready to be handed out without losing a prefix, if need be by
            storing those that are next in eviction order.
        cached: maximum number of free blocks that keep a cached prefix; None: no limit.
        write_through: store blocks as soon as they are cached.
    """

    reserve: int
    cached: int | None = None
    write_through: bool = False


@dataclass(slots=True)
class FinishedTransfers:
    """
    Attributes:
        blocks: of ended transfers; those without references are free again.
        failed: tables with blocks that were not filled.
    """

    blocks: list[NDArray[np.int64]] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)


# large: loads, stores and the order of stores share one set of books
class BlockTransfers:
    """Loads and stores under way, the tables that wait for loads, and the free blocks that are
    still to be stored.

    Attributes:
        tier: the host memory.
        limits: what is stored, and when; may be replaced between steps.
        defers_tables: the runner is sent a block table when its sequence is admitted: other
            sequences' steps are not to carry the thousand blocks of a long prefix under way.
    """

    defers_tables = True

    def __init__(
        self, tier: HostTier, prefix: PrefixCache, limits: OffloadLimits, num_blocks: int
    ) -> None:
        self.tier = tier
        self._prefix = prefix
        self.limits = limits
        self._load_of = np.zeros(num_blocks, np.int64)  # load that fills a block, or 0
        self._loads: dict[int, NDArray[np.int64]] = {}
        self._num_waiting: dict[int, int] = {}  # load to the number of tables that wait for it
        self._loads_of: dict[int, set[int]] = {}  # table to its loads, ended ones included
        self._storing: dict[int, int] = {}  # block to store
        self._stores: dict[int, list[int]] = {}
        self._use_counts: Counter[bytes] = Counter()  # not yet sent to the tier
        self._new_uses: list[Sequence[bytes]] = []  # not yet in `_use_counts`
        self._cached: OrderedDict[int, None] = OrderedDict()  # free and cached, oldest first
        self._unstored: OrderedDict[int, None] = OrderedDict()  # those of them not yet looked at
        self._dropped: list[int] = []  # blocks that lost their prefix with an ancestor

    # -- blocks -----------------------------------------------------------------------------

    def in_transfer(self, block: int) -> bool:
        """Whether a block is being copied."""
        return block in self._storing or bool(self._load_of[block])

    @property
    def blocks_in_transfer(self) -> set[int]:
        """Blocks being copied."""
        return {*np.flatnonzero(self._load_of).tolist(), *self._storing}

    @property
    def is_active(self) -> bool:
        """Whether any copy is under way."""
        return bool(self._loads or self._stores)

    @property
    def has_work(self) -> bool:
        """Whether any copy is under way, or is to be started."""
        return self.is_active or self._num_over_limit > 0

    def mark_used(self, blocks: Iterable[int]) -> None:
        """Called when free blocks are referenced again."""
        for block in blocks:
            self._cached.pop(block, None)
            self._unstored.pop(block, None)

    def mark_free(self, blocks: Iterable[int], uncached: Collection[int] = ()) -> None:
        """Called with free blocks in the order in which they are to be handed out; `uncached`:
        those of them without a cached prefix."""
        cached = dict.fromkeys(blocks)
        for block in uncached:
            del cached[block]
        self._cached.update(cached)
        self._unstored.update(cached)

    def mark_free_first(self, blocks: Iterable[int]) -> None:
        """Called with cached blocks that are free again after a transfer. They are handed out
        before all others, the last one first."""
        for block in blocks:
            self._cached[block] = None
            self._cached.move_to_end(block, last=False)

    def evict(self, blocks: Sequence[int]) -> None:
        """Forgets what blocks hold, which are handed out or void. Their descendants, unreachable
        now unless host memory has the evicted block, lose their prefix too."""
        evicted = self._prefix.evict(blocks)
        self.mark_used(blocks)
        if evicted:
            self.tier.device_evicted(evicted)
            self._drop_descendants(evicted + self.tier.take_host_evicted())

    def _drop_descendants(self, evicted: list[tuple[bytes, bytes]]) -> None:
        """Drops device blocks behind evicted ones (lookup key and hash of each) that neither the
        device nor host memory holds. Few have any: usually descendants are evicted first."""
        prefix = self._prefix
        while evicted:
            lookup_key, block_hash = evicted.pop()
            children = prefix.children(block_hash)
            if not children or prefix.has_key(lookup_key) or self.tier.holds(lookup_key):
                continue
            evicted.append((lookup_key, block_hash))  # again: duplicates may replace children
            self.mark_used(children)
            dropped = prefix.evict(children)
            if dropped:
                self.tier.device_evicted(dropped)
            evicted += dropped
            self._dropped += children
            evicted += self.tier.take_host_evicted()

    def take_dropped(self) -> list[int]:
        """Returns and clears the blocks that lost their prefix with an ancestor."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def clear(self) -> None:
        """Called when the prefix cache was cleared: forgets all blocks, here and in the tier."""
        self._cached.clear()
        self._unstored.clear()
        self.tier.clear()
        self.tier.take_host_evicted()

    # -- use counts -------------------------------------------------------------------------

    def count_use(self, block_hashes: Sequence[bytes]) -> None:
        """Counts one more request that uses these blocks. The tier learns of it later."""
        self._new_uses.append(block_hashes)

    def _merge_use_counts(self) -> Counter[bytes]:
        for block_hashes in self._new_uses:
            self._use_counts.update(block_hashes)
        self._new_uses.clear()
        return self._use_counts

    def _flush_use_counts(self, most: int) -> bool:
        """Sends up to `most` use counts to the tier, the oldest first. Returns True if the tier's
        counts are current enough to choose stores: complete, or far behind anyway."""
        counts = self._merge_use_counts()
        if not counts:
            return True
        if len(counts) > _LONG_QUEUE:
            most = max(most, len(counts) // 8)
        if len(counts) <= most:
            self.tier.add_use_counts(counts)
            self._use_counts = Counter()
            return True
        oldest = list(islice(counts, most))
        self.tier.add_use_counts({block_hash: counts.pop(block_hash) for block_hash in oldest})
        return len(counts) > _LONG_QUEUE

    # -- loads ------------------------------------------------------------------------------

    def load(
        self, table: int, hit: HostHit, blocks: list[int], after_step: int, compute: float | None
    ) -> None:
        """Starts a load for a table; arguments as for `HostTier.load`. The blocks are cached at
        once: every table that finds them waits for the load, too."""
        index = np.array(blocks, np.int64)
        transfer_id = self.tier.load(hit, index, after_step, compute)
        self._loads[transfer_id] = index
        self._load_of[index] = transfer_id
        self._num_waiting[transfer_id] = 0
        self._prefix.cache_hashed(hit.lookup_keys, hit.block_hashes, blocks)
        self._wait_for(table, (transfer_id,))

    def is_loading(self, block: int) -> bool:
        """Whether a load that fills this block is under way."""
        return bool(self._load_of[block])

    def join(self, table: int, blocks: NDArray[np.int64]) -> None:
        """Lets a table wait for the loads under way that fill some of these blocks."""
        if self._loads:
            self._wait_for(table, set(np.unique(self._load_of[blocks]).tolist()) - {0})

    def _wait_for(self, table: int, transfer_ids: Collection[int]) -> None:
        self._loads_of.setdefault(table, set()).update(transfer_ids)
        for transfer_id in transfer_ids:
            self._num_waiting[transfer_id] += 1

    def pending(self, table: int) -> set[int]:
        """Loads under way that fill some of a table's blocks."""
        return {each for each in self._loads_of.get(table, ()) if each in self._loads}

    def tables_of(self, transfer_ids: Iterable[int]) -> set[int]:
        """Tables with blocks that one of these loads, ended or not, was to fill."""
        wanted = set(transfer_ids)
        return {table for table, loads in self._loads_of.items() if loads & wanted}

    def leave(self, table: int) -> None:
        """Called when a table ends. Loads that no other table waits for are aborted, and their
        blocks evicted."""
        for transfer_id in self._loads_of.pop(table, ()):
            if transfer_id not in self._loads:
                continue
            self._num_waiting[transfer_id] -= 1
            if not self._num_waiting[transfer_id]:
                self.evict(self._loads[transfer_id].tolist())
                self.tier.abort(transfer_id)

    # -- both -------------------------------------------------------------------------------

    def poll(self, finished: Iterable[int]) -> FinishedTransfers:
        """Collects ended transfers; see `HostTier.poll`. The block manager has to take their
        blocks back afterwards."""
        events = self.tier.poll(finished)
        result = FinishedTransfers(failed=self.tables_of(events.failed) if events.failed else set())
        for transfer_id in (*events.loaded, *events.failed):
            index = self._loads.pop(transfer_id)
            del self._num_waiting[transfer_id]
            self._load_of[index] = 0
            if transfer_id in events.failed:
                self.evict(index.tolist())  # their content is void
            result.blocks.append(index)
        for transfer_id in events.stored:
            blocks = self._stores.pop(transfer_id)
            for block in blocks:
                del self._storing[block]
            result.blocks.append(np.array(blocks, np.int64))
        self._drop_descendants(self.tier.take_host_evicted())
        return result

    @property
    def _num_over_limit(self) -> int:
        """Free blocks beyond the limit that are still to be looked at."""
        limit = self.limits.cached
        return 0 if limit is None else min(len(self._unstored), len(self._cached) - limit)

    def store(self, num_free: int, most: int) -> list[int]:
        """Starts to store blocks that are about to be handed out, or are beyond the limit.

        Args:
            num_free: length of the free list. most: blocks to look at.

        Returns:
            Blocks in transfer now, which are to leave the free list.
        """
        if not self._flush_use_counts(2 * most):
            return []
        ready = num_free - len(self._unstored)
        wanted = min(max(self.limits.reserve - ready, self._num_over_limit), most)
        room = min(max(1, num_free // 4), _MAX_STORING) - len(self._storing)
        candidates: list[EvictionCandidate] = []
        for block in list(islice(self._unstored, wanted)) if wanted > 0 < room else ():
            candidate = EvictionCandidate(block, *self._prefix.entry(block))
            if self._is_to_store(candidate):
                candidates.append(candidate)
                if len(candidates) == room:
                    break
            else:
                del self._unstored[block]
        taken = self._store(candidates)
        self.mark_used(taken)
        return [block for block in taken if block in self._storing]

    def write_through(self, blocks: Sequence[int]) -> None:
        """Called with blocks that a running sequence has just filled: stores them at once if the
        limits say so."""
        if self.limits.write_through:
            self._flush_use_counts(len(self._merge_use_counts()))
            held = [b for b in blocks if self._prefix.is_cached(b) and b not in self._storing]
            candidates = [EvictionCandidate(b, *self._prefix.entry(b)) for b in held]
            self._store([each for each in candidates if self._is_to_store(each)])

    def over_limit(self, most: int) -> list[int]:
        """Up to `most` of the oldest free blocks that have to lose their prefix for the limit's
        sake. Those still to be stored are left out."""
        limit = self.limits.cached
        if limit is None or len(self._cached) <= limit:
            return []
        surplus = list(islice(self._cached, min(len(self._cached) - limit, most)))
        return [block for block in surplus if block not in self._unstored]

    def _is_to_store(self, candidate: EvictionCandidate) -> bool:
        return self.tier.wants(candidate.block_hash) and not self.tier.holds(candidate.lookup_key)

    def _store(self, candidates: list[EvictionCandidate]) -> list[int]:
        """Returns the blocks taken: those in host memory already, and those in transfer now."""
        if not candidates:
            return []
        count, transfer_id = self.tier.store(candidates)
        blocks = [candidate.block for candidate in candidates[:count]]
        if transfer_id:
            self._stores[transfer_id] = blocks
            self._storing.update(dict.fromkeys(blocks, transfer_id))
        self._drop_descendants(self.tier.take_host_evicted())
        return blocks

    def step_launched(self, number: int) -> None:
        """See `HostTier.step_launched`."""
        self.tier.step_launched(number)

    def check_integrity(self, free: Iterable[int]) -> None:
        """Asserts that every block in transfer belongs to one transfer and is not free."""
        by_load = sorted(block for index in self._loads.values() for block in index.tolist())
        by_store = sorted(block for blocks in self._stores.values() for block in blocks)
        loading = np.flatnonzero(self._load_of).tolist()
        assert by_load == loading, "a loading block was lost or doubled"
        assert by_store == sorted(self._storing), "a storing block was lost or doubled"
        assert not set(loading) & self._storing.keys(), "a block is loaded and stored at once"
        waiting = Counter(i for ids in self._loads_of.values() for i in ids if i in self._loads)
        assert {i: n for i, n in self._num_waiting.items() if n} == waiting
        assert self._num_waiting.keys() == self._loads.keys()
        free = set(free)
        assert not free & self.blocks_in_transfer, "a block in transfer is free"
        assert self._unstored.keys() <= self._cached.keys() <= free
        assert all(self._prefix.is_cached(block) for block in self._cached)


class NoTransfers:
    """Stands in for `BlockTransfers` where there is no host memory: evicted blocks are lost."""

    defers_tables = is_active = has_work = False
    blocks_in_transfer: frozenset[int] = frozenset()
    in_transfer = is_loading = staticmethod(never)
    take_dropped = store = over_limit = staticmethod(no_items)
    mark_used = mark_free = clear = count_use = join = leave = staticmethod(do_nothing)
    write_through = step_launched = check_integrity = staticmethod(do_nothing)

    def __init__(self, prefix: PrefixCache) -> None:
        self._prefix = prefix

    def evict(self, blocks: Sequence[int]) -> None:
        """Forgets what blocks hold, which are handed out or void."""
        self._prefix.evict(blocks)
