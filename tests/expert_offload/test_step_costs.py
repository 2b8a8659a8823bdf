"""Seconds of steps with experts on the host."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_llm.expert_offload.step_costs import (
    LaneCosts,
    choose_linked,
    fit_lane_costs,
    linked_rows,
    linked_wholes,
    paying_parts,
    with_host_experts,
)
from hetero_llm.spec_decode.budget import choose, verify_times

PROFILE = [(1, 0.010), (2, 0.010), (4, 0.011), (6, 0.012), (8, 0.013), (16, 0.014)]


def test_exchanges_are_added() -> None:
    found = with_host_experts(PROFILE, {4: 1e-3, 8: 3e-3}, num_layers=10, streamed_seconds=4e-3)
    assert [size for size, _ in found] == [1, 2, 4, 6, 8, 16]
    expected = [0.015, 0.015, 0.021, 0.032, 0.043, 0.054]
    assert [seconds for _, seconds in found] == pytest.approx(expected)


def kept(profile: list[tuple[int, float]]) -> int:
    """Nodes of a draft of 15 likely ones that the budget keeps for one sequence."""
    times = verify_times(profile)
    nodes = np.zeros(1, np.int64)
    probs = (0.7 ** np.arange(1, 16, dtype=np.float32))[None].astype(np.float32)
    choose(
        probs, np.array([15]), np.ones(1, np.float32), times.table(), times.sizes,
        1, 0.0, 0.0, 64, nodes,
    )  # fmt: skip
    return int(nodes[0])


def test_the_budget_plans_fewer_nodes() -> None:
    costly = with_host_experts(PROFILE, {1: 1e-3, 16: 16e-3}, num_layers=10, streamed_seconds=20e-3)
    assert kept(costly) < kept(PROFILE)


COSTS = LaneCosts(exchange=1.0, expert=2.0, row=0.5, link=4.0)


def test_the_threads_take_the_experts_of_fewest_tokens() -> None:
    rows = np.array([9, 0, 1, 100, 2, 1])
    # Threads 1 + 3 * 2 + 4 * 0.5 = 9 beside 2 * 4 of the link; one fewer: 6.0 beside 12.
    assert COSTS.split(rows, 0.0, 1000).tolist() == [False, False, True, False, True, True]
    # The link is busy for long: a fourth one ends before it, the expert of many tokens does not.
    assert COSTS.split(rows, 20.0, 1000).tolist() == [True, False, True, False, True, True]
    assert COSTS.split(rows, 20.0, 3).sum() == 2  # the mailbox has room for no more
    assert not COSTS.split(np.zeros(3, int), 9.0, 10).any()
    assert not COSTS.split(np.full(4, 1000), 0.0, 10_000).any()


@given(st.lists(st.integers(0, 30), max_size=7), st.floats(0, 40), st.integers(0, 60))
def test_no_other_split_ends_earlier(rows: list[int], pending: float, most: int) -> None:
    counts = np.array(rows, np.int64)

    def ends(chosen: np.ndarray) -> float:
        link = pending + COSTS.link * int(((counts > 0) & ~chosen).sum())
        return max(COSTS.threads(counts[chosen]), link)

    found = COSTS.split(counts, pending, most)
    assert counts[found].sum() <= most and (counts[found] > 0).all()
    for bits in range(1 << len(rows)):
        other = np.array([bits >> i & 1 for i in range(len(rows))], bool)
        if counts[other].sum() <= most:
            assert ends(found) <= ends(other & (counts > 0)) + 1e-9


def test_costs_from_exchanges() -> None:
    experts, k, on_host = 128, 8, 64

    def seconds(tokens: int) -> float:
        read = on_host * (1 - (1 - k / experts) ** tokens)
        return 2e-5 + read * 1e-4 + tokens * k * on_host / experts * 3e-6

    measured = {n: seconds(n) for n in (8, 16, 32, 64, 128, 256)}
    found = fit_lane_costs(
        measured, on_host=on_host, num_experts=experts, experts_per_token=k, link_seconds=0.064,
        slowdown=1.5,
    )  # fmt: skip
    assert found.expert == pytest.approx(1.5e-4, rel=0.05)
    assert found.row == pytest.approx(4.5e-6, rel=0.05) and found.link == pytest.approx(1e-3)
    one = fit_lane_costs(
        {8: 0.01}, on_host=4, num_experts=8, experts_per_token=2, link_seconds=0.02
    )
    assert min(one.exchange, one.expert, one.row) >= 0.0 and one.link == 0.005


@pytest.mark.parametrize("inner", [704, 768, 1408, 1536, 2880, 14336])
def test_parts_of_the_link_leave_whole_units_to_the_threads(inner: int) -> None:
    found = linked_rows(inner, 128)
    assert 2 <= len(found) <= 4 and found == tuple(sorted(found))
    assert all((inner - linked) % 128 == 0 for linked in found)
    assert all(0.15 * inner <= linked <= 0.55 * inner for linked in found)


def test_experts_too_small_to_be_cut_have_no_parts() -> None:
    assert linked_rows(128, 128) == () == linked_rows(64, 128)


def test_the_links_part_has_to_pay() -> None:
    """With random routes alone: an empty bank, or nothing that pays."""
    assert choose_linked({0: 1.0, 512: 0.9, 640: 0.88, 768: 0.95}, {}, 0) == 640
    assert choose_linked({"": 1.0, "some": 0.98, "more": 1.2}, {}, "") == ""


def test_the_links_part_does_not_slow_steps_that_miss_few() -> None:
    """Microseconds of a layer, with random routes an H200's, the others made up. A third of one
    missed expert is none, which costs two kernels."""
    random = {"": 634.1, "512 rows": 551.2, "third": 550.7, "768 rows": 768.3}
    assert choose_linked(random, {}, "") == "third"
    one_miss = {"": 110.0, "512 rows": 100.0, "third": 113.3}
    assert choose_linked(random, one_miss, "") == "512 rows"
    assert choose_linked(random, {**one_miss, "512 rows": 110.1}, "") == ""
    # The smaller gain decides, whichever routes it is of.
    assert choose_linked({0: 100, 1: 80, 2: 90}, {0: 50, 1: 49, 2: 46}, 0) == 2
    assert choose_linked({0: 100, 1: 96, 2: 90}, {0: 50, 1: 30, 2: 46}, 0) == 2


SECONDS = st.lists(st.integers(60, 130), min_size=1, max_size=6)


@given(SECONDS, st.lists(st.integers(60, 130), min_size=6, max_size=6), st.booleans())
def test_no_other_part_has_a_larger_least_gain(
    random: list[int], one_miss: list[int], has_bank: bool
) -> None:
    """Part 0 is none."""
    times = dict(enumerate(random))
    pays = [part for part in times if 100 * random[part] <= 97 * random[0]]
    assert paying_parts(times, 0) == pays
    few = {part: one_miss[part] for part in (0, *pays)} if has_bank and pays else {}
    chosen = choose_linked(times, few, 0)

    def least(part: int) -> Fraction:
        kinds = (times, few) if few else (times,)
        return min(1 - Fraction(kind[part], kind[0]) for kind in kinds)

    allowed = [part for part in pays if least(part) >= 0]
    assert chosen in allowed if allowed else chosen == 0
    assert all(least(part) <= least(chosen) for part in allowed)


def test_whole_experts_of_the_link() -> None:
    """One of four, of three, two of five, one of two, and none of one."""
    experts = [[count * share // 256 for share in linked_wholes(256)] for count in (1, 2, 3, 4, 5)]
    assert experts == [[0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 1, 1], [1, 1, 1, 2], [1, 1, 2, 2]]
