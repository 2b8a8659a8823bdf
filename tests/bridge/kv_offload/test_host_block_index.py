"""The index of host blocks against a model of what every block must hold. The numbers of invariants
are those of the design of the bridge: 1 one state each, 2 nothing in use is handed out, 5 visible
only when final and one host block a hash, 6 leaf first, 7 ends at any moment, 11 salts and
clearing, 12 always progress."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hetero_llm.bridge.kv_offload.free_runs import FreeRuns
from hetero_llm.bridge.kv_offload.host_block_index import POLICIES, HostBlockIndex
from hetero_llm.kv_cache.host_tier import HostHit
from tests.bridge.kv_offload.prompts import (
    Path,
    all_paths,
    candidate,
    content,
    hash_of,
    lookup_key_of,
    root,
)

PATHS = [(salt, path) for salt in ("a", "b") for path in all_paths(2, 3)]
NAMES = {lookup_key_of(path, salt): (salt, path) for salt, path in PATHS}


def put(cache: HostBlockIndex, *paths: Path) -> list[int]:
    """Stores blocks, all of which there must be room for; their host blocks in the order given."""
    reserved = cache.reserve([candidate(path, block) for block, path in enumerate(paths)])
    assert reserved.taken == len(paths)
    cache.stored(reserved.host_blocks, True)
    slot_of = dict(zip(reserved.device_blocks, reserved.host_blocks))
    return [slot_of[block] for block in range(len(paths))]


def find(cache: HostBlockIndex, path: Path, salt: str = "") -> HostHit:
    return cache.match(root(salt), [content(token) for token in path])


def use(cache: HostBlockIndex, path: Path) -> int:
    """A request uses a prompt; how many blocks of it are here."""
    hit = find(cache, path)
    cache.add_use_counts({hash_of(path[:length]): 1 for length in range(1, len(path) + 1)})
    cache.unpin(hit.host_blocks)
    return len(hit.host_blocks)


def test_found_as_far_as_it_goes() -> None:
    cache = HostBlockIndex(8)
    put(cache, (0,), (0, 1), (0, 1, 1, 1))
    hit = find(cache, (0, 1, 1, 1))
    assert hit.lookup_keys == (lookup_key_of((0,)), lookup_key_of((0, 1)))
    assert hit.block_hashes == (hash_of((0,)), hash_of((0, 1)))
    assert not find(cache, (1,)).host_blocks
    assert len(find(cache, (1, 1)).host_blocks) == 0
    behind = cache.match(hash_of((0, 1, 1)), [content(1)])
    assert len(behind.host_blocks) == 1


def test_reads_no_further_than_needed() -> None:
    cache = HostBlockIndex(4)
    put(cache, (0,))
    rest = iter([content(0), content(1), content(0), content(0)])
    assert len(cache.match(root(), rest).host_blocks) == 1
    assert len(list(rest)) == 2


def test_not_found_before_its_bytes_are_final() -> None:
    """Invariant 5."""
    cache = HostBlockIndex(4)
    first = cache.reserve([candidate((0,))])
    assert cache.holds(lookup_key_of((0,))) and not find(cache, (0,)).host_blocks
    again = cache.reserve([candidate((0,)), candidate((0,))])
    assert (again.taken, again.host_blocks) == (2, []), "one hash, one host block"
    cache.stored(first.host_blocks, True)
    assert find(cache, (0,)).host_blocks == tuple(first.host_blocks)


def test_a_failed_store_leaves_nothing() -> None:
    cache = HostBlockIndex(2)
    first = cache.reserve([candidate((0,)), candidate((0, 0))])
    cache.stored(first.host_blocks, False)
    assert cache.num_used == 0 and not cache.holds(lookup_key_of((0,)))
    put(cache, (0,), (0, 0))
    cache.check_integrity()


def test_one_source_twice_in_one_call() -> None:
    cache = HostBlockIndex(4)
    reserved = cache.reserve([candidate((0,), 5), candidate((0,), 6), candidate((1,), 7)])
    assert reserved.taken == 3 and sorted(reserved.device_blocks) == [5, 7]


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_a_prompt_stored_tail_first_lies_in_one_run(batch: int) -> None:
    cache = HostBlockIndex(100)
    path = tuple(index % 7 for index in range(64))
    candidates = [candidate(path[:length], length) for length in range(64, 0, -1)]
    for at in range(0, 64, batch):
        cache.stored(cache.reserve(candidates[at : at + batch]).host_blocks, True)
    hit = find(cache, path)
    assert hit.host_blocks == tuple(range(hit.host_blocks[0], hit.host_blocks[0] + 64))


@pytest.mark.parametrize("batch", [2, 16])
def test_a_prompt_stored_head_first_lies_in_one_run(batch: int) -> None:
    cache = HostBlockIndex(100)
    path = tuple(index % 7 for index in range(64))
    candidates = [candidate(path[:length], length) for length in range(1, 65)]
    for at in range(0, 64, batch):
        cache.stored(cache.reserve(candidates[at : at + batch]).host_blocks, True)
    hit = find(cache, path)
    assert hit.host_blocks == tuple(range(hit.host_blocks[0], hit.host_blocks[0] + 64))


def test_runs_survive_turnover() -> None:
    """Prompts of different lengths replace each other many times over: those found whole still lie
    in few pieces."""
    rng = random.Random(3)
    cache = HostBlockIndex(512)
    pieces = blocks = 0
    for number in range(200):
        path = (number % 256, *(rng.randrange(256) for _ in range(rng.randint(7, 63))))
        candidates = [candidate(path[:length]) for length in range(len(path), 0, -1)]
        for at in range(0, len(candidates), 16):
            cache.stored(cache.reserve(candidates[at : at + 16]).host_blocks, True)
        hit = find(cache, path)
        cache.unpin(hit.host_blocks)
        assert len(hit.host_blocks) == len(path)
        blocks += len(path)
        pieces += 1 + sum(b != a + 1 for a, b in zip(hit.host_blocks, hit.host_blocks[1:]))
    assert pieces < blocks / 8
    cache.check_integrity()


def test_lru_gives_up_the_oldest_leaf() -> None:
    cache = HostBlockIndex(4)
    put(cache, (0,), (0, 0))
    put(cache, (1,), (1, 0))
    assert use(cache, (0, 0)) == 2
    put(cache, (2,))  # (1, 0) goes
    assert use(cache, (1, 0)) == 1
    put(cache, (3,))  # (0, 0) is older than (2,) and (1,) now
    assert (use(cache, (0, 0)), use(cache, (2,)), use(cache, (1,))) == (1, 1, 1)


def held(cache: HostBlockIndex, *paths: Path) -> list[bool]:
    return [cache.holds(lookup_key_of(path)) for path in paths]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_device_has_as_well_goes_first(policy: str) -> None:
    """The newest load before others, its tail before its head; never before what follows it."""
    cache = HostBlockIndex(6, policy=policy)
    put(cache, (0,), (0, 0), (1,), (1, 0), (2,), (2, 0))
    for path in ((0, 0), (1, 0), (2, 0)):
        use(cache, path)
    for token in (1, 2):
        cache.mark_on_device([lookup_key_of((token,)), lookup_key_of((token, 0))])
    put(cache, (3,))
    assert held(cache, (2,), (2, 0)) == [True, False]
    put(cache, (4,))
    assert held(cache, (2,), (2, 0)) == [False, False]
    cache.device_evicted([(lookup_key_of((1, 0)), hash_of((1, 0)))])
    put(cache, (5,))
    assert held(cache, (1,)) == [True], "(1, 0) followed it"
    assert policy != "lru" or held(cache, (0,), (0, 0), (1, 0)) == [True, False, True]
    assert cache.evictions == 3
    cache.check_integrity()


def test_what_is_read_or_followed_by_a_newcomer_is_not_given_up_for_it() -> None:
    cache = HostBlockIndex(3)
    put(cache, (0,), (1,), (2,))
    hit = find(cache, (2,))
    cache.mark_on_device([lookup_key_of((0,)), lookup_key_of((1,)), lookup_key_of((2,))])
    put(cache, (1, 0))
    assert held(cache, (0,), (1,), (2,)) == [False, True, True]
    cache.unpin(hit.host_blocks)
    cache.mark_on_device([lookup_key_of((2,))])
    cache.clear()
    put(cache, (2,), (3,), (4,))
    put(cache, (5,))
    assert held(cache, (2,)) == [False], "the oldest: what was loaded before counts no more"


def test_slru_keeps_what_two_requests_used() -> None:
    def hits_of_the_first(policy: str) -> int:
        cache = HostBlockIndex(10, policy=policy)
        put(cache, (0,), (0, 0))
        use(cache, (0, 0))
        use(cache, (0, 0))
        for token in range(10, 30):  # a scan
            put(cache, (token,))
            use(cache, (token,))
        cache.check_integrity()
        return use(cache, (0, 0))

    assert hits_of_the_first("slru") == 2
    assert hits_of_the_first("lru") == 0


def test_slru_lets_newcomers_in() -> None:
    """What was used often once does not fill the memory for ever."""
    cache = HostBlockIndex(10, policy="slru")
    for token in range(10):
        put(cache, (token,))
        use(cache, (token,))
        use(cache, (token,))
    put(cache, (20,))
    put(cache, (21,))
    assert use(cache, (20,)) == use(cache, (21,)) == 1
    cache.check_integrity()


def test_slru_gives_up_what_lost_its_protection() -> None:
    cache = HostBlockIndex(5, policy="slru")
    for token in range(5):
        put(cache, (token,))
        use(cache, (token,))
        use(cache, (token,))
    put(cache, (5,))  # 0 was the first beyond the share; the others have moved up in the heap
    assert use(cache, (0,)) == 0
    use(cache, (5,))
    use(cache, (5,))  # and now 1 is
    cache.check_integrity()
    put(cache, (6,))
    assert (use(cache, (1,)), use(cache, (6,))) == (0, 1)


def test_cost_keeps_the_deeper_and_the_more_used() -> None:
    cache = HostBlockIndex(3, policy="cost")
    put(cache, (0,), (1,), (2,))
    hit = find(cache, (0,))
    cache.set_depth(hit.host_blocks, 4000)
    cache.unpin(hit.host_blocks)
    for _ in range(8):
        use(cache, (1,))
    put(cache, (3,))  # (2,) is cheap and unused
    assert (use(cache, (0,)), use(cache, (1,)), use(cache, (2,))) == (1, 1, 0)
    cache.check_integrity()


def test_cost_forgets_old_uses() -> None:
    cache = HostBlockIndex(2, policy="cost")
    put(cache, (0,))
    for _ in range(30):
        use(cache, (0,))
    for token in range(1, 60):
        put(cache, (token,))
    assert use(cache, (0,)) == 0


def test_uses_are_counted_and_remembered() -> None:
    cache = HostBlockIndex(1, min_uses=2, max_ghosts=3)
    block_hash = hash_of((0,))
    assert not cache.wants(block_hash)
    cache.add_use_counts({block_hash: 1})
    assert not cache.wants(block_hash)
    cache.add_use_counts({block_hash: 1})
    assert cache.wants(block_hash)
    put(cache, (0,))
    assert cache.uses(block_hash) == 2
    put(cache, (1,))  # the other one is given up, its uses are not
    assert cache.uses(block_hash) == 2
    cache.add_use_counts({hash_of((token,)): 1 for token in (3, 4, 5)})
    assert cache.uses(block_hash) == 0, "only so many are remembered"
    assert HostBlockIndex(1).wants(block_hash)


def test_what_follows_a_lost_block_is_forgotten() -> None:
    cache = HostBlockIndex(8)
    put(cache, (0, 0), (0, 0, 0), (0, 0, 1), (0, 1), (1, 0))
    pinned = cache.match(hash_of((0,)), [content(1)])
    cache.drop_descendants(hash_of((0,)))
    assert cache.num_used == 2 and not cache.holds(lookup_key_of((0, 1)))
    cache.check_integrity()
    cache.unpin(pinned.host_blocks)
    assert cache.num_used == 1 and cache.holds(lookup_key_of((1, 0)))
    put(cache, (1,))
    cache.drop_descendants(hash_of((1,)))  # it is here: nothing is lost
    assert cache.num_used == 2


def test_lost_while_it_is_being_stored() -> None:
    cache = HostBlockIndex(2)
    reserved = cache.reserve([candidate((0, 0))])
    cache.drop_descendants(hash_of((0,)))
    assert not cache.holds(lookup_key_of((0, 0))) and cache.num_used == 1
    second = cache.reserve([candidate((0, 0)), candidate((1,))])
    assert second.taken == 1, "the host block is still written to"
    cache.stored(reserved.host_blocks, True)
    assert cache.num_used == 1
    cache.stored(second.host_blocks, True)
    cache.check_integrity()


def test_clearing_leaves_nothing_readable() -> None:
    """Invariant 11, with a load and a store under way."""
    cache = HostBlockIndex(4)
    put(cache, (0,), (1,))
    hit = find(cache, (0,))
    reserved = cache.reserve([candidate((2,))])
    cache.add_use_counts({hash_of((5,)): 1})
    cache.clear()
    assert cache.num_used == 2 and cache.uses(hash_of((5,))) == 0
    for path in ((0,), (1,), (2,)):
        assert not find(cache, path).host_blocks and not cache.holds(lookup_key_of(path))
    put(cache, (0,))
    cache.check_integrity()
    cache.stored(reserved.host_blocks, True)
    cache.unpin(hit.host_blocks)
    assert cache.num_used == 1 and not find(cache, (2,)).host_blocks


def test_everything_pinned() -> None:
    """Invariant 12."""
    cache = HostBlockIndex(2)
    put(cache, (0,), (0, 0))
    hit = find(cache, (0, 0))
    assert cache.reserve([candidate((1,))]).taken == 0
    cache.unpin(hit.host_blocks)
    assert cache.reserve([candidate((1,)), candidate((2,)), candidate((3,))]).taken == 2
    assert HostBlockIndex(0).reserve([candidate((1,))]).taken == 0


def test_the_parent_of_a_newcomer_stays() -> None:
    cache = HostBlockIndex(1)
    put(cache, (0,))
    assert cache.reserve([candidate((0, 0))]).taken == 0
    assert cache.reserve([candidate((0,)), candidate((1,))]).taken == 1, "and so does what is held"
    assert cache.holds(lookup_key_of((0,)))


class Slots(RuleBasedStateMachine):
    """`memory` is what the host blocks would hold; a host block that is written to holds None."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        host_blocks=st.integers(0, 4),
        ghosts=st.sampled_from([2, 99]),
    )
    def begin(self, policy: str, host_blocks: int, ghosts: int) -> None:
        self.cache = HostBlockIndex(host_blocks, policy=policy, max_ghosts=ghosts)
        self.memory: list[bytes | None] = [None] * host_blocks
        self.stores: list[list[tuple[int, bytes]]] = []
        self.hits: list[HostHit] = []

    def held(self) -> set[bytes]:
        return {lookup_key for lookup_key in NAMES if self.cache.holds(lookup_key)}

    def pinned(self) -> set[int]:
        return {host_block for hit in self.hits for host_block in hit.host_blocks}

    @rule(names=st.lists(st.sampled_from(PATHS), min_size=1, max_size=6))
    def store(self, names: list[tuple[str, Path]]) -> None:
        candidates = [candidate(path, block, salt) for block, (salt, path) in enumerate(names)]
        before = self.held()
        reserved = self.cache.reserve(candidates)
        after = self.held()
        taken = {entry.lookup_key for entry in candidates[: reserved.taken]}
        assert taken <= after
        new = taken - before
        assert len(reserved.host_blocks) == len(set(reserved.host_blocks)) == len(new)
        # 2, 7: what is read, or written, is not handed out.
        busy = self.pinned() | {host_block for store in self.stores for host_block, _ in store}
        assert not busy & set(reserved.host_blocks)
        # 6: nothing is given up before what follows it, nor what newcomers follow.
        parents = {lookup_key[:32] for lookup_key in after}
        for gone in before - after:
            salt, path = NAMES[gone]
            assert hash_of(path, salt) not in parents
        # 12: whoever is refused is refused for want of a host block that could be given up.
        if reserved.taken < len(candidates):
            writing = {lookup_key for store in self.stores for _, lookup_key in store} | new
            read = {lookup_key for hit in self.hits for lookup_key in hit.lookup_keys}
            guarded = {entry.lookup_key for entry in candidates}
            followed = parents | {entry.lookup_key[:32] for entry in candidates}
            for lookup_key in after - writing - guarded - read:
                salt, path = NAMES[lookup_key]
                assert hash_of(path, salt) in followed, "there was room"
        lookup_keys = {block: entry.lookup_key for block, entry in enumerate(candidates)}
        if reserved.host_blocks:
            self.stores.append(
                [
                    (host_block, lookup_keys[b])
                    for host_block, b in zip(reserved.host_blocks, reserved.device_blocks)
                ]
            )
            for host_block in reserved.host_blocks:
                self.memory[host_block] = None

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]))
    def finish_store(self, data: st.DataObject, ok: bool) -> None:
        store = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        for host_block, lookup_key in store:
            self.memory[host_block] = lookup_key if ok else None
        self.cache.stored([host_block for host_block, _ in store], ok)

    @rule(name=st.sampled_from(PATHS))
    def match(self, name: tuple[str, Path]) -> None:
        salt, path = name
        hit = find(self.cache, path, salt)
        # 5, 11: final bytes of exactly these blocks of exactly this salt.
        expected = [lookup_key_of(path[: n + 1], salt) for n in range(len(hit.host_blocks))]
        assert list(hit.lookup_keys) == expected
        assert [self.memory[host_block] for host_block in hit.host_blocks] == expected
        if hit.host_blocks:
            self.hits.append(hit)

    @precondition(lambda self: self.hits)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        hit = self.hits.pop(data.draw(st.integers(0, len(self.hits) - 1)))
        self.cache.unpin(hit.host_blocks)

    @rule(names=st.lists(st.sampled_from(PATHS), max_size=3))
    def add_use_counts(self, names: list[tuple[str, Path]]) -> None:
        self.cache.add_use_counts(Counter(hash_of(path, salt) for salt, path in names))

    @rule(name=st.sampled_from(PATHS))
    def load(self, name: tuple[str, Path]) -> None:
        salt, path = name
        self.cache.mark_on_device([lookup_key_of(path[: n + 1], salt) for n in range(len(path))])

    @rule(name=st.sampled_from(PATHS))
    def device_evicted(self, name: tuple[str, Path]) -> None:
        salt, path = name
        before = self.held()
        self.cache.device_evicted([(lookup_key_of(path, salt), hash_of(path, salt))])
        here = lookup_key_of(path, salt) in before
        gone = {
            lookup_key for lookup_key in before if not here and is_behind(before, lookup_key, name)
        }
        assert before - self.held() == gone

    @rule(count=st.integers(1, 2))
    def grow(self, count: int) -> None:
        if len(self.memory) < 7:
            self.cache.add_blocks(count)
            self.memory += [None] * count

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert not self.held()

    @invariant()
    def books_agree(self) -> None:
        """1: each host block in one state; pins are those of live hits."""
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        self.cache.check_busy(
            [host_block for hit in self.hits for host_block in hit.host_blocks],
            [host_block for store in self.stores for host_block, _ in store],
        )
        assert self.cache.num_pinned == len(self.pinned())

    @invariant()
    def what_is_read_stays(self) -> None:
        """2, 7: as long as a hit is held, whatever is lost, cleared or stored meanwhile."""
        for hit in getattr(self, "hits", ()):
            assert [self.memory[host_block] for host_block in hit.host_blocks] == list(
                hit.lookup_keys
            )

    def teardown(self) -> None:
        """1: after everything is over, every host block is free or holds what can be found."""
        if not hasattr(self, "cache"):
            return
        for hit in self.hits:
            self.cache.unpin(hit.host_blocks)
        for store in self.stores:
            self.cache.stored([host_block for host_block, _ in store], True)
        self.cache.check_integrity()
        assert self.cache.num_pinned == 0
        assert self.cache.num_used == len(self.held())


