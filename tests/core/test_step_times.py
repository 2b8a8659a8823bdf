"""Predicted step times: exact where something was measured, and within bounds on seeded traces of
what machines do: noise, outliers, a change of speed, growing contexts, sizes that never run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from hetero_llm.core.step_times import SIZES, StepTimes, extend_profile

PROFILE = ([1, 4, 8, 16, 64], [1.0, 1.1, 1.2, 1.5, 3.0])


def measured(*, padded: bool = False, added: float = 0.0) -> StepTimes:
    sizes, seconds = extend_profile(*PROFILE, [512])
    return StepTimes(sizes, seconds, padded=padded, added=added)


def truth(num_tokens: int) -> float:
    """Of a machine that computes 128 tokens in the time of reading the weights."""
    return 1.0 + max(num_tokens - 128, 0) / 128


# -- what is known exactly --------------------------------------------------------------------


def test_a_profile_is_interpolated() -> None:
    times = StepTimes([1, 4, 8], [1.0, 4.0, 6.0])
    assert [times.predict(size) for size in (1, 2, 6, 8, 100)] == [1.0, 2.0, 5.0, 6.0, 6.0]
    np.testing.assert_allclose(times.predict_range(0, 5), [1.0, 1.0, 2.0, 3.0, 4.0, 4.5])
    np.testing.assert_allclose(times.predict_range(7, 3), [5.5, 6.0, 6.0, 6.0])
    np.testing.assert_array_equal(times.table(), [1.0, 4.0, 6.0])


def test_a_padded_step_takes_as_long_as_the_next_larger_size() -> None:
    times = StepTimes([1, 4, 8], [1.0, 4.0, 6.0], padded=True)
    assert [times.predict(size) for size in (1, 2, 4, 5, 8, 9)] == [1.0, 4.0, 4.0, 6.0, 6.0, 6.0]


def test_a_profile_goes_on_in_a_straight_line() -> None:
    assert extend_profile([1, 4, 8], [1.0, 4.0, 6.0], [4, 8, 10, 12]) == (
        [1, 4, 8, 10, 12], [1.0, 4.0, 6.0, 7.0, 8.0],
    )  # fmt: skip
    assert extend_profile([4, 8], [3.0, 2.0], [9], 0.5) == ([4, 8, 9], [3.0, 2.0, 3.0])
    assert extend_profile([2], [1.0], [4]) == ([2, 4], [1.0, 1.0])


def test_without_a_profile_nothing_is_known_before_the_first_step() -> None:
    times = StepTimes()
    assert times.predict(5) == 0.0 and not times.table().any()
    times.observe(5, 2.0)
    assert times.predict(5) == 2.0 and times.predict(0) == 0.0
    assert times.predict(10) == 4.0, "in proportion"
    assert times.predict(1) == pytest.approx(0.4), "in proportion"


def test_without_a_profile_steps_are_interpolated_between_those_that_ran() -> None:
    times = StepTimes()
    for size in (40, 200, 1000):
        times.observe(size, truth(size))
    assert times.predict(200) == truth(200) and times.predict(600) == pytest.approx(truth(600))
    assert times.predict(40) == truth(40)
    assert times.predict(2000) == pytest.approx(2 * truth(1000)), "in proportion at most"
    slope = (truth(200) - truth(40)) / 160
    assert times.predict(10) == pytest.approx(truth(40) - 30 * slope), "on a line"
    assert len(times.table()) == len(SIZES) and (np.diff(times.table()) > 0).all()


def test_context_is_a_share_of_a_steps_time() -> None:
    times = StepTimes(per_context=0.001)
    times.observe(8, 3.0, 2000)
    assert times.predict(8) == pytest.approx(1.0)
    assert times.predict(8, 500) == pytest.approx(1.5)


def test_larger_steps_than_the_largest_size_are_not_observed() -> None:
    times = measured()
    times.observe(513, 1e-9)
    times.observe(0, 1e9)
    np.testing.assert_array_equal(times.table(), measured().table())


# -- outliers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [measured, StepTimes], ids=["measured", "not measured"])
def test_one_strange_step_changes_nothing_and_two_in_a_row_do(
    make: Callable[[], StepTimes],
) -> None:
    times = make()
    for _ in range(30):
        times.observe(8, 1.2)
    before = times.predict(8)
    times.observe(8, 120.0)
    assert times.predict(8) == before
    times.observe(8, 1.2)
    times.observe(8, 12.0)
    times.observe(8, 12.0)
    assert before < times.predict(8) < 2 * before
    for _ in range(100):
        times.observe(8, 12.0)
    assert times.predict(8) == pytest.approx(12.0, rel=0.1), "the machine is another one"


def test_a_first_step_that_was_an_outlier_is_forgotten_at_the_second() -> None:
    times = StepTimes()
    times.observe(8, 40.0)
    times.observe(8, 1.0)
    assert times.predict(8) == pytest.approx(1.0)


# -- traces -----------------------------------------------------------------------------------


def noise(
    seed: int, count: int, sigma: float = 0.05
) -> Iterator[tuple[np.random.Generator, float]]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield rng, float(np.exp(rng.normal(0.0, sigma)))


def error(times: StepTimes, true: Callable[[int], float], *sizes: int) -> float:
    """Mean relative error."""
    return float(np.mean([abs(times.predict(size) / true(size) - 1.0) for size in sizes]))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("outliers", [0.0, 0.02])
def test_noise_and_outliers_average_out(seed: int, outliers: float) -> None:
    times, fresh = measured(), StepTimes()
    for rng, factor in noise(seed, 400):
        factor *= 10.0 if rng.random() < outliers else 1.0
        size = int(rng.integers(1, 65))
        times.observe(size, measured().predict(size) * factor)
        size = int(rng.integers(1, 1000))
        fresh.observe(size, truth(size) * factor)
    assert error(times, measured().predict, 1, 6, 12, 40, 64, 300) < 0.025
    assert error(fresh, truth, 64, 100, 300, 500, 900) < 0.06


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_change_of_speed_at_few_sizes_is_one_at_all(factor: float) -> None:
    times, fresh = measured(), StepTimes()
    for size in (16, 64, 256, 1000):
        fresh.observe(size, truth(size))
    for rng, by in noise(1, 60, 0.03):
        size = int(rng.choice([4, 8]))
        times.observe(size, factor * measured().predict(size) * by)
        fresh.observe(16, factor * truth(16) * by)
    assert error(times, lambda size: factor * measured().predict(size), 1, 4, 8, 16, 64) < 0.04
    assert error(fresh, lambda size: factor * truth(size), 16) < 0.04
    tried = fresh.predict(1000) / truth(1000)
    assert min(1.0, factor) < tried < max(1.0, factor), "other sizes follow in part"


def test_contexts_that_nobody_told_lengthen_all_sizes_alike() -> None:
    """As much as the largest size takes without any, slowly: from 128 tokens to 32K."""
    times, errors = measured(padded=True, added=0.75), []
    short = measured(padded=True).predict
    for step, (rng, factor) in enumerate(noise(2, 1500, 0.03)):
        extra = 3.0 * 256 ** (step / 1500) / 256
        size = int(rng.choice([1, 4, 8, 16]))
        times.observe(size, (short(size) + extra) * factor)
        if step > 50 and not step % 10:
            sizes = (1, 8, 16, 64)
            found = np.array([times.predict(size) for size in sizes])
            true = np.array([short(size) for size in sizes]) + extra
            errors.append(float(np.abs(found / true - 1.0).mean()))
    assert extra == pytest.approx(3.0, rel=0.01) and np.mean(errors) < 0.05


def test_a_size_that_differs_from_its_profile_is_told_apart_and_tried_again() -> None:
    times = measured()
    for _ in range(200):
        times.observe(8, 1.2)
        times.observe(64, 4.5)
    assert times.predict(64) == pytest.approx(4.5, rel=0.05)
    assert times.predict(8) == pytest.approx(1.2, rel=0.05)
    for _ in range(1000):
        times.observe(8, 1.2)
    assert times.predict(64) == pytest.approx(3.0, rel=0.05)
