"""Who computes on which core."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_llm.core.errors import ConfigError
from hetero_llm.engine.core_plan import CorePlan, deal_cores, deal_to_engine, deal_to_ranks


def deal(count: int, **given: Any) -> CorePlan:
    arguments = {"target_on_cpu": False, "draft_threads": None} | given
    return deal_cores(tuple(range(count)), **arguments)


@pytest.mark.parametrize(
    ("count", "of_gpu", "of_cpu"),
    [(2, 1, 1), (3, 1, 2), (4, 1, 3), (8, 2, 6), (16, 4, 12), (64, 4, 48), (192, 4, 144)],
)
def test_what_the_engine_keeps(count: int, of_gpu: int, of_cpu: int) -> None:
    """Of a target on the GPU a few cores, of one that computes itself three quarters."""
    assert len(deal(count).engine) == of_gpu
    assert len(deal(count, target_on_cpu=True).engine) == of_cpu


def test_nobody_shares_a_core() -> None:
    for count in range(2, 40):
        for on_cpu in (False, True):
            for threads in (None, *range(1, count)):
                plan = deal(count, target_on_cpu=on_cpu, draft_threads=threads)
                assert plan.engine + plan.draft == tuple(range(count)) and not plan.shared
                assert plan.engine and plan.draft
                assert threads is None or len(plan.draft) == threads
            for threads in range(1, count):
                plan = deal(count, target_on_cpu=True, target_threads=threads)
                assert len(plan.engine) == threads


def test_one_core_for_everybody() -> None:
    plan = deal(1)
    assert plan == CorePlan((0,), (0,), shared=True) == deal(1, draft_threads=1)
    assert plan == deal(1, target_on_cpu=True, target_threads=1)
    assert plan.words() == "one core for engine and draft worker alike"
    with pytest.raises(ConfigError, match="^draft_threads=2: this process may use one core$"):
        deal(1, draft_threads=2)


@pytest.mark.parametrize("threads", [4, 5, 100])
def test_more_draft_threads_than_cores(threads: int) -> None:
    with pytest.raises(ConfigError) as caught:
        deal(4, draft_threads=threads)
    assert str(caught.value) == (
        f"draft_threads={threads}: this process may use 4 cores and the engine needs one of them"
    )


@pytest.mark.parametrize(("target", "draft", "left"), [(4, None, 3), (2, 3, 1), (9, 1, 3)])
def test_more_threads_of_the_target_than_are_left(
    target: int, draft: int | None, left: int
) -> None:
    with pytest.raises(ConfigError) as caught:
        deal(4, target_on_cpu=True, target_threads=target, draft_threads=draft)
    assert str(caught.value) == (
        f"cpu_threads={target}: this process may use 4 cores, of which the draft worker has "
        f"{4 - left}: {left} are left"
    )


def test_copies_get_a_core_of_the_engines() -> None:
    for count in range(1, 40):
        for threads in (None, *range(1, count)):
            plan = deal(count, copies=True, draft_threads=threads)
            if count == 1:
                assert plan == CorePlan((0,), (0,), shared=True)
                continue
            assert plan.copy in plan.engine and plan.copy not in plan.draft
            assert plan.copy != plan.engine[0] or len(plan.engine) == 1
            if threads is None and count > 2:
                assert len(plan.engine) >= 2
        alone = deal_to_engine(tuple(range(count)))
        assert alone.engine == tuple(range(count)) and not alone.draft and not alone.shared
        assert alone.copy == min(count, 4) - 1
    assert deal(16, copies=True) == CorePlan((0, 1, 2, 3), tuple(range(4, 16)), False, 3)
    assert deal(16).copy is None


def test_words() -> None:
    assert deal(8, draft_threads=3).words() == "engine 0-4, draft worker 5-7"
    copies = deal(8, draft_threads=3, copies=True)
    assert copies.words() == "engine 0-4 (KV copies on 3), draft worker 5-7"
    assert deal_to_engine((0, 1)).words() == "engine 0-1 (KV copies on 1)"
    cpus = (0, 2, 3, 9, 1, 20)
    plan = deal_cores(cpus, target_on_cpu=False, draft_threads=2)
    assert plan.words() == "engine 0,2-3,9, draft worker 1,20"


NODES = {cpu: cpu // 8 for cpu in range(16)}  # two of eight cores


@pytest.mark.parametrize(
    ("cpus", "homes", "expected"),
    [
        (range(16), (0, 1), (range(8), range(8, 16))),
        (range(16), (1, 0), (range(8, 16), range(8))),
        # Both at one node: each gets half of its cores, then some of the others.
        (range(16), (1, 1), ((0, 1, 2, 3, 8, 10, 12, 14), (4, 5, 6, 7, 9, 11, 13, 15))),
        (range(12), (0, 0), ((0, 2, 4, 6, 8, 9), (1, 3, 5, 7, 10, 11))),
        # Unknown, as on a machine of one node.
        (range(16), (None, None), (range(8), range(8, 16))),
        (range(5), (None, None), ((0, 1), (2, 3))),
        (range(16), (0, 0, 1, 1), ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))),
        ((3,), (0, 1), ((3,), (3,))),
    ],
)
def test_ranks_divide_cores(cpus: Any, homes: tuple[int | None, ...], expected: Any) -> None:
    found = deal_to_ranks(tuple(cpus), homes, NODES)
    assert found == tuple(tuple(one) for one in expected)
