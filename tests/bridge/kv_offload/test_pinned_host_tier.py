"""`PinnedHostTier` over a model of copies, with the traffic of a small block manager."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hetero_llm.bridge.kv_offload.host_block_index import HostBlockIndex
from hetero_llm.bridge.kv_offload.pinned_host_tier import LoadRule, PinnedHostTier
from hetero_llm.core.errors import EngineDeadError
from hetero_llm.kv_cache.host_tier import HostHit
from tests.bridge.kv_offload.model_copier import RATE, ModelCopier
from tests.bridge.kv_offload.prompts import (
    Path,
    all_paths,
    candidate,
    content,
    hash_of,
    lookup_key_of,
    root,
)

LAYERS, LAYER_BYTES = 3, 4
BLOCK_BYTES = LAYERS * LAYER_BYTES
BLOCK_SIZE = 16
MAX_FAILURES = 5  # in a row, then the tier switches itself off


def kv_of(block_hash: bytes) -> np.ndarray:
    """Stands for the KV of the block with this hash: [layers, bytes] uint8."""
    return np.frombuffer(sha256(block_hash).digest()[:BLOCK_BYTES], np.uint8).reshape(LAYERS, -1)


def model(
    blocks: int, host_blocks: int, seed: int = 0, most_slots: int | None = None
) -> ModelCopier:
    rng = random.Random(seed)
    shape = (LAYERS, LAYER_BYTES)
    device = np.zeros((blocks, *shape), np.uint8)
    host = np.full((most_slots or host_blocks, *shape), 255, np.uint8)
    return ModelCopier(device, host, host_blocks, rng)


def load_rule(
    compute: Callable[[int, int], float] = lambda count, start: 0.0,
    min_tokens: int | None = 0,
    window_bytes: int | None = 0,
) -> LoadRule:
    return LoadRule(BLOCK_SIZE, BLOCK_BYTES, LAYERS, compute, min_tokens, window_bytes)


def tier_over(
    copier: ModelCopier, rule: LoadRule | None = None, *, patience_s: float = 60.0, **index: Any
) -> PinnedHostTier:
    return PinnedHostTier(
        HostBlockIndex(**index), copier, rule or load_rule(),
        max_failures=MAX_FAILURES, patience_s=patience_s,
    )  # fmt: skip


def find(tier: PinnedHostTier, path: Path) -> HostHit:
    return tier.match(root(), [content(token) for token in path])


def drain(copier: ModelCopier) -> None:
    while copier.last_finished < copier.last_launched:
        copier.finish_step()
    while copier.advance(True) or copier.advance(False):
        pass


def fill(tier: PinnedHostTier, copier: ModelCopier, path: Path) -> None:
    """All blocks of a prompt, from device blocks 0, 1, ... to host memory."""
    candidates = [candidate(path[: n + 1], n) for n in range(len(path))]
    for entry in candidates:
        copier.device[entry.block] = kv_of(entry.block_hash)
    assert tier.store(candidates)[0] == len(path)
    drain(copier)
    tier.poll()


def test_there_and_back() -> None:
    copier = model(8, 4)
    tier = tier_over(copier)
    fill(tier, copier, (0, 1, 0))
    hit = find(tier, (0, 1, 0, 0))
    assert hit.block_hashes == tuple(hash_of((0, 1, 0)[:n]) for n in (1, 2, 3))
    transfer_id = tier.load(hit, [7, 5, 6], 0, 0.0)
    assert tier.seconds_left([transfer_id, 99]) == 3 * BLOCK_BYTES / RATE
    assert tier.seconds_ahead([transfer_id, 99]) == 0.0 == tier.seconds_ahead([])
    other = tier.load(find(tier, (0, 1)), [3, 4], 0, 0.0)
    assert tier.seconds_ahead([other]) == pytest.approx(3 * BLOCK_BYTES / RATE)
    assert tier.seconds_ahead([transfer_id, other]) == 0.0, "both are its own"
    tier.abort(other)
    assert tier.poll().loaded == []
    drain(copier)
    assert tier.poll().loaded == [transfer_id]
    assert tier.seconds_left([transfer_id]) == 0.0 == tier.seconds_ahead([transfer_id])
    for block, block_hash in zip((7, 5, 6), hit.block_hashes):
        assert (copier.device[block] == kv_of(block_hash)).all()
    assert copier.idle and tier.poll() == tier.poll()
    tier.check_integrity()
    reported = tier.metrics()
    assert reported["kv_offload_loads"] == reported["kv_offload_stores"] == 1
    assert reported["kv_offload_bytes_h2d"] == reported["kv_offload_bytes_d2h"] == 3 * BLOCK_BYTES
    assert reported["kv_offload_load_seconds_total"] == 0.001
    assert (reported["kv_offload_host_slots"], reported["kv_offload_host_slots_used"]) == (4, 3)
    assert reported["kv_offload_model"] == 1.0, "the copier's own"


def test_part_of_a_hit() -> None:
    copier = model(8, 4)
    tier = tier_over(copier)
    fill(tier, copier, (0, 1, 0))
    hit = find(tier, (0, 1, 0))
    transfer_id = tier.load(hit.first(2), [6, 7], 0, 0.0)
    tier.release(HostHit(hit.host_blocks[2:], hit.lookup_keys[2:], hit.block_hashes[2:]))
    tier.check_integrity()
    drain(copier)
    assert tier.poll([transfer_id]).loaded == [transfer_id]


def test_poll_waits_for_what_a_step_saw() -> None:
    copier = model(8, 4)
    tier = tier_over(copier)
    fill(tier, copier, (0,))
    transfer_id = tier.load(find(tier, (0,)), [7], 0, 0.0)
    assert tier.poll().loaded == []
    assert tier.poll([transfer_id]).loaded == [transfer_id]
    assert tier.poll([transfer_id]).loaded == [], "reported once"


def test_a_device_that_is_stuck() -> None:
    copier = model(8, 4)
    tier = tier_over(copier, patience_s=0.0)
    fill(tier, copier, (0,))
    tier.step_launched(1)
    transfer_id = tier.load(find(tier, (0,)), [7], 1, 0.0)  # the step never ends
    with pytest.raises(
        EngineDeadError, match=rf"loads \[{transfer_id}\] .* did not end within 0 s"
    ):
        tier.poll([transfer_id])


@pytest.mark.parametrize("drop_waits", [False, True])
def test_a_store_waits_for_the_step_that_writes(drop_waits: bool) -> None:
    """With its negative control: a copier whose stores do not wait."""
    copier = model(4, 4)
    copier.drop_waits = drop_waits
    tier = tier_over(copier)
    tier.step_launched(1)
    tier.store([candidate((0,), 2)])
    moved = copier.advance(False)
    copier.device[2] = kv_of(hash_of((0,)))  # what the step does last
    copier.finish_step()
    drain(copier)
    tier.poll()
    hit = find(tier, (0,))
    same = (copier.host[hit.host_blocks[0]] == kv_of(hash_of((0,)))).all()
    assert (moved, same) == ((True, False) if drop_waits else (False, True))


@pytest.mark.parametrize("drop_waits", [False, True])
def test_a_load_waits_for_the_step_that_reads(drop_waits: bool) -> None:
    copier = model(4, 4)
    tier = tier_over(copier)
    fill(tier, copier, (0,))
    copier.drop_waits = drop_waits
    copier.device[3] = 7
    tier.step_launched(1)
    tier.load(find(tier, (0,)), [3], 1, 0.0)
    copier.advance(True)
    assert (copier.device[3] == 7).all() == (not drop_waits)


@pytest.mark.parametrize("copies", range(2 * LAYERS))
@pytest.mark.parametrize("how", ["abort", "fail"])
def test_ends_at_any_copy(how: str, copies: int) -> None:
    """Pins return, and nothing is written once the end is reported."""
    copier = model(8, 4, seed=copies)
    tier = tier_over(copier)
    fill(tier, copier, (0, 1))
    transfer_id = tier.load(find(tier, (0, 1)), [6, 7], 0, 0.0)
    if how == "fail":
        copier.fail(transfer_id, copies)
    else:
        before = copier.copied[True]
        while copier.copied[True] - before < copies and copier.open_transfers(True):
            copier.advance(True)
        tier.abort(transfer_id)
        tier.abort(transfer_id)
    drain(copier)
    assert all(copier.landed(transfer_id, layer) for layer in range(LAYERS)), "steps wait for ever"
    events = tier.poll()
    reported = tier.metrics()
    if events.failed:
        assert events.failed == [transfer_id] and not events.loaded
        name = "kv_offload_aborted_loads" if how == "abort" else "kv_offload_failed_loads"
        assert reported[name] == 1
    else:
        assert how == "abort" and events.loaded == [transfer_id], "it was over before"
    tier.check_integrity()
    assert not tier.is_off and len(find(tier, (0, 1)).host_blocks) == 2, "host memory is as it was"


def test_a_failed_store() -> None:
    copier = model(8, 4)
    tier = tier_over(copier)
    taken, transfer_id = tier.store([candidate((0,), 0), candidate((0, 0), 1)])
    copier.fail(transfer_id, 1)
    drain(copier)
    assert (taken, tier.poll().stored) == (2, [transfer_id])
    assert not tier.holds(lookup_key_of((0,))) and not find(tier, (0,)).host_blocks
    assert tier.metrics()["kv_offload_failed_stores"] == 1
    assert tier.metrics()["kv_offload_host_slots_used"] == 0


def test_what_is_here_is_not_copied_again() -> None:
    copier = model(8, 4)
    tier = tier_over(copier)
    fill(tier, copier, (0,))
    assert tier.store([candidate((0,), 3)]) == (1, 0)
    taken, transfer_id = tier.store([candidate((0,), 3), candidate((1,), 4)])
    assert (taken, copier.open_transfers(False)) == (2, [transfer_id])
    drain(copier)
    assert copier.copied[False] == 2


def test_no_room_and_no_layer_ready_flag() -> None:
    """Full and pinned host memory refuses stores; a load without a free layer-ready flag fails."""
    copier = model(8, 2)
    copier.places = 1
    tier = tier_over(copier)
    fill(tier, copier, (0, 1))
    first = find(tier, (0, 1))
    transfer_id = tier.load(first, [2, 3], 0, 0.0)
    assert tier.store([candidate((1,), 5)]) == (0, 0)
    assert tier.metrics()["kv_offload_dropped_stores"] == 1
    second = find(tier, (0,))
    assert tier.worth_loading(second, 0, 100) == 0
    refused = tier.load(second, [4], 0, 0.0)
    tier.wait(10.0)
    assert tier.poll([refused]).failed == [refused]
    drain(copier)
    assert tier.poll().loaded == [transfer_id]
    assert tier.store([candidate((1,), 5)])[0] == 1
    tier.check_integrity()


@pytest.mark.parametrize("broken", [False, True])
def test_switches_itself_off(caplog: pytest.LogCaptureFixture, broken: bool) -> None:
    copier = model(8, 4)
    tier = tier_over(copier, min_uses=1)
    fill(tier, copier, (0, 1))
    held = find(tier, (0, 1))
    tries = 1 if broken else MAX_FAILURES
    copier.broken = broken
    with caplog.at_level(logging.ERROR):
        for _ in range(tries + 3):
            if tier.is_off:
                break
            transfer_id = tier.load(find(tier, (0,)), [5], 0, 0.0)
            copier.fail(transfer_id, 0)
            drain(copier)
            assert tier.poll().failed == [transfer_id]
    assert tier.is_off and tier.metrics()["kv_offload_failed_loads"] == tries
    assert len(caplog.records) == 1 and "switched off" in caplog.text
    assert tier.metrics()["kv_offload_broken"] == 1.0
    assert find(tier, (0, 1)) == HostHit((), (), ()) and not tier.holds(lookup_key_of((0,)))
    assert tier.store([candidate((1,), 6)]) == (0, 0) and not tier.wants(hash_of((0,)))
    assert tier.worth_loading(held, 0, 0) == 0
    late = tier.load(held, [5, 6], 0, 0.0)
    assert tier.poll().failed == [late]
    tier.check_integrity()


def test_a_success_forgives_failures() -> None:
    copier = model(8, 4)
    tier = tier_over(copier)
    fill(tier, copier, (0,))
    for number in range(3 * MAX_FAILURES):
        transfer_id = tier.load(find(tier, (0,)), [5], 0, 0.0)
        if number % 3:
            copier.fail(transfer_id, 0)
        drain(copier)
        tier.poll()
    assert not tier.is_off


def test_aborts_are_no_failures() -> None:
    copier = model(8, 4)
    tier = tier_over(copier)
    fill(tier, copier, (0,))
    for _ in range(2 * MAX_FAILURES):
        tier.abort(tier.load(find(tier, (0,)), [5], 0, 0.0))
        drain(copier)
        tier.poll()
    assert not tier.is_off


def test_grows_with_the_pool() -> None:
    copier = model(8, 0, most_slots=4)
    tier = tier_over(copier)
    assert tier.store([candidate((0,), 0)]) == (0, 0)
    copier.num_host_blocks = 3
    tier.poll()
    assert tier.metrics()["kv_offload_host_slots"] == 3
    fill(tier, copier, (0, 1, 0))


def test_shuts_down_once() -> None:
    copier = model(8, 4)
    freed: list[bool] = []
    tier = PinnedHostTier(
        HostBlockIndex(), copier, load_rule(), free_memory=lambda: freed.append(copier.closed)
    )
    fill(tier, copier, (0,))
    transfer_id = tier.load(find(tier, (0,)), [5], 0, 0.0)
    tier.store([candidate((1,), 6)])
    tier.shut_down()
    tier.shut_down()
    tier.abort(transfer_id)
    assert freed == [True], "after the copies, and once"
    assert (tier.poll().loaded, tier.store([candidate((2,), 6)])) == ([transfer_id], (0, 0))


# -- when to load ------------------------------------------------------------------------------

BLOCK_S = BLOCK_BYTES / RATE


def worth(tokens: int, rest: int, rule: LoadRule, start: int = 0) -> int:
    """Number of blocks that are loaded of a hit of `tokens` tokens."""
    count = tokens // BLOCK_SIZE
    tier = tier_over(model(1, 0), rule)
    return tier.worth_loading(HostHit((0,) * count, (), ()), start, rest)


def test_loads_what_takes_longer_to_compute() -> None:
    def seconds(per_token: float) -> Callable[[int, int], float]:
        return lambda count, start: per_token * count

    per_token = BLOCK_S / BLOCK_SIZE
    assert worth(160, 160, load_rule(seconds(1.2 * per_token))) == 10
    assert worth(160, 0, load_rule(seconds(0.9 * per_token))) == 0
    assert worth(160, 0, load_rule(seconds(0.0))) == 10, "nothing is known yet"
    # Hidden behind two layers of three of the rest: nothing is lost by it.
    assert worth(160, 300, load_rule(seconds(0.9 * per_token))) == 10


def test_few_tokens_ride_along() -> None:
    """Up to 133 rows cost no more than one; a step with more grows with them."""

    def compute(count: int, start: int) -> float:
        return 100e-9 + 50e-9 * max(0, count - 133) if count else 0.0

    assert worth(112, 16, load_rule(compute, None)) == 0, "128 rows in all"
    assert worth(128, 16, load_rule(compute, None)) == 8, "144"
    assert worth(16, 133, load_rule(compute, None)) == 1
    assert worth(128, 1, load_rule(lambda c, s: 1e-9, None)) == 0
    assert worth(160, 200, load_rule(compute, 161)) == 0
    assert worth(176, 200, load_rule(compute, 161)) == 11


def test_the_queue_counts() -> None:
    """Loads that are not larger go first; of larger ones only what is submitted is ahead."""

    def ahead(window: int | None, prompt: Path, own: Path, seconds: float) -> int:
        copier = model(16, 8)
        tier = tier_over(copier, load_rule(lambda c, s: seconds * c, 0, window))
        fill(tier, copier, (0, 0, 0, 0))
        tier.load(find(tier, prompt), list(range(8, 8 + len(prompt))), 0, 0.0)
        return tier.worth_loading(find(tier, own), 0, 0)

    alone = 1.1 * BLOCK_S / BLOCK_SIZE
    four = (0, 0, 0, 0)
    assert ahead(0, four, (0,), alone) == 1
    assert ahead(0, (0,), four, alone) == 0, "a small one is ahead"
    assert ahead(None, four, (0,), alone) == 0, "everything is submitted"
    assert ahead(BLOCK_BYTES, four, (0,), alone) == 0, "a block of it is"
    assert ahead(BLOCK_BYTES, four, (0,), 2 * alone) == 1
    assert ahead(None, four, four, 2 * alone) == 4


# -- traffic -----------------------------------------------------------------------------------

PATHS = all_paths(2, 3)
NUM_BLOCKS, NUM_SLOTS = 7, 4


class Traffic(RuleBasedStateMachine):
    """Plays the block manager and the device's steps. A block of the device is free, holds a prefix
    (`cached`), or is the source or target of a transfer id. Steps write what they write when they
    finish, and read their blocks until then."""

    @initialize(
        seed=st.integers(0, 99),
        policy=st.sampled_from(["lru", "slru", "cost"]),
        host_blocks=st.integers(0, NUM_SLOTS),
    )
    def begin(self, seed: int, policy: str, host_blocks: int) -> None:
        self.copier = model(NUM_BLOCKS, host_blocks, seed, NUM_SLOTS)
        self.copier.on_copy = self.check_copy
        self.cache = HostBlockIndex(policy=policy)
        self.tier = PinnedHostTier(self.cache, self.copier, load_rule())
        self.free = dict.fromkeys(range(NUM_BLOCKS), 0)  # last step that may touch it
        self.cached: dict[int, Path] = {}
        self.loads: dict[int, list[tuple[int, Path]]] = {}
        self.refused: set[int] = set()  # loads that never started; `poll` reports them as failed
        self.stores: dict[int, list[tuple[int, Path]]] = {}
        self.writes: list[list[tuple[int, Path]]] = []  # of steps on the device
        self.reads: list[list[tuple[int, bytes]]] = []
        self.issued = self.over = 0

    # What the device does.

    def check_copy(self, is_load: bool, host_block: int, block: int, layer: int) -> None:
        """Only blocks and host blocks that belong to an open transfer id are touched."""
        transfer_ids = self.loads if is_load else self.stores
        assert any(block == target for pairs in transfer_ids.values() for target, _ in pairs)
        assert (self.cache.num_pins(host_block) > 0) == is_load

    @precondition(lambda self: self.writes)
    @rule()
    def finish_step(self) -> None:
        """What a step reads is there until its end."""
        for block, expected in self.reads.pop(0):
            assert self.copier.device[block].tobytes() == expected
        for block, path in self.writes.pop(0):
            self.copier.device[block] = kv_of(hash_of(path))
        self.copier.finish_step()

    @rule(is_load=st.booleans(), times=st.integers(1, 6))
    def advance(self, is_load: bool, times: int) -> None:
        for _ in range(times):
            self.copier.advance(is_load)

    @precondition(
        lambda self: self.copier.open_transfers(True) or self.copier.open_transfers(False)
    )
    @rule(data=st.data(), copies=st.integers(0, 4))
    def fail(self, data: st.DataObject, copies: int) -> None:
        transfer_ids = self.copier.open_transfers(True) + self.copier.open_transfers(False)
        self.copier.fail(data.draw(st.sampled_from(transfer_ids)), copies)

    @rule()
    def more_memory(self) -> None:
        self.copier.num_host_blocks = min(NUM_SLOTS, self.copier.num_host_blocks + 1)

    # What the block manager does.

    @precondition(lambda self: self.free)
    @rule(path=st.sampled_from(PATHS), data=st.data())
    def compute(self, path: Path, data: st.DataObject) -> None:
        """A step computes a block, which is cached before the step is over, and reads others."""
        writes = []
        if path not in self.cached.values():
            block = data.draw(st.sampled_from(sorted(self.free)))
            del self.free[block]
            writes.append((block, path))
        pending = {block for step in self.writes for block, _ in step}
        readable = [block for block in self.cached if block not in pending]
        self.reads.append([(b, self.copier.device[b].tobytes()) for b in readable[:2]])
        self.writes.append(writes)
        self.cached.update(writes)
        self.tier.add_use_counts({hash_of(path): 1})
        self.tier.step_launched(self.copier.last_launched + 1)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """Stores some blocks; those that need no copy are free at once."""
        chosen = data.draw(
            st.lists(st.sampled_from(sorted(self.cached)), min_size=1, max_size=4, unique=True)
        )
        candidates = [candidate(self.cached[block], block) for block in chosen]
        held = [entry for entry in candidates if self.tier.holds(entry.lookup_key)]
        taken, transfer_id = self.tier.store(candidates)
        for entry in candidates[:taken]:
            assert self.tier.holds(entry.lookup_key)
            assert bool(transfer_id) or entry in held
        pairs = [(entry.block, self.cached.pop(entry.block)) for entry in candidates[:taken]]
        if transfer_id:
            self.stores[transfer_id] = pairs
            self.issued += 1
        else:
            self.free.update((block, self.copier.last_launched) for block, _ in pairs)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """The block is handed out before it could be stored."""
        block = data.draw(st.sampled_from(sorted(self.cached)))
        path = self.cached.pop(block)
        self.free[block] = self.copier.last_launched
        self.tier.device_evicted([(lookup_key_of(path), hash_of(path))])

    @rule(path=st.sampled_from(PATHS), keep=st.integers(0, 3))
    def load(self, path: Path, keep: int) -> None:
        hit = find(self.tier, path)
        wanted = [path[: n + 1] for n in range(len(hit.host_blocks))]
        assert list(hit.lookup_keys) == [lookup_key_of(p) for p in wanted]
        count = min(keep, len(wanted), len(self.free))
        self.tier.release(
            HostHit(hit.host_blocks[count:], hit.lookup_keys[count:], hit.block_hashes[count:])
        )
        if not count:
            return
        blocks = list(self.free)[:count]
        after = max(self.free.pop(block) for block in blocks)
        starts = self.copier.can_load() and not self.tier.is_off
        transfer_id = self.tier.load(hit.first(count), blocks, after, 0.0)
        if not starts:
            self.refused.add(transfer_id)
        self.loads[transfer_id] = list(zip(blocks, wanted))
        self.issued += 1

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.tier.abort(data.draw(st.sampled_from(sorted(self.loads))))

    @rule(behind=st.booleans())
    def poll(self, behind: bool) -> None:
        landed = [
            transfer_id
            for transfer_id in self.loads
            if behind and all(self.copier.landed(transfer_id, layer) for layer in range(LAYERS))
        ]
        events = self.tier.poll(landed)
        assert set(landed) <= {*events.loaded, *events.failed}, "a landed load is still open"
        self.over += len(events.loaded) + len(events.failed) + len(events.stored)
        for transfer_id in events.loaded:
            for block, path in self.loads.pop(transfer_id):
                # All bytes, whichever other transfers failed.
                assert (self.copier.device[block] == kv_of(hash_of(path))).all()
                self.free[block] = self.copier.last_launched
        for transfer_id in events.failed:
            for block, _ in self.loads.pop(transfer_id):
                self.free[block] = self.copier.last_launched
        for transfer_id in events.stored:
            for block, path in self.stores.pop(transfer_id):
                if path in self.cached.values():
                    self.free[block] = self.copier.last_launched
                else:
                    self.cached[block] = path

    @rule()
    def clear(self) -> None:
        """Nothing is found afterwards, whatever is under way."""
        self.tier.clear()
        assert not any(self.tier.holds(lookup_key_of(path)) for path in PATHS)
        self.free.update((block, self.copier.last_launched) for block in self.cached)
        self.cached.clear()

    @invariant()
    def books_agree(self) -> None:
        """A block is free, cached or in one transfer; pins and states match the open transfers."""
        if not hasattr(self, "tier"):
            return
        self.tier.check_integrity()
        pairs = [
            p for transfer_id in (*self.loads.values(), *self.stores.values()) for p in transfer_id
        ]
        everything = [*self.free, *self.cached, *(block for block, _ in pairs)]
        assert sorted(everything) == list(range(NUM_BLOCKS))
        reported = self.tier.metrics()
        assert reported["kv_offload_open_loads"] == len(self.loads.keys() - self.refused)
        assert reported["kv_offload_open_stores"] == len(self.stores)

    @invariant()
    def what_is_found_is_final(self) -> None:
        """Every host block that can be found holds its bytes."""
        for path in PATHS if hasattr(self, "tier") else ():
            hit = self.cache.match(hash_of(path[:-1]), [content(path[-1])])
            for host_block in hit.host_blocks:
                assert (self.copier.host[host_block] == kv_of(hash_of(path))).all()
            self.cache.unpin(hit.host_blocks)

    @invariant()
    def layer_ready_flags_tell_the_truth(self) -> None:
        """Once the layer-ready flag of a sound load says so, the layer's bytes are there."""
        for transfer_id, pairs in getattr(self, "loads", {}).items():
            if self.copier.layer_ready_flag(transfer_id) is None or not self.copier.is_sound(
                transfer_id
            ):
                continue
            for layer in range(LAYERS):
                if self.copier.landed(transfer_id, layer):
                    for block, path in pairs:
                        expected = kv_of(hash_of(path))[layer]
                        assert (self.copier.device[block, layer] == expected).all()

    def teardown(self) -> None:
        """All transfers end, each transfer id is reported once, nothing stays pinned."""
        if not hasattr(self, "tier"):
            return
        while self.writes:
            self.finish_step()
        drain(self.copier)
        self.poll(False)
        assert not self.loads and not self.stores and self.copier.idle
        assert self.over == self.issued
        assert self.cache.num_pinned == 0
        assert self.cache.num_used == sum(self.tier.holds(lookup_key_of(path)) for path in PATHS)
        reported = self.tier.metrics()
        ends = ("loads", "failed_loads", "aborted_loads", "stores", "failed_stores")
        assert sum(reported[f"kv_offload_{name}"] for name in ends) == self.issued


Traffic.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTraffic = Traffic.TestCase
