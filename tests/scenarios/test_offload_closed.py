"""Residency is closed under prefixes: every block that the prefix cache or the host tier finds
follows a block that is on the device or in host memory. Copies, ended requests and failures in any
order do not change that, and the prefix cache forgets no block that a running sequence reads.

"In host memory" is what `HostTier.holds` says. A block that is still being stored counts: its
original is on the device until then, and `take_evicted` reports a store that fails."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.bridge.kv_offload.host_block_index import HostBlockIndex
from hetero_llm.kv_cache.block_manager import BlockManager, LoadParts
from hetero_llm.kv_cache.block_transfers import OffloadLimits
from hetero_llm.kv_cache.prefix_cache import PrefixCache, hash_root
from tests.helpers import offload_traffic as traffic
from tests.helpers.harness import VOCAB
from tests.helpers.host_memory import FakeTier
from tests.helpers.traffic import TRAFFIC, serve_on
from tests.scenarios.test_offload_engine import LONGEST, MODES, build, request_of
from tests.scenarios.test_offload_scheduling import make_served, settle

CALLS = (
    "match_prefix", "load", "allocate", "cache_blocks", "fork", "free", "take_back", "offload",
    "reset_prefix_cache",
)  # fmt: skip
"""Methods of the block manager that cache, evict or copy blocks."""


class Orphan(AssertionError):
    """A block without those before it."""


def in_host_memory(tier: Any) -> tuple[dict[bytes, bytes], list[bytes]]:
    """Returns the blocks that `holds` confirms, hash to lookup key, and the lookup keys of those
    that `match` finds."""
    if isinstance(tier, FakeTier):
        found = {block_hash: lookup_key for lookup_key, (block_hash, _) in tier.held.items()}
        coming = {
            v.block_hash: v.lookup_key for _, candidates in tier.stores.values() for v in candidates
        }
        return coming | found, []  # it evicts any block, with or without its descendants
    entries = tier.index.entries()
    here = {block_hash: lookup_key for lookup_key, block_hash, _ in entries}
    return here, [lookup_key for lookup_key, _, is_found in entries if is_found]


def check_closed(blocks: BlockManager) -> None:
    """
    Raises:
        Orphan: a block's parent is neither on the device nor in host memory.
    """
    prefix, tier = blocks.prefix_cache, blocks.transfers.tier  # type: ignore[union-attr]
    held, found = in_host_memory(tier)
    assert all(tier.holds(lookup_key) for lookup_key in held.values())
    parents = {lookup_key[:32]: "of a host block" for lookup_key in found}
    on_device = set()
    for block in prefix.blocks():
        lookup_key, block_hash = prefix.entry(block)
        on_device.add(block_hash)
        parents[lookup_key[:32]] = f"of block {block}, {blocks.num_readers(block)} readers"
    orphans = parents.keys() - on_device - held.keys() - {hash_root()}
    if orphans:
        raise Orphan([parents[block_hash] for block_hash in orphans])


def watch(blocks: BlockManager) -> list[int]:
    """Checks after every call of the block manager. Returns a list that collects the blocks which
    the prefix cache forgot while a table held them."""
    prefix = blocks.prefix_cache
    forgotten: list[int] = []

    def held() -> set[tuple[int, int]]:
        return {
            (table, block) for table in blocks.num_writable for block in blocks.block_ids(table)
        }

    def checked(call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        before = {(table, block) for table, block in held() if prefix.is_cached(block)}
        result = call(*args, **more)
        check_closed(blocks)
        kept = before & held()
        forgotten.extend(block for _, block in kept if not prefix.is_cached(block))
        return result

    for name in CALLS:
        setattr(blocks, name, partial(checked, getattr(blocks, name)))
    return forgotten


CASES: dict[str, dict[str, Any]] = {
    "candidates": {},
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
    forgotten = watch(served.blocks)
    traffic.serve(served.engine, jobs_of(seed), make=request_of)
    traffic.check_over(served.engine)
    return forgotten


@MODES
@pytest.mark.parametrize("case", CASES)
def test_what_is_found_follows_what_is_somewhere(case: str, asynchronous: bool) -> None:
    """A block that a sequence reads stays cached unless its own load failed."""
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
    """With beams, several samples, loads in two parts and layer-ready flags that time out. This
    host memory evicts any block at any time."""
    requests = requests + [(*entry[:4], entry[4] + 40, entry[5]) for entry in requests]
    served, _ = make_served(
        asynchronous, num_blocks=num_blocks, seed=seed, fail=fail, write_through=write_through,
        cached=cached, time_out=time_out, min_uses=min_uses, num_host_blocks=12,
        load_parts=LoadParts(min_blocks=2, first=2, growth=1),
    )  # fmt: skip
    watch(served.blocks)
    serve_on(served, requests, settle=partial(settle, served))


@MODES
def test_a_cache_that_is_cleared_beside_running_requests(asynchronous: bool) -> None:
    """What running requests compute from then on follows blocks that were cleared: no later request
    may find it."""
    served = build(1, asynchronous, **CASES["few stay"])
    watch(served.blocks)
    step, steps, running = served.engine.step, 0, 0

    def step_and_clear() -> Any:
        nonlocal steps, running
        steps += 1
        if steps % 7 == 0:
            running += served.engine.scheduler.num_running
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
    assert tier.index.num_used
    traffic.spoil(served.engine, 2, 1.0)
    jobs = [replace(job, name=f"late {job.name}") for job in jobs_of(2)]
    traffic.serve(served.engine, jobs, make=request_of)
    traffic.check_over(served.engine)
    assert tier.is_off and not tier.index.num_used


def without_duplicates(patch: pytest.MonkeyPatch) -> None:
    """The prefix cache forgets duplicates as soon as they are cached."""
    for name in ("cache", "cache_hashed"):
        cache = getattr(PrefixCache, name)

        def forgetful(self: PrefixCache, *given: Any, cache: Any = cache) -> Any:
            hashes = cache(self, *given)
            self.evict(list(self.duplicates))
            return hashes

        patch.setattr(PrefixCache, name, forgetful)


def without_dropping(patch: pytest.MonkeyPatch) -> None:
    """Descendants of an evicted block are not found, so they stay."""
    patch.setattr(PrefixCache, "children", lambda self, block_hash: [])


def without_host_evictions(patch: pytest.MonkeyPatch) -> None:
    """The index does not report what host memory evicts."""
    patch.setattr(HostBlockIndex, "take_evicted", lambda self: [])


@pytest.mark.parametrize(
    ("change", "case"),
    [
        (without_duplicates, "candidates"),
        (without_dropping, "candidates"),
        (without_host_evictions, "few, through"),
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
