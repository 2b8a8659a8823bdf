"""Which blocks of the device are being copied to or from host memory.

Part of the block manager, which alone calls it. A block that is not referenced is in the free list
or moving, never both: so nothing writes to a block whose copy is under way, and nothing reads one
before it is filled but steps that wait for its ticket.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from hetero_llm.kv_cache.host_tier import EvictionCandidate, HostHit, HostTier
from hetero_llm.kv_cache.prefix_cache import PrefixCache

_MOST_AT_ONCE = 2048
"""Blocks whose stores may be under way: nobody can have them meanwhile."""
_LONG_QUEUE = 8192
"""Blocks whose uses have not been told: beyond it more are told at once, and nothing waits."""
_LONG_PREFIX = 512
"""Blocks from which on a load begins before all of them are looked up: see `load`."""
_FIRST_PART, _LARGER = 64, 8
"""One in so many blocks is looked up first, then so many times as many: looking one up takes 1 to 3
microseconds, copying it 40, so that the link is busy all the time."""


@dataclass(frozen=True, slots=True)
class OffloadLimits:
    """
    Attributes:
        reserve: free blocks that are kept ready to be handed out without loss, if need be by
            storing others that come next.
        cached: most free blocks that keep a published prefix; None: no limit.
        write_through: store blocks as soon as they are published.
    """

    reserve: int
    cached: int | None = None
    write_through: bool = False


@dataclass(slots=True)
class MovesOver:
    """What became of moves: blocks that may be free again (to be handed out first, the last one
    last), tickets that failed."""

    back: list[NDArray[np.int64]] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)


class BlockTransfers:
    """Loads, stores, and which free blocks are still to be stored."""

    def __init__(
        self, tier: HostTier, prefix: PrefixCache, limits: OffloadLimits, num_blocks: int
    ) -> None:
        self.tier = tier
        self._prefix = prefix
        self._limits = limits
        self._load_of = np.zeros(num_blocks, np.int64)  # ticket that fills a block, or 0
        self._loads: dict[int, NDArray[np.int64]] = {}
        self._readers: dict[int, int] = {}  # ticket to tables that wait for it
        self._storing: dict[int, int] = {}
        self._stores: dict[int, list[int]] = {}
        self._used: Counter[bytes] = Counter()  # uses that the tier has not been told of
        self._noted: list[Sequence[bytes]] = []  # the same, not yet counted
        self._cached: OrderedDict[int, None] = OrderedDict()  # free and published, oldest first
        self._unsaved: OrderedDict[int, None] = OrderedDict()  # those of them not yet looked at
        self._dropped: list[int] = []  # blocks that nobody finds any more for want of a parent

    # -- blocks -----------------------------------------------------------------------------

    def is_moving(self, block: int) -> bool:
        return block in self._storing or bool(self._load_of[block])

    @property
    def moving(self) -> set[int]:
        return {*np.flatnonzero(self._load_of).tolist(), *self._storing}

    @property
    def any_moving(self) -> bool:
        return bool(self._loads or self._stores)

    def taken(self, block: int) -> None:
        """A free block has readers again."""
        self._cached.pop(block, None)
        self._unsaved.pop(block, None)

    def evict(self, blocks: Iterable[int]) -> None:
        """Forgets what is in blocks, which are handed out or void. Those that follow them lose
        their prefix as well, if it was nowhere else: nobody finds them without it."""
        gone = []
        for block in blocks:
            entry = self._prefix.evict(block)
            if block in self._cached:
                self.taken(block)
            if entry is not None:
                gone.append(entry)
        if gone:
            self.tier.left(gone)
            self._drop_behind(gone + self.tier.take_lost())

    def _drop_behind(self, lost: list[tuple[bytes, bytes]]) -> None:
        """Forgets blocks of the device behind these (source and key), as far as they are nowhere
        any more. Few have any: as a rule, what follows a block leaves before it does."""
        prefix = self._prefix
        while lost:
            source, key = lost.pop()
            children = prefix.children(key)
            if not children or prefix.finds(source) or self.tier.holds(source):
                continue
            lost.append((source, key))  # until none is left: a child may have a twin
            for child in children:
                self.taken(child)
                entry = prefix.evict(child)
                if entry is not None:  # else its twin follows, which is here soon
                    self.tier.left([entry])
                    lost.append(entry)
            self._dropped += children
            lost += self.tier.take_lost()

    def take_dropped(self) -> list[int]:
        """Blocks that lost their prefix with a parent, since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def freed(self, blocks: Iterable[int]) -> None:
        """Published blocks that are free now, in the order in which they are to be handed out."""
        fresh = dict.fromkeys(blocks)
        self._cached.update(fresh)
        self._unsaved.update(fresh)

    def returned(self, blocks: Iterable[int]) -> None:
        """Published blocks that are free again and to be handed out before all others, the last
        one first."""
        for block in blocks:
            self._cached[block] = None
            self._cached.move_to_end(block, last=False)

    def note_use(self, keys: Sequence[bytes]) -> None:
        """One more request uses these blocks. The tier is told when there is time, or need."""
        self._noted.append(keys)

    def tell_uses(self, most: int) -> bool:
        """Tells the tier of so many blocks, those used first; whether stores may go by what it
        knows now: it knows all, or will not for a while."""
        used = self._count_uses()
        if not used:
            return True
        if len(used) > _LONG_QUEUE:
            most = max(most, len(used) // 8)
        if len(used) <= most:
            self.tier.note_use(used)
            self._used = Counter()
            return True
        self.tier.note_use({key: used.pop(key) for key in list(islice(used, most))})
        return len(used) > _LONG_QUEUE

    def _count_uses(self) -> Counter[bytes]:
        for keys in self._noted:
            self._used.update(keys)
        self._noted.clear()
        return self._used

    def published(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Blocks that a running sequence has filled."""
        if self._limits.write_through:
            self.tell_uses(len(self._count_uses()))
            held = [b for b in blocks if self._prefix.holds(b) and b not in self._storing]
            victims = [EvictionCandidate(b, *self._prefix.entry(b)) for b in held]
            self._store([v for v in victims if self._is_to_store(v)])

    def forget_published(self) -> None:
        """The prefix cache was cleared."""
        self._cached.clear()
        self._unsaved.clear()
        self.tier.clear()
        self.tier.take_lost()

    # -- loads ------------------------------------------------------------------------------

    def load(self, hit: HostHit, blocks: list[int], after_step: int, compute: float | None) -> int:
        """Starts a load into blocks that nobody else has. They are published at once: who finds
        them waits for the ticket, which is returned, as the one who asked does."""
        index = np.array(blocks, np.int64)
        ticket = self.tier.load(hit, index, after_step, compute)
        self._loads[ticket] = index
        self._load_of[index] = ticket
        self._readers[ticket] = 0
        self._prefix.adopt(hit.sources, hit.keys, blocks)
        return ticket

    def tickets_of(self, blocks: NDArray[np.int64]) -> set[int]:
        """Loads under way that fill one of these blocks."""
        if not self._loads:
            return set()
        return set(np.unique(self._load_of[blocks]).tolist()) - {0}

    def under_way(self, tickets: Iterable[int]) -> set[int]:
        return {ticket for ticket in tickets if ticket in self._loads}

    def join(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            self._readers[ticket] += 1

    def leave(self, tickets: Iterable[int]) -> None:
        """A table ends. A load without readers is aborted and found by nobody any more."""
        for ticket in tickets:
            if ticket not in self._loads:
                continue
            self._readers[ticket] -= 1
            if not self._readers[ticket]:
                self.evict(self._loads[ticket].tolist())
                self.tier.abort(ticket)

    # -- both -------------------------------------------------------------------------------

    def poll(self, over: Iterable[int]) -> MovesOver:
        """What has ended since the last call; see `HostTier.poll`."""
        events = self.tier.poll(over)
        result = MovesOver(failed=set(events.failed))
        for ticket in (*events.loaded, *events.failed):
            index = self._loads.pop(ticket)
            del self._readers[ticket]
            self._load_of[index] = 0
            if ticket in result.failed:
                self.evict(index.tolist())  # their content is void
            result.back.append(index)
        for ticket in events.stored:
            blocks = self._stores.pop(ticket)
            for block in blocks:
                del self._storing[block]
            result.back.append(np.array(blocks, np.int64))
        self._drop_behind(self.tier.take_lost())
        return result

    @property
    def num_wanted(self) -> int:
        """Blocks beyond the limit that are still to be looked at, or stored."""
        limit = self._limits.cached
        return 0 if limit is None else min(len(self._unsaved), len(self._cached) - limit)

    def store(self, num_free: int, most: int) -> list[int]:
        """Stores blocks that are about to be handed out, or are beyond the limit.

        Args:
            num_free: blocks in the free list.
            most: blocks to look at.

        Returns:
            Blocks whose stores have begun: no longer free.
        """
        if not self.tell_uses(2 * most):
            return []
        clean = num_free - len(self._unsaved)
        wanted = min(max(self._limits.reserve - clean, self.num_wanted), most)
        room = min(max(1, num_free // 4), _MOST_AT_ONCE) - len(self._storing)
        victims: list[EvictionCandidate] = []
        for block in list(islice(self._unsaved, wanted)) if wanted > 0 < room else ():
            victim = EvictionCandidate(block, *self._prefix.entry(block))
            if self._is_to_store(victim):
                victims.append(victim)
                if len(victims) == room:
                    break
            else:
                del self._unsaved[block]
        taken = self._store(victims)
        for block in taken:
            self.taken(block)
        return [block for block in taken if block in self._storing]

    def beyond_limit(self, most: int) -> list[int]:
        """So many free blocks that lose their prefix for the limit's sake: the oldest, as far as
        they are stored or not to be."""
        limit = self._limits.cached
        if limit is None or len(self._cached) <= limit:
            return []
        surplus = list(islice(self._cached, min(len(self._cached) - limit, most)))
        return [block for block in surplus if block not in self._unsaved]

    def _is_to_store(self, victim: EvictionCandidate) -> bool:
        return self.tier.wants(victim.key) and not self.tier.holds(victim.source)

    def _store(self, victims: list[EvictionCandidate]) -> list[int]:
        if not victims:
            return []
        count, ticket = self.tier.store(victims)
        blocks = [victim.block for victim in victims[:count]]
        if ticket:
            self._stores[ticket] = blocks
            self._storing.update(dict.fromkeys(blocks, ticket))
        self._drop_behind(self.tier.take_lost())
        return blocks

    def check_integrity(self, free: Iterable[int]) -> None:
        """Asserts that every moving block belongs to one ticket."""
        by_load = sorted(block for index in self._loads.values() for block in index.tolist())
        by_store = sorted(block for blocks in self._stores.values() for block in blocks)
        loading = np.flatnonzero(self._load_of).tolist()
        assert by_load == loading, "a loading block was lost or doubled"
        assert by_store == sorted(self._storing), "a storing block was lost or doubled"
        assert not set(loading) & self._storing.keys(), "a block moves both ways"
        assert self._readers.keys() == self._loads.keys()
        free = set(free)
        assert not free & self.moving, "a moving block is free"
        assert self._unsaved.keys() <= self._cached.keys() <= free
        assert all(self._prefix.holds(block) for block in self._cached)


def parts_of(count: int) -> tuple[int, ...]:
    """How many blocks of a prefix are looked up at a time, see `BlockManager.load`."""
    if count < _LONG_PREFIX:
        return (count,)
    first = count // _FIRST_PART
    return first, _LARGER * first, count - (1 + _LARGER) * first
