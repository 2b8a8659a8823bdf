"""Residency is closed under prefixes: whatever is found on the device, or may be found in host
memory, follows a block that is on the device or in host memory. Copies, ends and failures in any
order do not change it, and blocks that somebody reads never pay for it.

"In host memory" is what `HostTier.holds` says: a block that is still being stored counts (its
original is on the device until then, and a store that fails is told by `take_lost`)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.bridge.kv_offload.host_block_index import READY, HostBlockIndex
from hetero_llm.kv_cache import block_transfers
from hetero_llm.kv_cache.block_manager import BlockManager
from hetero_llm.kv_cache.block_transfers import BlockTransfers, OffloadLimits
from hetero_llm.kv_cache.prefix_cache import PrefixCache, root_key
from tests.helpers import offload_traffic as traffic
from tests.helpers.harness import VOCAB
from tests.helpers.host_memory import FakeTier
from tests.helpers.traffic import TRAFFIC, serve_on
from tests.scenarios.test_offload_engine import LONGEST, MODES, build, request_of
from tests.scenarios.test_offload_scheduling import make_served, settle

CALLS = (
    "match_prefix", "load", "allocate", "cache_blocks", "fork", "free", "poll", "offload",
    "reset_prefix_cache",
)  # fmt: skip
"""Of the block manager: all that publishes, evicts or copies anything."""


class Orphan(AssertionError):
    """A block without those before it."""


def in_host_memory(tier: Any) -> tuple[dict[bytes, bytes], list[bytes]]:
    """What `holds` says yes to: key to source; sources of those that may be found already."""
    if isinstance(tier, FakeTier):
        found = {key: source for source, (key, _) in tier.held.items()}
        coming = {v.key: v.source for _, victims in tier.stores.values() for v in victims}
        return coming | found, []  # it gives up what it likes, and keeps what follows
    cache = tier._cache
    here = {cache._key[slot]: source for source, slot in cache._slot_of.items()}
    ready = [source for source, slot in cache._slot_of.items() if cache._state[slot] == READY]
    return here, ready


def check_closed(blocks: BlockManager) -> None:
    """
    Raises:
        Orphan: a block's parent is neither on the device nor in host memory.
    """
    prefix, moves = blocks._prefix, blocks._moves
    assert prefix is not None and moves is not None
    held, found = in_host_memory(moves.tier)
    assert all(moves.tier.holds(source) for source in held.values())
    parents = {source[:32]: "of a slot" for source in found}
    for block in prefix._key_of:
        parents[prefix.entry(block)[0][:32]] = f"of block {block}, {blocks._refs[block]} readers"
    orphans = parents.keys() - set(prefix._key_of.values()) - held.keys() - {root_key()}
    if orphans:
        raise Orphan([parents[key] for key in orphans])


def watch(blocks: BlockManager) -> list[int]:
    """Checks after every call of the block manager; how many readers blocks had that were dropped
    for want of a parent."""
    readers: list[int] = []
    moves: Any = blocks._moves
    drop = moves._drop_behind

    def note_dropped(lost: list[tuple[bytes, bytes]]) -> None:
        before = len(moves._dropped)
        drop(lost)
        readers.extend(blocks._refs[block] for block in moves._dropped[before:])

    def checked(call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        result = call(*args, **more)
        check_closed(blocks)
        return result

    moves._drop_behind = note_dropped
    for name in CALLS:
        setattr(blocks, name, partial(checked, getattr(blocks, name)))
    return readers


CASES: dict[str, dict[str, Any]] = {
    "victims": {},
    "all leave": {"limits": OffloadLimits(8, cached=0)},
    "few stay": {"limits": OffloadLimits(4, cached=6), "policy": "slru"},
    "written through": {"limits": OffloadLimits(8, write_through=True), "policy": "cost"},
    "few, through": {
        "limits": OffloadLimits(8, cached=6, write_through=True), "gpu_blocks": 26,
        "host_blocks": 30,
    },
    "used twice": {"min_uses": 2, "limits": OffloadLimits(8, cached=0)},
    "used twice, stay": {"min_uses": 2, "host_blocks": 30},
    "tiny host": {"host_blocks": 9, "limits": OffloadLimits(8, cached=0)},
    "tiny both": {"host_blocks": 20, "gpu_blocks": 24, "limits": OffloadLimits(4)},
}  # fmt: skip


def jobs_of(seed: int, count: int = 24) -> list[traffic.Job]:
    """Every prompt comes again at about the same time: both are computed."""
    rng = random.Random(seed)
    jobs = traffic.traffic(seed, count, longest=LONGEST, vocab=VOCAB)
    again = [replace(j, name=j.name + " again", at=j.at + rng.choice((0, 0, 1, 2))) for j in jobs]
    return [*jobs, *again]


def run(case: str, seed: int, asynchronous: bool, fail: float = 0.0) -> list[int]:
    """Random traffic, checked after every call; see `watch`."""
    served = build(seed, asynchronous, **CASES[case])
    if seed % 2:
        traffic.join_at_once(served.engine)
    if fail:
        traffic.spoil(served.engine, seed, fail)
    readers = watch(served.blocks)
    traffic.serve(served.engine, jobs_of(seed), make=request_of)
    traffic.check_over(served.engine)
    return readers


@MODES
@pytest.mark.parametrize("case", CASES)
def test_what_is_found_follows_what_is_somewhere(case: str, asynchronous: bool) -> None:
    """And nobody loses a block that is being read, unless its own load failed."""
    assert not any(run(case, 0, asynchronous))
    run(case, 1, asynchronous, 0.3)
    run(case, 2, asynchronous, 0.3)


@settings(max_examples=15, deadline=None)
@given(
    TRAFFIC, st.booleans(), st.integers(0, 2**16), st.sampled_from([0.0, 0.3]), st.booleans(),
    st.sampled_from([None, 0, 4]), st.sampled_from([14, 20, 40]), st.sampled_from([0.0, 0.2]),
    st.sampled_from([1, 2]),
)  # fmt: skip
def test_on_the_device_whatever_host_memory_does(
    requests: list[tuple], asynchronous: bool, seed: int, fail: float, write_through: bool,
    cached: int | None, num_blocks: int, time_out: float, min_uses: int,
) -> None:  # fmt: skip
    """With beams, several samples, loads in two parts and gates that give up. This host memory
    gives up any block at any time."""
    requests = requests + [(*entry[:4], entry[4] + 40, entry[5]) for entry in requests]
    served, _ = make_served(
        asynchronous, num_blocks=num_blocks, seed=seed, fail=fail, write_through=write_through,
        cached=cached, time_out=time_out, min_uses=min_uses, num_slots=12,
    )  # fmt: skip
    watch(served.blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_transfers, "_LONG_PREFIX", 2)
        patch.setattr(block_transfers, "_FIRST_PART", 2)
        patch.setattr(block_transfers, "_LARGER", 1)
        serve_on(served, requests, settle=partial(settle, served))


@MODES
def test_a_cache_that_is_cleared_beside_running_requests(asynchronous: bool) -> None:
    """What they compute from then on follows what was cleared: nobody is to find it."""
    served = build(1, asynchronous, **CASES["few stay"])
    watch(served.blocks)
    step, steps, running = served.engine.step, 0, 0

    def step_and_clear() -> Any:
        nonlocal steps, running
        steps += 1
        if steps % 7 == 0:
            running += served.engine._scheduler.num_running
            served.engine.reset_prefix_cache()
        return step()

    served.engine.step = step_and_clear  # type: ignore[method-assign]
    traffic.serve(served.engine, jobs_of(1), make=request_of)
    traffic.check_over(served.engine)
    assert running > 10


@MODES
def test_host_memory_that_is_switched_off(asynchronous: bool) -> None:
    served = build(2, asynchronous, **CASES["used twice, stay"])
    watch(served.blocks)
    tier = traffic.tier_of(served.engine)
    traffic.serve(served.engine, jobs_of(2)[:20], make=request_of)
    assert tier._cache.num_used
    traffic.spoil(served.engine, 2, 1.0)
    jobs = [replace(job, name=f"late {job.name}") for job in jobs_of(2)]
    traffic.serve(served.engine, jobs, make=request_of)
    traffic.check_over(served.engine)
    assert tier.is_off and not tier._cache.num_used


def without_twins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "_add_twin", lambda self, source, block: None)


def without_dropping(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockTransfers, "_drop_behind", lambda self, lost: None)


def without_being_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostBlockIndex, "take_lost", lambda self: [])


@pytest.mark.parametrize(
    ("change", "case"),
    [
        (without_twins, "victims"),
        (without_dropping, "victims"),
        (without_being_told, "few, through"),
    ],
)
def test_it_takes_all_of_it(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None], case: str
) -> None:
    """Negative controls: one of some traffics leaves an orphan."""
    change(monkeypatch)
    with pytest.raises(Orphan):
        for seed in range(8):
            run(case, seed, bool(seed % 2), 0.3)
