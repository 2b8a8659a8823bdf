from __future__ import annotations

import pytest

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


def test_quantiles_lie_between_the_bounds_around_them() -> None:
    histogram = Histogram.empty((1, 2, 4))
    for value in (0.5, 0.5, 3, 3, 3, 3, 3, 3, 99, 99):
        histogram.observe(value)
    assert [histogram.quantile(share) for share in (0.1, 0.2, 0.5, 0.8)] == [0.5, 1, 3, 4]
    assert histogram.quantile(0.9) == histogram.quantile(1) == 4  # no bound is above it
    with pytest.raises(ValueError, match="without values"):
        Histogram.empty((1,)).quantile(0.5)
