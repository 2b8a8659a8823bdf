from __future__ import annotations

import random
import statistics
from dataclasses import replace

import numpy as np
import pytest

from hetero_llm.bench_client.client import RequestResult
from hetero_llm.bench_client.metrics import (
    Counted,
    confidence,
    count_request,
    percentile,
    spread,
    summarise,
)
from hetero_llm.bench_client.wire_format import Usage

DONE = RequestResult(
    arrival=0.0,
    start=1.0,
    first=1.5,
    last=3.5,
    itls=(0.5, 1.5),
    text="a b c",
    num_ids=0,
    usage=Usage(10, 5),
    finish_reason="length",
    error=None,
)
FAILED = replace(DONE, error="HTTP 503: full", usage=None)


@pytest.mark.parametrize(
    ("result", "retokenized", "counted"),
    [
        (DONE, 3, Counted(10, 5, "usage")),
        (replace(DONE, usage=None, num_ids=4), 3, Counted(8, 4, "ids")),
        (replace(DONE, usage=None), 3, Counted(8, 3, "retokenized")),
        (replace(DONE, usage=None), 0, Counted(8, 0, "retokenized")),
        (replace(DONE, usage=None), None, Counted(8, None, "unknown")),
    ],
)
def test_where_counts_come_from(
    result: RequestResult, retokenized: int | None, counted: Counted
) -> None:
    assert count_request(result, prompt_tokens=8, retokenized=retokenized) == counted


def test_figures_of_a_load() -> None:
    one_token = replace(DONE, first=2.0, last=2.0, itls=(), usage=Usage(2, 1))
    results = [DONE, FAILED, one_token, replace(FAILED, error="broke")]
    counts = [
        Counted(10, 5, "usage"),
        Counted(99, 99, "usage"),
        Counted(2, 1, "usage"),
        Counted(None, None, "unknown"),
    ]
    metrics = summarise(results, counts, duration=4.0, retokenized=7, percentiles=(50.0, 99.0))
    assert (metrics.completed, metrics.failed) == (2, 2)
    assert (metrics.total_input, metrics.total_output, metrics.retokenized) == (12, 6, 7)
    assert metrics.request_throughput == 0.5
    assert metrics.input_throughput == 3.0
    assert metrics.output_throughput == 1.5
    assert metrics.total_throughput == 4.5
    assert metrics.sources == {"usage": 2}
    assert metrics.errors == {"HTTP 503: full": 1, "broke": 1}
    assert metrics.latencies["ttft"].mean == 750.0  # 500 and 1000 ms
    assert metrics.latencies["e2el"].median == 1750.0  # 2500 and 1000 ms
    assert metrics.latencies["tpot"].mean == 500.0  # 2 s for four tokens; one token has none
    assert metrics.latencies["itl"].mean == 1000.0
    assert metrics.latencies["itl"].percentiles == {50.0: 1000.0, 99.0: 1490.0}


def test_goodput_counts_answers_within_all_limits() -> None:
    one_token = replace(DONE, first=2.0, last=2.0, itls=(), usage=Usage(2, 1))
    results = [DONE, FAILED, one_token]  # ttft 500 and 1000 ms, tpot 500 and none, e2el 2500, 1000
    counts = [Counted(10, 5, "usage"), Counted(9, 9, "usage"), Counted(2, 1, "usage")]

    def good(**limits: float) -> tuple[int | None, float | None]:
        found = summarise(results, counts, duration=2.0, retokenized=None, goodput=limits)
        return found.good, found.goodput

    assert good() == (None, None)
    assert good(ttft=1000.0) == (2, 1.0)
    assert good(ttft=999.0) == (1, 0.5)
    assert good(tpot=400.0) == (1, 0.5)
    assert good(ttft=999.0, e2el=2000.0) == (0, 0.0)


def test_nothing_came_back() -> None:
    metrics = summarise([FAILED], [Counted(1, 1, "usage")], duration=1.0, retokenized=None)
    assert (metrics.completed, metrics.failed, metrics.total_input) == (0, 1, 0)
    for found in metrics.latencies.values():
        assert (found.mean, found.median, found.std, found.percentiles) == (
            None,
            None,
            None,
            {99.0: None},
        )


def test_answers_that_nobody_counted() -> None:
    metrics = summarise([DONE], [Counted(8, None, "unknown")], duration=1.0, retokenized=None)
    assert (metrics.uncounted, metrics.total_output) == (1, 0)
    assert metrics.latencies["tpot"].mean is None
    assert metrics.latencies["ttft"].mean == 500.0


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_spread_is_numpys(count: int) -> None:
    rng = random.Random(count)
    values = [rng.expovariate(1.0) for _ in range(count)]
    found = spread(values, (0.0, 12.5, 99.0, 100.0))
    assert found.mean == pytest.approx(np.mean(values))
    assert found.median == pytest.approx(np.median(values))
    assert found.std == pytest.approx(np.std(values))
    for wanted, value in found.percentiles.items():
        assert value == pytest.approx(np.percentile(values, wanted))


def test_percentile_of_one() -> None:
    assert percentile([3.0], 99.0) == 3.0


def test_confidence_of_three_runs() -> None:
    # t with two degrees of freedom is 4.303; the sample's deviation is 1.
    assert confidence([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5)
    assert confidence([5.0, 5.0, 5.0]) == 0.0


def test_confidence_intervals_hold_the_mean_as_often_as_they_say() -> None:
    rng = random.Random(3)
    hits = 0
    for _ in range(4000):
        values = [rng.gauss(10.0, 2.0) for _ in range(5)]
        hits += abs(statistics.fmean(values) - 10.0) <= confidence(values)
    assert hits / 4000 == pytest.approx(0.95, abs=0.015)
