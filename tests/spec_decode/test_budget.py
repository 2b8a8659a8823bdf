"""How many nodes to verify: against every possible choice, and what is learned of steps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.spec_decode import budget
from hetero_llm.spec_decode.budget import MEMORY, MOST_ROWS, StepCosts

CHANCES = st.floats(0.0078125, 1.0, width=32)


def costs_of(*steps: tuple[int, float]) -> StepCosts:
    costs = StepCosts()
    for rows, seconds in steps:
        costs.observe(rows, seconds)
    return costs


def seconds(costs: StepCosts, *rows: int) -> list[float]:
    return costs.of(*rows)


def choose(
    costs: StepCosts,
    drafts: list[list[float]],
    num_rows: int,
    idle: float = 0.0,
    *,
    most_rows: int = MOST_ROWS,
) -> list[int]:
    return verdict(costs, drafts, num_rows, idle, most_rows=most_rows)[0]


def verdict(
    costs: StepCosts,
    drafts: list[list[float]],
    num_rows: int,
    idle: float = 0.0,
    plain_idle: float = 0.0,
    *,
    most_rows: int = MOST_ROWS,
) -> tuple[list[int], float]:
    """Nodes kept of each draft, and what they gain."""
    counts = np.array([len(draft) for draft in drafts], np.int32)
    survival = np.full((len(drafts), 63), np.float32(0.5))
    for row, draft in enumerate(drafts):
        survival[row, : len(draft)] = draft
    scales = np.ones(len(drafts), np.float32)
    kept = np.zeros(len(drafts), np.int32)
    gain = budget.choose(
        survival, counts, scales, costs.table(), costs.edges, num_rows, idle, plain_idle,
        most_rows, kept,
    )  # fmt: skip
    return kept.tolist(), gain


def test_steps_are_interpolated_and_never_get_cheaper() -> None:
    costs = costs_of((1, 1.0), (8, 1.7), (16, 1.5), (64, 3.0))
    assert seconds(costs, 0, 1, 8, 16, 64) == [1.0, 1.0, 1.7, 1.7, 3.0]
    assert seconds(costs, 4)[0] == pytest.approx(1.3)
    assert seconds(costs, 9) == seconds(costs, 16), "as large as the graph that holds it"
    assert 3.0 < seconds(costs, 65)[0] < 3.5
    assert not StepCosts().table().any()


def test_times_follow_the_machine_but_not_an_outlier() -> None:
    costs = costs_of((4, 1.0))
    costs.observe(4, 50.0)
    assert seconds(costs, 4) == [1.0]
    for _ in range(60):
        costs.observe(4, 2.0)
    assert seconds(costs, 4) == [pytest.approx(2.0, rel=0.01)]
    for _ in range(20):
        costs.observe(4, 1.0)
    assert seconds(costs, 4) == [pytest.approx(1.0, rel=0.01)]


def test_times_of_sizes_that_do_not_run_are_forgotten() -> None:
    costs = costs_of((1, 1.0), (4, 9.0))
    for _ in range(MEMORY - 1):
        costs.observe(1, 1.0)
    assert seconds(costs, 4) == [9.0]
    costs.observe(1, 1.0)
    assert seconds(costs, 4)[0] < 1.1, "cheap, so that it is tried"
    costs.observe(4, 40.0)
    assert seconds(costs, 1, 4) == [1.0, 40.0], "the machine is another one"


def test_a_profile_holds_until_steps_tell_otherwise() -> None:
    costs = costs_of((4, 9.0))
    costs.price([(1, 1.0), (8, 1.2), (64, 2.0)])
    assert seconds(costs, 1, 2, 8, 9, 64) == [1.0, 1.2, 1.2, 2.0, 2.0]
    assert 2.0 < seconds(costs, 65)[0] < 2.3
    costs.observe(5, 2.4)
    assert seconds(costs, 1, 8, 64) == pytest.approx([2.2, 2.4, 3.2]), "long contexts"
    for _ in range(100):
        costs.observe(8, 2.5)
        costs.observe(64, 6.0)
    assert seconds(costs, 8, 64) == pytest.approx([2.5, 6.0], rel=0.1)
    for _ in range(500):
        costs.observe(8, 2.5)
    assert seconds(costs, 8) == pytest.approx([2.5], rel=0.01)
    assert seconds(costs, 64)[0] < 4.0, "what was dear once is tried anew"


def test_one_strange_step_changes_little() -> None:
    costs = StepCosts()
    costs.price([(1, 1.0), (8, 1.2), (64, 2.0)])
    for _ in range(50):
        costs.observe(8, 1.2)
    costs.observe(8, 100.0)
    assert seconds(costs, 1, 64)[0] < 1.5 and seconds(costs, 8)[0] < 2.5
    for _ in range(50):
        costs.observe(8, 1.2)
    assert seconds(costs, 1, 8, 64) == pytest.approx([1.0, 1.2, 2.0], rel=0.05)


def test_nodes_fill_what_steps_are_padded_to() -> None:
    costs = StepCosts()
    costs.price([(1, 1.0), (8, 1.1), (16, 3.0)])
    assert choose(costs, [[0.9] + [0.01] * 20], 1) == [7]
    assert choose(costs, [[0.01] * 20], 1) == [0]


def test_no_step_becomes_larger_than_asked() -> None:
    drafts = [[0.9] * 20] * 3
    for costs in (StepCosts(), costs_of((3, 1.0), (63, 1.01))):
        for most, expected in ((63, 60), (20, 17), (4, 1), (3, 0), (2, 0)):
            assert sum(choose(costs, drafts, 3, most_rows=most)) == expected


def test_before_anything_is_known_all_nodes_are_kept() -> None:
    assert choose(StepCosts(), [[0.1] * 5, [], [0.9] * 63], 3) == [5, 0, 63]


def test_nothing_is_drafted_where_rows_are_dear() -> None:
    dear = costs_of(*((rows, float(rows)) for rows in (1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32)))
    assert choose(dear, [[0.9] * 5] * 4, 4) == [0, 0, 0, 0]
    cheap = costs_of((1, 1.0), (8, 1.05))
    assert choose(cheap, [[0.3] * 7], 1) == [7]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(CHANCES, max_size=5), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(1, 24), st.floats(0.5, 4.0)), min_size=1, max_size=6),
    st.floats(0.0, 0.5),
    st.integers(0, 3),
)
def test_no_other_choice_is_faster(
    drafts: list[list[float]], steps: list[tuple[int, float]], turn: float, others: int
) -> None:
    drafts = [sorted(draft, reverse=True) for draft in drafts]
    costs = costs_of(*steps)
    num_rows = len(drafts) + others

    def rate(kept: tuple[int, ...]) -> float:
        gained = len(drafts) + sum(sum(d[:n]) for d, n in zip(drafts, kept))
        nodes = sum(kept)
        return gained / (seconds(costs, num_rows + nodes)[0] + turn)

    chosen = tuple(choose(costs, drafts, num_rows, turn))
    best = max(map(rate, itertools.product(*(range(len(draft) + 1) for draft in drafts))))
    assert rate(chosen) == pytest.approx(best, rel=1e-5)


def test_estimates_are_scaled_and_made_to_fall() -> None:
    survival, kept = np.zeros((2, 63), np.float32), np.zeros(2, np.int32)
    survival[0, :3] = [0.8, 0.9, 0.2]
    survival[1, :2] = [0.9, 0.5]
    counts, trust = np.array([3, 2], np.int32), np.array([0.5, 4.0], np.float32)
    costs = costs_of((2, 1.0), (4, 1.01), (7, 9.0))
    table = costs.table()
    budget.choose(survival, counts, trust, table, costs.edges, 2, 0.0, 0.0, MOST_ROWS, kept)
    np.testing.assert_allclose(survival[0, :3], [2 / 3, 2 / 3, 1 / 9], rtol=1e-6)
    np.testing.assert_allclose(survival[1, :2], [36 / 37, 4 / 5], rtol=1e-6)
    assert kept.tolist() == [0, 2]


def test_drafts_must_pay_for_the_device_that_idles() -> None:
    costs = costs_of((4, 1.0), (8, 1.1), (16, 5.0))
    drafts = [[0.6] * 1] * 4
    kept, gain = verdict(costs, drafts, 4, 0.1)
    assert kept == [1] * 4 and gain == pytest.approx(1.6 / 1.2)
    kept, gain = verdict(costs, drafts, 4, 0.7)
    assert kept == [1] * 4, "best for a device that has idled"
    assert gain == pytest.approx(1.6 / 1.8), "but it should not have"
    assert verdict(costs, drafts, 4, 0.7, 0.7)[1] == pytest.approx(1.6 * 1.7 / 1.8)
    assert verdict(costs, [[0.01]] * 4, 4, 0.25) == ([0] * 4, pytest.approx(0.8))


def test_the_likeliest_of_many_nodes_are_kept() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 20, 64)
    drafts = [np.sort(rng.random(size).astype(np.float32) ** 3)[::-1] for size in sizes]
    in_order = np.sort(np.concatenate(drafts))[::-1]
    assert len(in_order) > 500
    for most in (1, 37, 400):
        kept = choose(StepCosts(), [draft.tolist() for draft in drafts], 64, most_rows=64 + most)
        assert kept == [int((draft >= in_order[most - 1]).sum()) for draft in drafts]
