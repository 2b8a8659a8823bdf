"""Events of the prefix cache, replayed, are the prefix cache; and how they are put together."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import invariant

from hetero_llm.core.kv_events import CPU, GPU, NoKvEvents
from hetero_llm.kv_cache.block_manager import BlockManager
from hetero_llm.kv_cache.kv_event_log import (
    PLAIN,
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    KvEventLog,
    RootInfo,
)
from hetero_llm.kv_cache.prefix_cache import PrefixCache, hash_block, hash_root, token_bytes
from tests.helpers.kv_event_model import FollowedCaches
from tests.kv_cache.test_block_manager import NUM_BLOCKS, ROOTS, SIZE, Traffic


class FollowedTraffic(Traffic):
    """Forks, copies on write, duplicates, evictions and resets, as in the other test."""

    def __init__(self) -> None:
        super().__init__()
        self.log = KvEventLog()
        for name, root in ROOTS.items():
            self.log.name_root(root, RootInfo(extra=name))
        self.cache = PrefixCache(self.log)
        self.manager = BlockManager(NUM_BLOCKS, SIZE, self.cache)
        self.followed = FollowedCaches(SIZE, ROOTS.values())

    @invariant()
    def events_are_the_cache(self) -> None:
        events = self.log.take()
        self.followed.apply(events)
        assert self.followed.held[GPU] == set(self.cache.hashes())
        stored = [event for event in events if isinstance(event, BlocksStored)]
        assert all(event.root.extra in ("a", "b") for event in stored)


TestFollowedTraffic = FollowedTraffic.TestCase
TestFollowedTraffic.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def chain(root: bytes, count: int, first: int = 0) -> list[tuple[bytes, bytes]]:
    """Lookup key and hash of consecutive blocks."""
    entries, parent = [], root
    for number in range(count):
        tokens = [first + number] * SIZE
        block_hash = hash_block(parent, tokens)
        entries.append((parent + token_bytes(tokens), block_hash))
        parent = block_hash
    return entries


def test_consecutive_blocks_are_one_event() -> None:
    log = KvEventLog()
    entries = chain(hash_root(), 4)
    log.stored(GPU, entries[:2])
    log.stored(GPU, entries[2:3])
    log.stored(CPU, entries[3:])
    log.stored(CPU, chain(hash_root(), 1, first=9))
    one, two, three = log.take()
    assert isinstance(one, BlocksStored) and isinstance(two, BlocksStored)
    assert one.block_hashes == [block_hash for _, block_hash in entries[:3]]
    assert (one.parent_hash, one.root) == (None, PLAIN)
    assert (two.medium, two.parent_hash) == (CPU, entries[2][1])
    assert isinstance(three, BlocksStored) and three.parent_hash is None
    assert log.take() == []


def test_order_is_kept() -> None:
    log = KvEventLog()
    (entry,) = chain(hash_root(), 1)
    log.stored(GPU, [entry])
    log.removed(GPU, [entry[1]])
    log.stored(GPU, [entry])
    log.cleared()
    kinds = [type(event) for event in log.take()]
    assert kinds == [BlocksStored, BlocksRemoved, BlocksStored, AllCleared]


def test_an_adapters_blocks_are_named_wherever_they_go() -> None:
    log = KvEventLog()
    root, info = hash_root(("adapter", "x")), RootInfo(3, "sql")
    log.name_root(root, info)
    entries = chain(root, 3)
    log.stored(GPU, entries[:2])
    log.take()
    log.stored(GPU, entries[2:])
    log.stored(CPU, entries[:1])
    log.removed(GPU, [entries[0][1]])
    log.stored(CPU, entries[1:2])
    stored = [event for event in log.take() if isinstance(event, BlocksStored)]
    assert [event.root for event in stored] == [info] * 3
    log.removed(GPU, [entries[1][1], entries[2][1]])
    log.removed(CPU, [entries[0][1], entries[1][1]])
    log.take()
    log.stored(GPU, entries[1:2])  # its parent is nowhere: nothing is known of it any more
    (event,) = log.take()
    assert isinstance(event, BlocksStored) and event.root is PLAIN


def test_without_a_listener_nothing_is_noted() -> None:
    events = NoKvEvents()
    events.stored(GPU, chain(hash_root(), 1))
    events.removed(GPU, [b""])
    events.cleared()
    assert not events.is_on
