"""What steps of the draft model are expected to take."""

from __future__ import annotations

import numpy as np
import pytest

from hetero_llm.cpu.draft_worker.step_times import SIZES, DraftStepTimes, measure
from hetero_llm.demo_models import demo_folder
from tests.spec_decode.draft_model.local_worker import Setting, load_model


def test_straight_lines_between_and_beyond_what_was_measured() -> None:
    times = DraftStepTimes([1, 4, 8], [1.0, 4.0, 6.0], 12)
    expected = [1.0, 1.0, 2.0, 3.0, 4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5, 8.0]
    np.testing.assert_allclose(times.beside(0, 12), expected)
    assert [times.of(rows) for rows in (1, 6, 12)] == [1.0, 5.0, 8.0]


def test_larger_steps_are_never_cheaper() -> None:
    times = DraftStepTimes([1, 2, 4, 8], [1.0, 3.0, 2.0, 2.5], 10)
    assert (np.diff(times.beside(0, 10)) >= 0).all() and times.of(4) == 3.0


def test_beside_rows_that_run_anyway() -> None:
    times = DraftStepTimes([1, 4], [1.0, 4.0], 8)
    np.testing.assert_allclose(times.beside(3, 4), [3.0, 4.0, 5.0, 6.0, 7.0])
    np.testing.assert_allclose(times.beside(6, 4), [6.0, 7.0, 8.0, 8.0, 8.0])  # its end
    np.testing.assert_allclose(times.beside(100, 2), [8.0, 8.0, 8.0])
    assert times.of(100) == 8.0


def test_one_measurement() -> None:
    np.testing.assert_allclose(DraftStepTimes([1], [2.0], 3).beside(0, 3), 2.0)


def test_steps_correct_it() -> None:
    times = DraftStepTimes([1, 2], [1.0, 2.0], 4)
    for _ in range(200):
        times.observe(2, 3.0)
    assert times.of(1) == pytest.approx(1.5, rel=0.01)
    assert times.of(4) == pytest.approx(6.0, rel=0.01)
    before = times.of(2)
    times.observe(2, 1e6)  # somebody else had the core
    times.observe(100, 1e-9)  # of a size that is not known
    assert times.of(2) == before


@pytest.mark.parametrize(("slots", "longest"), [(1, 64), (3, 40), (64, 64), (2, 5), (1, 1)])
def test_a_model_is_measured_and_left_without_texts(slots: int, longest: int) -> None:
    setting = Setting(slots=slots, max_model_len=longest, window=32)
    model = load_model(demo_folder("demo-draft"), setting)
    times = measure(model, slots, 20)
    found = times.beside(0, SIZES[-1])
    assert (found > 0).all() and (np.diff(found) >= 0).all()
    assert not len(model.kv_layout.plan_prefix(512).slots)
    assert all(model.kv_layout.room(slot) == longest for slot in range(slots))
