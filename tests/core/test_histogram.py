from __future__ import annotations

from hetero_llm.core.histogram import Histogram


def test_values_belong_to_the_first_bound_that_is_not_below_them() -> None:
    histogram = Histogram.empty((1, 2, 5))
    for value in (0, 1, 1.5, 2, 5, 5.1, 99):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1, 2]
    assert histogram.count == 7 and histogram.total == 0 + 1 + 1.5 + 2 + 5 + 5.1 + 99


def test_two_count_apart() -> None:
    one, two = Histogram.empty((1,)), Histogram.empty((1,))
    one.observe(0)
    assert two.counts == [0, 0]
