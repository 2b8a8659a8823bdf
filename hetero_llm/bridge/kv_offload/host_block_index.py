"""Which slots of host memory hold which blocks of the prefix cache, and which to give up first.
Bookkeeping only: no torch, no native code, no bytes of KV.

A block is found by its *source*, parent key + token bytes, exactly as in `kv_cache.prefix_cache`. A
slot is FREE, STORING (its bytes are on their way from the device) or READY. Loads and hits pin the
slots that they read. A slot whose block is forgotten while someone still reads or writes it is
*orphaned*: nobody finds it any more, and it becomes free when the last of them is done.

A block is of no use without those before it, so a slot is given up only once none that follow it
are left ("leaf first"). Blocks that were loaded, and are on the device still, go before all others,
the newest first: they are not lost by it. The next to go after them comes from a heap in which a
slot has at most one entry that counts. Its score may be too low by now; it is then put back with
the right one when it reaches the top: using a slot writes a number and leaves the heap alone.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from math import exp2, log2

from hetero_llm.bridge.kv_offload.free_runs import FreeRuns
from hetero_llm.kv_cache.host_tier import EvictionCandidate, HostHit

POLICIES = ("lru", "slru", "cost")
"""What goes first. `lru`: what was not used for longest. `slru`: the same, but what two requests
have used goes last. `cost`: the least (uses, fading with time) x (time to compute it anew)."""

FREE, STORING, READY = 0, 1, 2

_KEY_BYTES = 32  # SHA-256: what a source begins with
_NONE = -1
_PROTECTED_USES = 2
_PROTECTED_SHARE = 0.8
"""Of all slots: beyond it the least recent of the protected ones counts as an ordinary one."""
_PROTECTED = 1 << 60  # above any count of blocks
_TWICE_DEPTH_BLOCKS = 1656.0
"""So many blocks before a block make it cost twice as much to compute as the first one: attention
takes as long there as all else (16 tokens a block, shape of Llama-3.1-8B)."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """What `HostBlockIndex.reserve` did.

    Attributes:
        taken: how many of the first victims are in host memory or on their way now.
        blocks: device blocks to copy.
        slots: for each of `blocks`, where to; in ascending runs where possible.
    """

    taken: int
    blocks: list[int]
    slots: list[int]


class HostBlockIndex:
    """Slots, who is in them, and who goes next. Everything here takes about a microsecond a block.

    Args:
        num_slots: to begin with; see `add_slots`.
        policy: one of `POLICIES`.
        min_uses: requests that must have used a block before it is wanted.
        ghost_keys: how many blocks that are not in host memory have their uses remembered.

    Attributes:
        num_slots: in all.
        evictions: blocks given up for others since start.
    """

    def __init__(
        self,
        num_slots: int = 0,
        *,
        policy: str = "lru",
        min_uses: int = 1,
        ghost_keys: int = 65536,
    ) -> None:
        assert policy in POLICIES and min_uses >= 1 and ghost_keys >= 1
        self.num_slots = 0
        self.evictions = 0
        self._policy = policy
        self._min_uses = min_uses
        self._ghost_keys = ghost_keys
        self._free = FreeRuns()
        self._found: list[list[int]] = []  # slots of hits whose use has not been noted
        # Found by; these dictionaries hold bytes and integers alone: nothing for the collector.
        self._slot_of: dict[bytes, int] = {}  # by source
        self._slot_of_key: dict[bytes, int] = {}
        self._first_child: dict[bytes, int] = {}  # by parent key, which may not be here itself
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()  # uses of blocks that are not here
        self._protected: OrderedDict[int, None] = OrderedDict()  # slru, least recent first
        self._twice: dict[bytes, None] = {}  # sources of blocks that the device has as well
        self._lost: list[tuple[bytes, bytes]] = []  # given up since `take_lost`: source, key
        # Of each slot.
        self._state = bytearray()
        self._pins: list[int] = []
        self._source: list[bytes] = []  # empty: free or orphaned
        self._key: list[bytes] = []
        self._parent: list[bytes] = []  # key of the block before
        self._next: list[int] = []  # sibling with the same parent
        self._previous: list[int] = []
        self._uses: list[int] = []
        self._depth: list[int] = []  # blocks before it, as far as known
        self._score: list[float] = []
        self._fading: list[float] = []  # cost: log2 of uses, all but for the growth of `_age`
        self._in_heap: list[float | None] = []  # score of the entry that counts
        self._heap: list[tuple[float, int]] = []
        self._clock = 0  # blocks used and stored
        self._age = 0.0  # the same in times that the whole memory was turned over
        if num_slots:
            self.add_slots(num_slots)

    @property
    def num_used(self) -> int:
        """Slots that are not free."""
        return self.num_slots - self._free.count

    @property
    def num_pinned(self) -> int:
        """Slots that someone reads, or is about to."""
        return self.num_slots - self._pins.count(0)

    def add_slots(self, count: int) -> None:
        """More slots, numbered on: the memory behind them has become usable."""
        assert count >= 1
        first = self.num_slots
        self.num_slots += count
        self._state.extend(bytes(count))
        for numbers in (self._pins, self._uses, self._depth):
            numbers.extend([0] * count)
        for links in (self._next, self._previous):
            links.extend([_NONE] * count)
        for names in (self._source, self._key, self._parent):
            names.extend([b""] * count)
        for scores in (self._score, self._fading):
            scores.extend([0.0] * count)
        self._in_heap.extend([None] * count)
        self._free.give_range(first, self.num_slots)

    def match(self, parent: bytes, contents: Iterable[bytes]) -> HostHit:
        """See `HostTier.match`. Blocks still being stored are not found."""
        slot_of, key_of, state, pins = self._slot_of, self._key, self._state, self._pins
        slots: list[int] = []
        sources: list[bytes] = []
        keys: list[bytes] = []
        for content in contents:
            source = parent + content
            slot = slot_of.get(source, _NONE)
            if slot < 0 or state[slot] != READY:
                break
            parent = key_of[slot]
            pins[slot] += 1
            slots.append(slot)
            sources.append(source)
            keys.append(parent)
        if slots:
            self._found.append(slots)  # who is found waits for its load: the order can wait, too
        return HostHit(tuple(slots), tuple(sources), tuple(keys))

    def unpin(self, slots: Iterable[int]) -> None:
        """Ends what `match` began."""
        pins, source = self._pins, self._source
        freed = []
        for slot in slots:
            pins[slot] -= 1
            assert pins[slot] >= 0, "a slot was unpinned twice"
            if not pins[slot]:
                if source[slot]:
                    self._offer(slot)
                elif self._state[slot] == READY:
                    freed.append(slot)
        self._make_free(freed)

    def reserve(self, victims: Sequence[EvictionCandidate]) -> Reserved:
        """Slots for blocks that leave the device; they count as STORING from now on.

        Blocks that are here already get none. Neither they nor the parents of newcomers are given
        up to make room.
        """
        self._note_found()
        slot_of = self._slot_of
        new: dict[bytes, int] = {}  # source to position in `victims`
        held: list[tuple[int, int]] = []  # position, slot
        for position, victim in enumerate(victims):
            source = victim.source
            slot = slot_of.get(source, _NONE)
            if slot >= 0:
                held.append((position, slot))
            elif source not in new:
                new[source] = position
        if len(new) > self._free.count:
            parents = [self._slot_of_key.get(source[:_KEY_BYTES], _NONE) for source in new]
            guarded = [slot for slot in parents if slot >= 0] + [slot for _, slot in held]
            for slot in guarded:
                self._pins[slot] += 1
            self._make_room(len(new))
            self.unpin(guarded)
        positions = list(new.values())
        room = min(len(new), self._free.count)
        taken = positions[room] if room < len(new) else len(victims)
        self._touch([slot for position, slot in held if position < taken])
        blocks: list[int] = []
        slots: list[int] = []
        for chain, upwards in _chains([victims[position] for position in positions[:room]]):
            slots += self._enter(chain, upwards)
            blocks += [victim.block for victim in chain]
        return Reserved(taken, blocks, slots)

    def stored(self, slots: Iterable[int], ok: bool) -> None:
        """The stores into these slots are over; if they failed, the slots are free again."""
        freed = []
        for slot in slots:
            assert self._state[slot] == STORING and not self._pins[slot]
            self._state[slot] = READY
            if ok and self._source[slot]:
                self._offer(slot)
                continue
            if self._source[slot]:
                self._forget(slot)
            freed.append(slot)
        self._make_free(freed)

    def holds(self, source: bytes) -> bool:
        """Whether the block is here, or on its way."""
        return source in self._slot_of

    def wants(self, key: bytes) -> bool:
        """Whether enough requests have used a block."""
        return self._min_uses <= 1 or self.uses(key) >= self._min_uses

    def uses(self, key: bytes) -> int:
        """How many requests have used a block, as far as remembered."""
        slot = self._slot_of_key.get(key, _NONE)
        return self._ghosts.get(key, 0) if slot < 0 else self._uses[slot]

    def note_use(self, new: Mapping[bytes, int]) -> None:
        """So many more requests use these blocks, wherever they are."""
        self._note_found()
        slot_of_key, uses, simple = self._slot_of_key, self._uses, self._policy == "lru"
        for key, times in new.items():
            slot = slot_of_key.get(key, _NONE)
            if slot < 0:
                self._remember(key, self._ghosts.pop(key, 0) + times)
                continue
            uses[slot] += times
            if simple:
                continue
            if self._policy == "cost":
                self._fading[slot] = _log_add(self._fading[slot], self._age + log2(times))
                self._set_cost(slot)
            elif uses[slot] >= _PROTECTED_USES:
                self._protect(slot)

    def loaded(self, sources: Iterable[bytes]) -> None:
        """The device has these blocks as well, until `left` is told."""
        self._twice.update(dict.fromkeys(sources))

    def left(self, entries: Iterable[tuple[bytes, bytes]]) -> None:
        """Blocks are on the device no longer: source and key of each."""
        for source, key in entries:
            self._twice.pop(source, None)
            self.lost(key)

    def lost(self, key: bytes) -> None:
        """A block is nowhere any more: forgets all blocks behind it. Nothing if it is here."""
        if key in self._slot_of_key or key not in self._first_child:
            return
        freed = []
        parents = [key]
        while parents:
            for slot in list(self._children(parents.pop())):
                parents.append(self._key[slot])
                self._forget(slot)
                if self._state[slot] == READY and not self._pins[slot]:
                    freed.append(slot)
        self._make_free(freed)

    def take_lost(self) -> list[tuple[bytes, bytes]]:
        """Blocks that were given up since the last call: source and key."""
        lost, self._lost = self._lost, []
        return lost

    def set_depth(self, slots: Sequence[int], first: int) -> None:
        """Tells how many blocks come before these: `first` before the first of them, and so on."""
        if self._policy == "cost":
            for depth, slot in enumerate(slots, first):
                if self._depth[slot] != depth and self._source[slot]:
                    self._depth[slot] = depth
                    self._set_cost(slot)

    def clear(self) -> None:
        """Forgets all blocks and their uses; slots that are read or written become free later."""
        used = [slot for slot, source in enumerate(self._source) if source]
        self._lost += [(self._source[slot], self._key[slot]) for slot in used]
        for slot in used:
            self._source[slot] = self._key[slot] = self._parent[slot] = b""
            self._next[slot] = self._previous[slot] = _NONE
            self._in_heap[slot] = None
        for found in (self._slot_of, self._slot_of_key, self._first_child, self._twice):
            found.clear()
        self._ghosts.clear()
        self._found.clear()
        self._protected.clear()
        self._heap.clear()
        state, pins = self._state, self._pins
        self._make_free([slot for slot in used if state[slot] == READY and not pins[slot]])

    def check_integrity(self) -> None:
        """Asserts that all books agree; slow."""
        free = {slot for run in self._free.runs() for slot in range(*run)}
        assert len(free) == self._free.count
        assert free == {slot for slot in range(self.num_slots) if self._state[slot] == FREE}
        found = {source: slot for slot, source in enumerate(self._source) if source}
        assert found == self._slot_of, "maps differ from slots"
        assert {self._key[slot]: slot for slot in found.values()} == self._slot_of_key
        children: dict[bytes, set[int]] = {}
        for source, slot in found.items():
            assert self._parent[slot] == source[:_KEY_BYTES]
            children.setdefault(self._parent[slot], set()).add(slot)
        assert {key: set(self._children(key)) for key in self._first_child} == children
        for slot in range(self.num_slots):
            if self._state[slot] == FREE:
                assert not self._pins[slot] and not self._source[slot], "a free slot is in use"
            elif not self._source[slot]:
                busy = self._pins[slot] or self._state[slot] == STORING
                assert busy, "an orphaned slot is not free though nobody uses it"
            elif self._evictable(slot):
                entry = self._in_heap[slot]
                assert entry is not None, "a leaf can never be given up"
                assert entry <= self._score[slot], "a leaf is given up too late"
        entries = set(self._heap)
        for slot, score in enumerate(self._in_heap):
            assert score is None or (score, slot) in entries, "an entry is missing"
        assert all(self._source[slot] for slot in self._protected)
        assert len(self._ghosts) <= self._ghost_keys

    def check_busy(self, loading: list[int], storing: list[int]) -> None:
        """Asserts that each of `loading` is pinned at least as often as named, and that exactly
        `storing` are being stored."""
        for slot, readers in Counter(loading).items():
            assert self._pins[slot] >= readers, "a load reads a slot without a pin"
        state = self._state
        written = [slot for slot in range(self.num_slots) if state[slot] == STORING]
        assert written == sorted(storing), "stores differ from the slots' states"

    # -- slots --------------------------------------------------------------------------------

    def _make_free(self, slots: list[int]) -> None:
        if slots:
            for slot in slots:
                self._state[slot] = FREE
            self._free.give(slots)

    def _enter(self, chain: list[EvictionCandidate], upwards: bool) -> list[int]:
        """Puts blocks that follow each other into free slots, beside those of the blocks around
        them, and returns the slots."""
        first_child, slot_of_key = self._first_child, self._slot_of_key
        after = slot_of_key.get(chain[0].source[:_KEY_BYTES], _NONE)
        before = first_child.get(chain[-1].key, _NONE)
        slots = self._free.take(len(chain), after=after, before=before, low=upwards)
        self._tick(len(chain))
        for slot, victim in zip(slots, chain, strict=True):
            source, key = victim.source, victim.key
            parent = source[:_KEY_BYTES]
            assert not self._state[slot] and key not in slot_of_key
            self._state[slot] = STORING
            self._source[slot], self._key[slot], self._parent[slot] = source, key, parent
            self._slot_of[source] = slot_of_key[key] = slot
            self._previous[slot] = _NONE
            self._next[slot] = sibling = first_child.get(parent, _NONE)
            if sibling >= 0:
                self._previous[sibling] = slot
            first_child[parent] = slot
            self._uses[slot] = self._ghosts.pop(key, 0)
            self._score[slot] = self._clock
        if self._policy != "lru":
            self._rate(slots)
        return slots

    def _rate(self, slots: list[int]) -> None:
        """First scores of blocks, for the policies that look at more than the clock."""
        for slot in slots:
            if self._policy == "cost":
                above = self._slot_of_key.get(self._parent[slot], _NONE)
                self._depth[slot] = 0 if above < 0 else self._depth[above] + 1
                self._fading[slot] = log2(max(self._uses[slot], 1)) + self._age
                self._set_cost(slot)
            elif self._uses[slot] >= _PROTECTED_USES:
                self._protect(slot)

    def _forget(self, slot: int) -> None:
        """Takes a block out of all maps. The slot's state stays: its caller sees to that."""
        key, parent = self._key[slot], self._parent[slot]
        self._lost.append((self._source[slot], key))
        del self._slot_of[self._source[slot]], self._slot_of_key[key]
        following, previous = self._next[slot], self._previous[slot]
        if following >= 0:
            self._previous[following] = previous
        if previous >= 0:
            self._next[previous] = following
        elif following >= 0:
            self._first_child[parent] = following
        else:
            del self._first_child[parent]
            above = self._slot_of_key.get(parent, _NONE)
            if above >= 0:
                self._offer(above)
        self._source[slot] = self._key[slot] = self._parent[slot] = b""
        self._in_heap[slot] = None
        if self._protected:
            self._protected.pop(slot, None)
        if self._uses[slot]:
            self._remember(key, self._uses[slot])

    def _children(self, key: bytes) -> Iterator[int]:
        slot = self._first_child.get(key, _NONE)
        while slot >= 0:
            yield slot
            slot = self._next[slot]

    def _remember(self, key: bytes, uses: int) -> None:
        self._ghosts[key] = uses
        if len(self._ghosts) > self._ghost_keys:
            self._ghosts.popitem(last=False)

    # -- who goes next ------------------------------------------------------------------------

    def _tick(self, blocks: int) -> None:
        self._clock += blocks
        self._age += blocks / self.num_slots

    def _note_found(self) -> None:
        for slots in self._found:
            self._touch([slot for slot in slots if self._source[slot]])
        self._found.clear()

    def _touch(self, slots: Sequence[int]) -> None:
        """These are used now. (What they cost changes with requests only: see `note_use`.)"""
        if not slots:
            return
        self._tick(len(slots))
        if self._policy == "cost":
            return
        score, clock = self._score, self._clock
        if self._policy == "lru":
            for slot in slots:
                score[slot] = clock
            return
        for slot in slots:
            if self._uses[slot] >= _PROTECTED_USES:
                self._protect(slot)
            else:
                score[slot] = clock

    def _protect(self, slot: int) -> None:
        protected = self._protected
        protected[slot] = None
        protected.move_to_end(slot)
        self._score[slot] = self._clock + _PROTECTED
        if len(protected) > max(1.0, _PROTECTED_SHARE * self.num_slots):
            demoted, _ = protected.popitem(last=False)
            self._set_score(demoted, self._clock)

    def _set_cost(self, slot: int) -> None:
        compute = log2(1.0 + self._depth[slot] / _TWICE_DEPTH_BLOCKS)
        self._set_score(slot, self._fading[slot] + compute)

    def _set_score(self, slot: int, score: float) -> None:
        """Sets a score that may be lower than the one in the heap."""
        self._score[slot] = score
        entry = self._in_heap[slot]
        if entry is not None and score < entry:
            self._push(slot)

    def _evictable(self, slot: int) -> bool:
        return (
            self._state[slot] == READY
            and not self._pins[slot]
            and self._key[slot] not in self._first_child
        )

    def _offer(self, slot: int) -> None:
        """To be called whenever a slot may have become one that can be given up."""
        if self._in_heap[slot] is None and self._evictable(slot):
            self._push(slot)

    def _push(self, slot: int) -> None:
        self._in_heap[slot] = self._score[slot]
        heappush(self._heap, (self._score[slot], slot))
        if len(self._heap) > 2 * self.num_slots + 64:
            self._heap = [(s, slot) for slot, s in enumerate(self._in_heap) if s is not None]
            heapify(self._heap)

    def _make_room(self, count: int) -> None:
        """Gives up blocks until so many slots are free, or none that can be given up is left."""
        missing = count - self._free.count
        freed: list[int] = []
        while len(freed) < missing:
            slot = self._pop_victim()
            if slot < 0:
                break
            self._forget(slot)
            freed.append(slot)
        self.evictions += len(freed)
        self._make_free(freed)

    def _pop_victim(self) -> int:
        while self._twice:
            slot = self._slot_of.get(self._twice.popitem()[0], _NONE)
            if slot >= 0 and self._evictable(slot):
                return slot
        heap, in_heap = self._heap, self._in_heap
        while heap:
            score, slot = heap[0]
            if in_heap[slot] != score:
                heappop(heap)
            elif not self._evictable(slot):
                heappop(heap)
                in_heap[slot] = None
            elif self._score[slot] > score:
                in_heap[slot] = self._score[slot]
                heapreplace(heap, (self._score[slot], slot))
            else:
                return slot
        return _NONE


def _log_add(a: float, b: float) -> float:
    """log2(2^a + 2^b)."""
    high, low = max(a, b), min(a, b)
    return high + log2(1.0 + exp2(low - high))


def _chains(victims: list[EvictionCandidate]) -> Iterator[tuple[list[EvictionCandidate], bool]]:
    """Cuts victims into pieces that follow each other in a prompt: (in the prompt's order, whether
    they came in that order). Blocks leave the device tail first, but are written head first."""
    start = 0
    while start < len(victims):
        end = start + 1
        upwards = end < len(victims) and _follows(victims[start], victims[end])
        while end < len(victims) and (
            _follows(victims[end - 1], victims[end])
            if upwards
            else _follows(victims[end], victims[end - 1])
        ):
            end += 1
        piece = victims[start:end]
        yield (piece if upwards else piece[::-1]), upwards
        start = end


def _follows(before: EvictionCandidate, behind: EvictionCandidate) -> bool:
    return behind.source.startswith(before.key)
