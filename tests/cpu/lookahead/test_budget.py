"""How many nodes to verify: against every possible choice, and what is learned of steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.cpu.lookahead.budget import StepCosts, best_count, keep_likeliest


def costs_of(*steps: tuple[int, float]) -> StepCosts:
    costs = StepCosts()
    for rows, seconds in steps:
        costs.observe(rows, seconds)
    return costs


def seconds(costs: StepCosts, *rows: int) -> list[float]:
    return costs.of(np.array(rows)).tolist()


def test_steps_are_interpolated_and_never_get_cheaper() -> None:
    costs = costs_of((1, 1.0), (8, 1.7), (16, 1.5), (64, 3.0))
    assert seconds(costs, 1, 8, 16, 64) == [1.0, 1.7, 1.7, 3.0]
    assert 1.0 < seconds(costs, 4)[0] < 1.7
    assert seconds(costs, 9) == seconds(costs, 16), "as large as the graph that holds it"
    assert 3.0 < seconds(costs, 65)[0] < 3.5


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


def test_before_anything_is_known_all_nodes_are_kept() -> None:
    assert best_count(np.full(5, 0.1, np.float32), 1, 1, StepCosts(), 0.0) == 5


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(0.0078125, 1.0, width=32), min_size=1, max_size=40),
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(1, 64), st.floats(0.5, 4.0)), min_size=1, max_size=6),
    st.floats(0.0, 0.5),
)
def test_no_other_number_of_nodes_is_faster(
    survival: list[float], sequences: int, steps: list[tuple[int, float]], turn: float
) -> None:
    costs = costs_of(*steps)
    likeliest = -np.sort(-np.array(survival, np.float32))
    chosen = best_count(likeliest, sequences, sequences, costs, turn)

    def rate(nodes: int) -> float:
        gained = sequences + float(likeliest[:nodes].sum(dtype=np.float64))
        return gained / (seconds(costs, sequences + nodes)[0] + (turn if nodes else 0.0))

    best = max(rate(nodes) for nodes in range(len(survival) + 1))
    assert rate(chosen) == pytest.approx(best, rel=1e-6)


def test_nothing_is_drafted_where_rows_are_dear() -> None:
    dear = costs_of(*((rows, float(rows)) for rows in (1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32)))
    assert best_count(np.full(20, 0.9, np.float32), 4, 4, dear, 0.0) == 0
    cheap = costs_of((1, 1.0), (8, 1.05))
    assert best_count(np.full(7, 0.3, np.float32), 1, 1, cheap, 0.0) == 7


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.floats(0, 1, width=32), max_size=6), min_size=1, max_size=6), st.data())
def test_the_likeliest_nodes_are_kept(drafts: list[list[float]], data: st.DataObject) -> None:
    drafts = [sorted(draft, reverse=True) for draft in drafts]
    counts = np.array([len(draft) for draft in drafts], np.int32)
    total = data.draw(st.integers(0, int(counts.sum())))
    survival = np.full((len(drafts), 6), np.float32(0.5))
    for row, draft in enumerate(drafts):
        survival[row, : len(draft)] = draft
    kept = keep_likeliest(survival, counts, total)
    assert kept.sum() == total and (kept <= counts).all()
    ins = [value for draft, count in zip(drafts, kept) for value in draft[:count]]
    outs = [value for draft, count in zip(drafts, kept) for value in draft[count:]]
    assert not ins or not outs or min(ins) >= max(outs)