def is_behind(held: set[bytes], lookup_key: bytes, dropped: tuple[str, Path]) -> bool:
    """Whether a block follows a lost one, and all between them are held."""
    (salt, path), (lost_salt, lost_path) = NAMES[lookup_key], dropped
    first = len(lost_path)
    return (
        salt == lost_salt
        and len(path) > first
        and path[:first] == lost_path
        and all(lookup_key_of(path[:n], salt) in held for n in range(first + 1, len(path) + 1))
    )


Slots.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSlots = Slots.TestCase


def test_free_runs_against_a_set() -> None:
    rng = random.Random(11)
    runs, free = FreeRuns(), set(range(40))
    runs.give_range(0, 40)
    for _ in range(2000):
        taken = sorted(set(range(40)) - free)
        if taken and rng.random() < 0.5:
            back = rng.sample(taken, rng.randint(1, len(taken)))
            runs.give(back)
            free |= set(back)
        elif free:
            got = runs.take(
                rng.randint(1, len(free)),
                after=rng.randint(-1, 39),
                before=rng.randint(-1, 39),
                low=rng.random() < 0.5,
            )
            assert len(got) == len(set(got)) and set(got) <= free
            free -= set(got)
        assert runs.count == len(free)
        assert {host_block for run in runs.runs() for host_block in range(*run)} == free
        starts = [host_block for host_block in free if host_block - 1 not in free]
        assert [start for start, _ in runs.runs()] == sorted(starts)


def test_neighbours_are_taken_where_they_are_free() -> None:
    runs = FreeRuns()
    runs.give_range(0, 100)
    assert runs.take(3, after=-1, before=-1, low=True) == [0, 1, 2]
    assert runs.take(2, after=2, before=-1, low=False) == [3, 4]
    assert runs.take(2, after=-1, before=-1, low=False) == [98, 99]
    assert runs.take(2, after=-1, before=98, low=True) == [96, 97]
    assert runs.take(2, after=50, before=51, low=True) == [5, 6], "no run begins there"
