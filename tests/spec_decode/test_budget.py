"""How many nodes to verify: against every possible choice, and what is learned of steps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.core.step_times import StepTimes
from hetero_llm.spec_decode import budget
from hetero_llm.spec_decode.budget import MEMORY, MOST_ROWS, verify_times

CHANCES = st.floats(0.0078125, 1.0, width=32)


def times_of(*steps: tuple[int, float]) -> StepTimes:
    times = verify_times()
    for tokens, seconds in steps:
        times.observe(tokens, seconds)
    return times


def seconds(times: StepTimes, *sizes: int) -> list[float]:
    return [times.predict(size) for size in sizes]


def choose(
    times: StepTimes,
    drafts: list[list[float]],
    num_rows: int,
    idle: float = 0.0,
    *,
    most_rows: int = MOST_ROWS,
) -> list[int]:
    return verdict(times, drafts, num_rows, idle, most_rows=most_rows)[0]


def verdict(
    times: StepTimes,
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
        survival, counts, scales, times.table(), times.sizes, num_rows, idle, plain_idle,
        most_rows, kept,
    )  # fmt: skip
    return kept.tolist(), gain


def test_without_a_profile_steps_are_interpolated_between_those_that_ran() -> None:
    times = times_of((1, 1.0), (8, 1.7), (16, 1.8), (64, 3.0))
    assert seconds(times, 1, 8, 16, 64) == pytest.approx([1.0, 1.7, 1.8, 3.0])
    assert seconds(times, 4)[0] == pytest.approx(1.3)
    assert seconds(times, 9) == seconds(times, 16), "as large as the graph that holds it"
    assert 3.0 < seconds(times, 65)[0] < 3.5, "cheap, so that it is tried"
    assert seconds(times_of((8, 2.0)), 1) == [2.0]
    np.testing.assert_allclose(times.table(), seconds(times, *times.sizes.tolist()))
    assert not verify_times().table().any()


def test_times_of_sizes_that_do_not_run_are_forgotten() -> None:
    times = times_of((1, 1.0), (4, 9.0))
    for _ in range(MEMORY - 1):
        times.observe(1, 1.0)
    assert seconds(times, 4) == [9.0]
    times.observe(1, 1.0)
    assert seconds(times, 4)[0] < 1.1, "cheap, so that it is tried"
    times.observe(4, 40.0)
    assert seconds(times, 1, 4) == [1.0, 40.0], "the machine is another one"


def test_a_profile_holds_until_steps_tell_otherwise() -> None:
    times = verify_times([(1, 1.0), (8, 1.2), (64, 2.0)])
    assert seconds(times, 1, 2, 8, 9, 64) == [1.0, 1.2, 1.2, 2.0, 2.0]
    assert 2.0 < seconds(times, 65)[0] < 2.3
    for _ in range(8):
        times.observe(5, 2.4)
    longer = np.array(seconds(times, 1, 8, 64)) - [1.0, 1.2, 2.0]
    assert longer == pytest.approx([1.2, 1.2, 1.2], rel=0.35), "contexts lengthen all sizes"
    for _ in range(100):
        times.observe(8, 2.5)
        times.observe(64, 6.0)
    assert seconds(times, 8, 64) == pytest.approx([2.5, 6.0], rel=0.1)
    for _ in range(1000):
        times.observe(8, 2.5)
    assert seconds(times, 8) == pytest.approx([2.5], rel=0.01)
    assert seconds(times, 64)[0] < 4.0, "what was dear once is tried anew"


def test_an_array_of_times_stays_while_steps_are_observed() -> None:
    """Compiled code may still read it."""
    times = verify_times([(1, 1.0), (8, 1.2)])
    table = times.table()
    before = table.copy()
    times.observe(8, 2.0)
    np.testing.assert_array_equal(table, before)
    assert times.table()[1] > before[1]


def test_nodes_fill_what_steps_are_padded_to() -> None:
    times = verify_times([(1, 1.0), (8, 1.1), (16, 3.0)])
    assert choose(times, [[0.9] + [0.01] * 20], 1) == [7]
    assert choose(times, [[0.01] * 20], 1) == [0]


def test_no_step_becomes_larger_than_asked() -> None:
    drafts = [[0.9] * 20] * 3
    for times in (verify_times(), times_of((3, 1.0), (63, 1.01))):
        for most, expected in ((63, 60), (20, 17), (4, 1), (3, 0), (2, 0)):
            assert sum(choose(times, drafts, 3, most_rows=most)) == expected


def test_before_anything_is_known_all_nodes_are_kept() -> None:
    assert choose(verify_times(), [[0.1] * 5, [], [0.9] * 63], 3) == [5, 0, 63]


def test_nothing_is_drafted_where_rows_are_dear() -> None:
    dear = times_of(*((rows, float(rows)) for rows in (1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32)))
    assert choose(dear, [[0.9] * 5] * 4, 4) == [0, 0, 0, 0]
    cheap = times_of((1, 1.0), (8, 1.05))
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
    times = times_of(*steps)
    num_rows = len(drafts) + others

    def rate(kept: tuple[int, ...]) -> float:
        gained = len(drafts) + sum(sum(d[:n]) for d, n in zip(drafts, kept))
        nodes = sum(kept)
        return gained / (seconds(times, num_rows + nodes)[0] + turn)

    chosen = tuple(choose(times, drafts, num_rows, turn))
    best = max(map(rate, itertools.product(*(range(len(draft) + 1) for draft in drafts))))
    assert rate(chosen) == pytest.approx(best, rel=1e-5)


def test_estimates_are_scaled_and_made_to_fall() -> None:
    survival, kept = np.zeros((2, 63), np.float32), np.zeros(2, np.int32)
    survival[0, :3] = [0.8, 0.9, 0.2]
    survival[1, :2] = [0.9, 0.5]
    counts, trust = np.array([3, 2], np.int32), np.array([0.5, 4.0], np.float32)
    times = times_of((2, 1.0), (4, 1.01), (7, 9.0))
    table = times.table()
    budget.choose(survival, counts, trust, table, times.sizes, 2, 0.0, 0.0, MOST_ROWS, kept)
    np.testing.assert_allclose(survival[0, :3], [2 / 3, 2 / 3, 1 / 9], rtol=1e-6)
    np.testing.assert_allclose(survival[1, :2], [36 / 37, 4 / 5], rtol=1e-6)
    assert kept.tolist() == [0, 2]


def test_drafts_must_pay_for_the_device_that_idles() -> None:
    times = times_of((4, 1.0), (8, 1.1), (16, 5.0))
    drafts = [[0.6] * 1] * 4
    kept, gain = verdict(times, drafts, 4, 0.1)
    assert kept == [1] * 4 and gain == pytest.approx(1.6 / 1.2 - 0.4 * 0.2)
    kept, gain = verdict(times, drafts, 4, 0.7)
    assert kept == [1] * 4, "best for a device that has idled"
    assert gain == pytest.approx(1.6 / 1.8 - 0.4 * 0.8), "but it should not have"
    slowdown = 1.8 / 1.7
    expected = 1.6 / slowdown - 0.4 * (slowdown - 1)
    assert verdict(times, drafts, 4, 0.7, 0.7)[1] == pytest.approx(expected)
    assert verdict(times, [[0.01]] * 4, 4, 0.25) == ([0] * 4, pytest.approx(0.8))


def test_the_likeliest_of_many_nodes_are_kept() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 20, 64)
    drafts = [np.sort(rng.random(size).astype(np.float32) ** 3)[::-1] for size in sizes]
    in_order = np.sort(np.concatenate(drafts))[::-1]
    assert len(in_order) > 500
    for most in (1, 37, 400):
        kept = choose(verify_times(), [draft.tolist() for draft in drafts], 64, most_rows=64 + most)
        assert kept == [int((draft >= in_order[most - 1]).sum()) for draft in drafts]


def test_one_sequences_drafts_do_not_pay_for_the_time_of_all_others() -> None:
    """A step of 8 that takes a tenth longer, idle time included: 1.2 tokens a sequence are worth it
    if all have drafts. 1.12 are a gain in tokens a second and no reason to delay the others; alone
    the sequence may draft for less."""
    times = times_of((1, 1.0), (2, 1.1), (8, 1.0), (16, 1.1))
    assert verdict(times, [[0.2]] * 8, 8)[1] == pytest.approx(1.2 / 1.1 - 0.8 * 0.1)
    kept, gain = verdict(times, [[0.96], *[[]] * 7], 8)
    assert kept == [1, *[0] * 7] and gain == pytest.approx(1.12 / 1.1 - 0.88 * 0.1)
    assert gain < 1.0
    assert verdict(times, [[0.12]], 1)[1] == pytest.approx(1.12 / 1.1)


def test_drafts_that_all_accept_delay_none_however_long_the_step_takes() -> None:
    times = times_of((1, 1.0), (4, 1.0), (16, 2.6))
    kept, gain = verdict(times, [[0.99, 0.98, 0.97]] * 4, 4)
    assert kept == [3] * 4 and gain > 3.9 / 2.6 - 0.02
