"""Which host blocks hold which blocks of the prefix cache, and which of them is evicted next.
Bookkeeping only: no torch, no native code, no bytes of KV.

Here a *block* is a host block unless it is called a device block. A block is found by its lookup
key, parent hash + token bytes, as in `kv_cache.prefix_cache`. It is FREE, STORING (being copied
from the device) or READY. Hits and loads pin the blocks that they read. A block whose entry is
dropped while it is read or written is *orphaned*: it is not found any more, and becomes free when
the last reader or writer has finished.

KV is useless without its ancestors, so a block is evicted only once it has no child ("leaf first").
Blocks that the device still holds since a load are evicted first, the newest before the others:
nothing is lost. The next block after them comes from a heap in which each block has at most one
valid entry. An entry's score may be too low by now; it is put back with the current one when it
reaches the top. So using a block writes one number and does not touch the heap.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from math import exp2, log2

from hetero_llm.bridge.kv_offload.free_runs import FreeRuns
from hetero_llm.core.kv_events import CPU, KvEvents, NoKvEvents
from hetero_llm.kv_cache.host_tier import EvictionCandidate, HostHit

POLICIES = ("lru", "slru", "cost")
"""Which block is evicted first. `lru`: the least recently used. `slru`: the same, but blocks used
by two requests come last. `cost`: the smallest (decaying uses) x (time to recompute it)."""

FREE, STORING, READY = 0, 1, 2

_HASH_BYTES = 32  # SHA-256; a lookup key begins with the parent's hash

_NONE = -1
_PROTECTED_USES = 2
_PROTECTED_SHARE = 0.8
"""Of all blocks; beyond it the least recently used protected block loses its protection."""
_PROTECTED = 1 << 60  # added to a score: more than any clock
_TWICE_DEPTH_BLOCKS = 1656.0
"""Ancestors of a block that costs twice as much to recompute as the first one: attention takes as
long there as all else (16 tokens a block, shape of Llama-3.1-8B)."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Result of `HostBlockIndex.reserve`.

    Attributes:
        taken: how many of the first candidates are in host memory now, or will be after the copy.
        device_blocks: what is to be copied.
        host_blocks: the destination of each, in ascending runs where possible.
    """

    taken: int
    device_blocks: list[int]
    host_blocks: list[int]


# large: the maps and the eviction order change together, block by block
class HostBlockIndex:
    """Contents, states and eviction order of host blocks. Each operation takes about a microsecond
    a block.

    Args:
        num_blocks: initial number; see `add_blocks`.
        policy: one of `POLICIES`.
        min_uses: requests that must have used a block before it is stored.
        max_ghosts: maximum number of blocks outside host memory whose use counts are kept.
        events: called when `match` finds a block, and when it does not any more; None: no
            router follows.

    Attributes:
        num_blocks: in all states.
        evictions: blocks evicted for others since start.
    """

    def __init__(
        self,
        num_blocks: int = 0,
        *,
        policy: str = "lru",
        min_uses: int = 1,
        max_ghosts: int = 65536,
        events: KvEvents | None = None,
    ) -> None:
        assert policy in POLICIES and min_uses >= 1 and max_ghosts >= 1
        self.num_blocks = 0
        self.evictions = 0
        self._policy = policy
        self._min_uses = min_uses
        self._max_ghosts = max_ghosts
        self._events: KvEvents = events or NoKvEvents()
        self._free = FreeRuns()
        self._recent_hits: list[list[int]] = []  # not yet applied to the scores
        # These dictionaries hold only bytes and integers, which the garbage collector never visits.
        self._by_lookup_key: dict[bytes, int] = {}
        self._by_hash: dict[bytes, int] = {}
        self._first_child: dict[bytes, int] = {}  # by parent hash; the parent may not be here
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()  # use counts of blocks not here
        self._protected: OrderedDict[int, None] = OrderedDict()  # slru: least recently used first
        self._on_device: dict[bytes, None] = {}  # lookup keys of blocks that the device holds, too
        self._evicted: list[tuple[bytes, bytes]] = []  # since `take_evicted`: lookup key, hash
        # One entry for each block.
        self._state = bytearray()
        self._pins: list[int] = []
        self._lookup_key: list[bytes] = []  # empty: free or orphaned
        self._hash: list[bytes] = []
        self._parent_hash: list[bytes] = []
        self._next: list[int] = []  # sibling with the same parent
        self._previous: list[int] = []
        self._uses: list[int] = []
        self._depth: list[int] = []  # number of ancestors, as far as known
        self._score: list[float] = []
        self._fading: list[float] = []  # cost: log2 of the decayed uses, plus `_age`
        self._in_heap: list[float | None] = []  # score of the valid heap entry
        self._heap: list[tuple[float, int]] = []
        self._clock = 0  # counts blocks used and stored
        self._age = 0.0  # the same in multiples of `num_blocks`
        if num_blocks:
            self.add_blocks(num_blocks)

    @property
    def num_used(self) -> int:
        """Blocks that are not free."""
        return self.num_blocks - self._free.count

    @property
    def num_pinned(self) -> int:
        """Blocks pinned by hits or loads."""
        return self.num_blocks - self._pins.count(0)

    def num_pins(self, block: int) -> int:
        """Hits and loads that pin a block."""
        return self._pins[block]

    def entries(self) -> list[tuple[bytes, bytes, bool]]:
        """Lookup key and hash of every block held or being stored, and whether `match` finds it."""
        return [
            (lookup_key, self._hash[block], self._state[block] == READY)
            for lookup_key, block in self._by_lookup_key.items()
        ]

    def add_blocks(self, count: int) -> None:
        """Adds blocks with the next higher numbers: their memory has become usable."""
        assert count >= 1
        first = self.num_blocks
        self.num_blocks += count
        self._state.extend(bytes(count))
        for numbers in (self._pins, self._uses, self._depth):
            numbers.extend([0] * count)
        for links in (self._next, self._previous):
            links.extend([_NONE] * count)
        for names in (self._lookup_key, self._hash, self._parent_hash):
            names.extend([b""] * count)
        for scores in (self._score, self._fading):
            scores.extend([0.0] * count)
        self._in_heap.extend([None] * count)
        self._free.give_range(first, self.num_blocks)

    def match(self, parent_hash: bytes, contents: Iterable[bytes]) -> HostHit:
        """See `HostTier.match`. Blocks still being stored are not found."""
        by_lookup_key, hash_of = self._by_lookup_key, self._hash
        state, pins = self._state, self._pins
        blocks: list[int] = []
        lookup_keys: list[bytes] = []
        block_hashes: list[bytes] = []
        for content in contents:
            lookup_key = parent_hash + content
            block = by_lookup_key.get(lookup_key, _NONE)
            if block < 0 or state[block] != READY:
                break
            parent_hash = hash_of[block]
            pins[block] += 1
            blocks.append(block)
            lookup_keys.append(lookup_key)
            block_hashes.append(parent_hash)
        if blocks:
            self._recent_hits.append(blocks)  # scored later: the request waits for this call
        return HostHit(tuple(blocks), tuple(lookup_keys), tuple(block_hashes))

    def unpin(self, blocks: Iterable[int]) -> None:
        """Releases the pins that `match` took."""
        pins, lookup_key = self._pins, self._lookup_key
        freed = []
        for block in blocks:
            pins[block] -= 1
            assert pins[block] >= 0, "a host block was unpinned twice"
            if not pins[block]:
                if lookup_key[block]:
                    self._push_if_evictable(block)
                elif self._state[block] == READY:
                    freed.append(block)
        self._make_free(freed)

    def reserve(self, candidates: Sequence[EvictionCandidate]) -> Reserved:
        """Assigns host blocks, STORING from now on, to device blocks about to be evicted, and
        evicts others to make room.

        Candidates that are here already get none. Neither they nor the parents of the others are
        evicted.
        """
        self._touch_recent_hits()
        by_lookup_key = self._by_lookup_key
        new: dict[bytes, int] = {}  # lookup key to position in `candidates`
        held: list[tuple[int, int]] = []  # position, host block
        for position, candidate in enumerate(candidates):
            lookup_key = candidate.lookup_key
            block = by_lookup_key.get(lookup_key, _NONE)
            if block >= 0:
                held.append((position, block))
            elif lookup_key not in new:
                new[lookup_key] = position
        if len(new) > self._free.count:
            parents = [self._by_hash.get(each[:_HASH_BYTES], _NONE) for each in new]
            guarded = [*(block for block in parents if block >= 0), *(block for _, block in held)]
            for block in guarded:
                self._pins[block] += 1
            self._make_room(len(new))
            self.unpin(guarded)
        positions = list(new.values())
        room = min(len(new), self._free.count)
        taken = positions[room] if room < len(new) else len(candidates)
        self._touch([block for position, block in held if position < taken])
        device_blocks: list[int] = []
        blocks: list[int] = []
        for chain, upwards in _chains([candidates[position] for position in positions[:room]]):
            blocks += self._place(chain, upwards)
            device_blocks += [candidate.block for candidate in chain]
        return Reserved(taken, device_blocks, blocks)

    def stored(self, blocks: Iterable[int], ok: bool) -> None:
        """Called when the store into these blocks has ended. If it failed, they become free."""
        freed = []
        ready: list[tuple[bytes, bytes]] = []
        for block in blocks:
            assert self._state[block] == STORING and not self._pins[block]
            lookup_key = self._lookup_key[block]
            if ok and lookup_key:
                self._state[block] = READY
                ready.append((lookup_key, self._hash[block]))
                self._push_if_evictable(block)
                continue
            if lookup_key:
                self._forget(block)
            self._state[block] = READY
            freed.append(block)
        if ready and self._events.is_on:
            self._events.stored(CPU, ready)
        self._make_free(freed)

    def holds(self, lookup_key: bytes) -> bool:
        """Whether the block is here or being stored."""
        return lookup_key in self._by_lookup_key

    def wants(self, block_hash: bytes) -> bool:
        """Whether at least `min_uses` requests have used a block."""
        return self._min_uses <= 1 or self.uses(block_hash) >= self._min_uses

    def uses(self, block_hash: bytes) -> int:
        """How many requests have used a block, as far as it is remembered."""
        block = self._by_hash.get(block_hash, _NONE)
        return self._ghosts.get(block_hash, 0) if block < 0 else self._uses[block]

    def add_use_counts(self, new: Mapping[bytes, int]) -> None:
        """Adds to the use counts of blocks, here or not: block hash to number of requests."""
        self._touch_recent_hits()
        by_hash, uses, simple = self._by_hash, self._uses, self._policy == "lru"
        for block_hash, times in new.items():
            block = by_hash.get(block_hash, _NONE)
            if block < 0:
                self._remember(block_hash, self._ghosts.pop(block_hash, 0) + times)
                continue
            uses[block] += times
            if simple:
                continue
            if self._policy == "cost":
                self._fading[block] = _log_add(self._fading[block], self._age + log2(times))
                self._set_cost(block)
            elif uses[block] >= _PROTECTED_USES:
                self._protect(block)

    def mark_on_device(self, lookup_keys: Iterable[bytes]) -> None:
        """Notes that the device holds these blocks, too, until `device_evicted` is called."""
        self._on_device.update(dict.fromkeys(lookup_keys))

    def device_evicted(self, entries: Iterable[tuple[bytes, bytes]]) -> None:
        """See `HostTier.device_evicted`."""
        for lookup_key, block_hash in entries:
            self._on_device.pop(lookup_key, None)
            self.drop_descendants(block_hash)

    def drop_descendants(self, block_hash: bytes) -> None:
        """Drops all descendants of a block that the device has evicted, unless it is here."""
        if block_hash in self._by_hash or block_hash not in self._first_child:
            return
        freed = []
        parents = [block_hash]
        while parents:
            for block in list(self._children(parents.pop())):
                parents.append(self._hash[block])
                self._forget(block)
                if self._state[block] == READY and not self._pins[block]:
                    freed.append(block)
        self._make_free(freed)

    def take_evicted(self) -> list[tuple[bytes, bytes]]:
        """Returns and clears the blocks evicted or dropped: lookup key and hash of each."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def set_depth(self, blocks: Sequence[int], first: int) -> None:
        """Sets the number of ancestors: `first` for the first of consecutive blocks, and so on."""
        if self._policy == "cost":
            for depth, block in enumerate(blocks, first):
                if self._depth[block] != depth and self._lookup_key[block]:
                    self._depth[block] = depth
                    self._set_cost(block)

    def clear(self) -> None:
        """Forgets all blocks and use counts. Blocks being read or written become free later."""
        used = [block for block, lookup_key in enumerate(self._lookup_key) if lookup_key]
        self._evicted += [(self._lookup_key[block], self._hash[block]) for block in used]
        found_before = [self._hash[block] for block in used if self._state[block] == READY]
        if found_before and self._events.is_on:
            self._events.removed(CPU, found_before)
        for block in used:
            self._lookup_key[block] = self._hash[block] = self._parent_hash[block] = b""
            self._next[block] = self._previous[block] = _NONE
            self._in_heap[block] = None
        for found in (self._by_lookup_key, self._by_hash, self._first_child, self._on_device):
            found.clear()
        self._ghosts.clear()
        self._recent_hits.clear()
        self._protected.clear()
        self._heap.clear()
        state, pins = self._state, self._pins
        self._make_free([b for b in used if state[b] == READY and not pins[b]])

    def check_integrity(self) -> None:
        """Asserts that maps, states, pins and the heap agree; slow."""
        free = {block for run in self._free.runs() for block in range(*run)}
        assert len(free) == self._free.count
        assert free == {block for block in range(self.num_blocks) if self._state[block] == FREE}
        found = {key: block for block, key in enumerate(self._lookup_key) if key}
        assert found == self._by_lookup_key, "maps differ from the blocks' lists"
        assert {self._hash[block]: block for block in found.values()} == self._by_hash
        children: dict[bytes, set[int]] = {}
        for lookup_key, block in found.items():
            assert self._parent_hash[block] == lookup_key[:_HASH_BYTES]
            children.setdefault(self._parent_hash[block], set()).add(block)
        assert {each: set(self._children(each)) for each in self._first_child} == children
        for block in range(self.num_blocks):
            if self._state[block] == FREE:
                in_use = self._pins[block] or self._lookup_key[block]
                assert not in_use, "a free host block is in use"
            elif not self._lookup_key[block]:
                busy = self._pins[block] or self._state[block] == STORING
                assert busy, "an orphaned host block is neither used nor free"
            elif self._evictable(block):
                entry = self._in_heap[block]
                assert entry is not None, "a leaf can never be evicted"
                assert entry <= self._score[block], "a leaf is evicted too late"
        entries = set(self._heap)
        for block, score in enumerate(self._in_heap):
            assert score is None or (score, block) in entries, "an entry is missing"
        assert all(self._lookup_key[block] for block in self._protected)
        assert len(self._ghosts) <= self._max_ghosts

    def check_busy(self, loading: list[int], storing: list[int]) -> None:
        """Asserts that each of `loading` is pinned at least as often as it occurs there, and that
        exactly `storing` are being stored."""
        for block, readers in Counter(loading).items():
            assert self._pins[block] >= readers, "a load reads a host block without a pin"
        state = self._state
        written = [block for block in range(self.num_blocks) if state[block] == STORING]
        assert written == sorted(storing), "stores differ from the blocks' states"

    # -- contents -----------------------------------------------------------------------------

    def _make_free(self, blocks: list[int]) -> None:
        if blocks:
            for block in blocks:
                self._state[block] = FREE
            self._free.give(blocks)

    def _place(self, chain: list[EvictionCandidate], upwards: bool) -> list[int]:
        """Takes free blocks for consecutive candidates, next to their parent's or child's block,
        and enters them in all maps.

        Args:
            chain: in the prompt's order. upwards: they arrived in that order.
        """
        first_child, by_hash = self._first_child, self._by_hash
        after = by_hash.get(chain[0].lookup_key[:_HASH_BYTES], _NONE)
        before = first_child.get(chain[-1].block_hash, _NONE)
        blocks = self._free.take(len(chain), after=after, before=before, low=upwards)
        self._tick(len(chain))
        for block, candidate in zip(blocks, chain, strict=True):
            lookup_key, block_hash = candidate.lookup_key, candidate.block_hash
            parent_hash = lookup_key[:_HASH_BYTES]
            assert not self._state[block] and block_hash not in by_hash
            self._state[block] = STORING
            self._lookup_key[block], self._hash[block] = lookup_key, block_hash
            self._parent_hash[block] = parent_hash
            self._by_lookup_key[lookup_key] = by_hash[block_hash] = block
            self._previous[block] = _NONE
            self._next[block] = sibling = first_child.get(parent_hash, _NONE)
            if sibling >= 0:
                self._previous[sibling] = block
            first_child[parent_hash] = block
            self._uses[block] = self._ghosts.pop(block_hash, 0)
            self._score[block] = self._clock
        if self._policy != "lru":
            self._score_new(blocks)
        return blocks

    def _score_new(self, blocks: list[int]) -> None:
        """Sets the first scores under a policy that uses more than the clock."""
        for block in blocks:
            if self._policy == "cost":
                above = self._by_hash.get(self._parent_hash[block], _NONE)
                self._depth[block] = 0 if above < 0 else self._depth[above] + 1
                self._fading[block] = log2(max(self._uses[block], 1)) + self._age
                self._set_cost(block)
            elif self._uses[block] >= _PROTECTED_USES:
                self._protect(block)

    def _forget(self, block: int) -> None:
        """Takes a block out of all maps; setting its state is left to the caller."""
        block_hash, parent_hash = self._hash[block], self._parent_hash[block]
        self._evicted.append((self._lookup_key[block], block_hash))
        if self._events.is_on and self._state[block] == READY:
            self._events.removed(CPU, (block_hash,))
        del self._by_lookup_key[self._lookup_key[block]], self._by_hash[block_hash]
        following, previous = self._next[block], self._previous[block]
        if following >= 0:
            self._previous[following] = previous
        if previous >= 0:
            self._next[previous] = following
        elif following >= 0:
            self._first_child[parent_hash] = following
        else:
            del self._first_child[parent_hash]
            above = self._by_hash.get(parent_hash, _NONE)
            if above >= 0:
                self._push_if_evictable(above)
        self._lookup_key[block] = self._hash[block] = self._parent_hash[block] = b""
        self._in_heap[block] = None
        if self._protected:
            self._protected.pop(block, None)
        if self._uses[block]:
            self._remember(block_hash, self._uses[block])

    def _children(self, block_hash: bytes) -> Iterator[int]:
        block = self._first_child.get(block_hash, _NONE)
        while block >= 0:
            yield block
            block = self._next[block]

    def _remember(self, block_hash: bytes, uses: int) -> None:
        self._ghosts[block_hash] = uses
        if len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)

    # -- eviction order -----------------------------------------------------------------------

    def _tick(self, count: int) -> None:
        self._clock += count
        self._age += count / self.num_blocks

    def _touch_recent_hits(self) -> None:
        for blocks in self._recent_hits:
            self._touch([block for block in blocks if self._lookup_key[block]])
        self._recent_hits.clear()

    def _touch(self, blocks: Sequence[int]) -> None:
        """Notes a use of blocks. Under `cost` only requests count: see `add_use_counts`."""
        if not blocks:
            return
        self._tick(len(blocks))
        if self._policy == "cost":
            return
        score, clock = self._score, self._clock
        if self._policy == "lru":
            for block in blocks:
                score[block] = clock
            return
        for block in blocks:
            if self._uses[block] >= _PROTECTED_USES:
                self._protect(block)
            else:
                score[block] = clock

    def _protect(self, block: int) -> None:
        protected = self._protected
        protected[block] = None
        protected.move_to_end(block)
        self._score[block] = self._clock + _PROTECTED
        if len(protected) > max(1.0, _PROTECTED_SHARE * self.num_blocks):
            demoted, _ = protected.popitem(last=False)
            self._set_score(demoted, self._clock)

    def _set_cost(self, block: int) -> None:
        compute = log2(1.0 + self._depth[block] / _TWICE_DEPTH_BLOCKS)
        self._set_score(block, self._fading[block] + compute)

    def _set_score(self, block: int, score: float) -> None:
        """Sets a score that may be lower than that of the heap entry."""
        self._score[block] = score
        entry = self._in_heap[block]
        if entry is not None and score < entry:
            self._push(block)

    def _evictable(self, block: int) -> bool:
        return (
            self._state[block] == READY
            and not self._pins[block]
            and self._hash[block] not in self._first_child
        )

    def _push_if_evictable(self, block: int) -> None:
        """Called whenever a block may have become evictable."""
        if self._in_heap[block] is None and self._evictable(block):
            self._push(block)

    def _push(self, block: int) -> None:
        self._in_heap[block] = self._score[block]
        heappush(self._heap, (self._score[block], block))
        if len(self._heap) > 2 * self.num_blocks + 64:
            self._heap = [(s, block) for block, s in enumerate(self._in_heap) if s is not None]
            heapify(self._heap)

    def _make_room(self, count: int) -> None:
        """Evicts blocks until `count` are free or no more can be evicted."""
        missing = count - self._free.count
        freed: list[int] = []
        while len(freed) < missing:
            block = self._pop_evictable()
            if block < 0:
                break
            self._forget(block)
            freed.append(block)
        self.evictions += len(freed)
        self._make_free(freed)

    def _pop_evictable(self) -> int:
        """The block to evict next; `_NONE` if there is none."""
        while self._on_device:
            block = self._by_lookup_key.get(self._on_device.popitem()[0], _NONE)
            if block >= 0 and self._evictable(block):
                return block
        heap, in_heap = self._heap, self._in_heap
        while heap:
            score, block = heap[0]
            if in_heap[block] != score:
                heappop(heap)
            elif not self._evictable(block):
                heappop(heap)
                in_heap[block] = None
            elif self._score[block] > score:
                in_heap[block] = self._score[block]
                heapreplace(heap, (self._score[block], block))
            else:
                return block
        return _NONE


def _log_add(a: float, b: float) -> float:
    """log2(2^a + 2^b)."""
    high, low = max(a, b), min(a, b)
    return high + log2(1.0 + exp2(low - high))


def _chains(candidates: list[EvictionCandidate]) -> Iterator[tuple[list[EvictionCandidate], bool]]:
    """Cuts candidates into chains of consecutive blocks: (chain in the prompt's order, whether it
    arrived in that order). The device evicts a prompt's tail first, but computes its head first."""
    start = 0
    while start < len(candidates):
        end = start + 1
        upwards = end < len(candidates) and _follows(candidates[start], candidates[end])
        while end < len(candidates) and (
            _follows(candidates[end - 1], candidates[end])
            if upwards
            else _follows(candidates[end], candidates[end - 1])
        ):
            end += 1
        piece = candidates[start:end]
        yield (piece if upwards else piece[::-1]), upwards
        start = end


def _follows(before: EvictionCandidate, behind: EvictionCandidate) -> bool:
    return behind.lookup_key.startswith(before.block_hash)
