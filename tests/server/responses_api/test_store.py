"""What is kept of responses: within bounds, and for its owner only."""

from __future__ import annotations

import random

from hetero_llm.server.responses_api.store import ResponseStore, StoredResponse


def entry(size: int) -> StoredResponse:
    """An entry of this size in bytes."""
    empty = StoredResponse(b"", b"").size
    return StoredResponse(b"x" * (size - empty), b"")


def test_the_least_recently_used_is_dropped() -> None:
    store = ResponseStore(2, 1 << 20)
    for name in "ab":
        assert store.put("me", name, entry(600))
    assert store.get("me", "a") is not None
    assert store.put("me", "c", entry(600))
    assert store.get("me", "b") is None
    assert store.get("me", "a") is not None and store.get("me", "c") is not None


def test_bytes_are_bounded() -> None:
    store = ResponseStore(100, 2000)
    for name in "abc":
        assert store.put("me", name, entry(1000))
    assert len(store) == 2 and store.get("me", "a") is None
    assert store.put("me", "d", entry(2000)) and len(store) == 1
    assert not store.put("me", "e", entry(2001))
    assert store.get("me", "d") is not None


def test_owners_do_not_see_each_other() -> None:
    store = ResponseStore(10, 1 << 20)
    mine, yours = entry(600), entry(700)
    store.put("me", "a", mine)
    store.put("you", "a", yours)
    assert store.get("me", "a") is mine and store.get("you", "a") is yours
    assert store.delete("me", "a") and not store.delete("me", "a")
    assert store.get("you", "a") is yours


def test_one_that_keeps_nothing() -> None:
    store = ResponseStore(0, 1 << 20)
    assert not store and not store.put("me", "a", entry(600)) and len(store) == 0


def test_random_use_stays_within_the_bounds() -> None:
    rng = random.Random(7)
    store, most, most_bytes = ResponseStore(8, 9000), 8, 9000
    kept: dict[tuple[str, str], StoredResponse] = {}
    for _ in range(3000):
        owner, name = rng.choice("xy"), rng.choice("abcdefghij")
        action = rng.random()
        if action < 0.6:
            one = entry(rng.randrange(520, 3000))
            assert store.put(owner, name, one)
            kept[owner, name] = one
        elif action < 0.8:
            store.delete(owner, name)
            kept.pop((owner, name), None)
        found = {key: one for key in kept if (one := store.get(*key)) is not None}
        assert all(one is kept[key] for key, one in found.items())
        assert len(store) == len(found) <= most
        assert sum(one.size for one in found.values()) <= most_bytes
        kept = found
