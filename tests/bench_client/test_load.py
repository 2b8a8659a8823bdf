from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence

import pytest

from hetero_llm.bench_client.client import RequestResult
from hetero_llm.bench_client.load import (
    ClientHealth,
    Load,
    LoadResult,
    arrival_times,
    run_load,
    saturation_warning,
)
from tests.bench_client.virtual_time import run_virtually


def gaps(rate: float, burstiness: float, count: int = 20_000) -> list[float]:
    times = arrival_times(count, Load(rate, burstiness, None), random.Random(5))
    assert times[0] == 0.0
    return [b - a for a, b in zip(times, times[1:])]


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_gaps_are_gamma_distributed(burstiness: float) -> None:
    found = gaps(8.0, burstiness)
    mean = sum(found) / len(found)
    variance = sum((gap - mean) ** 2 for gap in found) / len(found)
    # The standard errors here are about 1% of the mean, 3% of the variance.
    assert mean == pytest.approx(1 / 8, rel=0.05)
    assert variance == pytest.approx(mean**2 / burstiness, rel=0.15)


def test_poisson_arrivals_have_no_memory() -> None:
    """As many gaps are longer than t as the exponential distribution says."""
    found = gaps(2.0, 1.0)
    for t in (0.1, 0.5, 1.0, 2.0):
        share = sum(gap > t for gap in found) / len(found)
        assert share == pytest.approx(math.exp(-2 * t), abs=0.015)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(4, Load(math.inf, 1.0, None), random.Random(0)) == [0.0] * 4


def test_arrivals_repeat_with_the_seed() -> None:
    first, second, other = (
        arrival_times(5, Load(1.0, 1.0, None), random.Random(seed)) for seed in (1, 1, 2)
    )
    assert first == second != other


def virtually(
    durations: Sequence[float], arrivals: Sequence[float], max_concurrency: int | None
) -> LoadResult:
    """A load of requests that take so many virtual seconds."""

    async def main() -> LoadResult:
        loop = asyncio.get_running_loop()

        async def send(duration: float, arrival: float) -> RequestResult:
            start = loop.time()
            await asyncio.sleep(duration)
            end = loop.time()
            return RequestResult(arrival, start, end, end, (), "", 0, None, "stop", None)

        return await run_load(
            durations, send, arrivals=arrivals, max_concurrency=max_concurrency, clock=loop.time
        )

    return run_virtually(main())


def test_requests_are_sent_when_they_are_due() -> None:
    done = virtually([5.0, 1.0, 1.0], [0.0, 0.5, 4.0], None)
    assert [r.start for r in done.results] == pytest.approx([0.0, 0.5, 4.0], abs=1e-6)
    assert [r.arrival for r in done.results] == pytest.approx([0.0, 0.5, 4.0], abs=1e-6)
    assert done.duration == pytest.approx(5.0, abs=1e-6)


def test_a_closed_loop_keeps_so_many_busy() -> None:
    done = virtually([1.0, 3.0, 1.0, 1.0, 1.0], [0.0] * 5, 2)
    assert [r.start for r in done.results] == pytest.approx([0.0, 0.0, 1.0, 2.0, 3.0], abs=1e-6)
    assert [r.arrival for r in done.results] == [0.0] * 5
    assert done.duration == pytest.approx(4.0, abs=1e-6)


def test_an_idle_client_is_not_late() -> None:
    health = virtually([1.0], [0.0], None).health
    assert health.lag_p99 == pytest.approx(0.0, abs=1e-9)


def test_a_busy_loop_is_noticed() -> None:
    """Work that blocks the loop shows as lag of its own length."""

    async def main() -> LoadResult:
        loop = asyncio.get_running_loop()
        now = [0.0]

        def clock() -> float:
            return loop.time() + now[0]

        async def send(item: int, arrival: float) -> RequestResult:
            for _ in range(50):
                await asyncio.sleep(0.02)
                now[0] += 0.5  # nothing else could run meanwhile
            return RequestResult(arrival, 0.0, 1.0, 1.0, (), "", 0, None, "stop", None)

        return await run_load([1], send, arrivals=[0.0], max_concurrency=None, clock=clock)

    health = run_virtually(main()).health
    assert health.lag_max == pytest.approx(0.5, abs=1e-6)
    warning = saturation_warning(health)
    assert warning is not None and "500.0 ms late" in warning


@pytest.mark.parametrize(
    ("lag", "cpu", "warns"),
    [(0.001, 0.2, False), (0.02, 0.2, True), (0.001, 0.95, True), (0.0, 0.0, False)],
)
def test_saturation(lag: float, cpu: float, warns: bool) -> None:
    assert (saturation_warning(ClientHealth(lag, lag, cpu)) is not None) == warns


def test_results_keep_the_order_of_the_samples() -> None:
    done = virtually([3.0, 2.0, 1.0], [0.0] * 3, None)
    assert [r.last for r in done.results] == pytest.approx([3.0, 2.0, 1.0], abs=1e-6)


def test_an_exception_ends_the_load_and_its_requests() -> None:
    cancelled = []

    async def main() -> None:
        async def send(item: int, arrival: float) -> RequestResult:
            try:
                await asyncio.sleep(item)
            except asyncio.CancelledError:
                cancelled.append(item)
                raise
            raise ValueError("a bug")

        loop = asyncio.get_running_loop()
        await run_load([1, 9], send, arrivals=[0, 0], max_concurrency=None, clock=loop.time)

    with pytest.raises(ValueError, match="a bug"):
        run_virtually(main())
    assert cancelled == [9]
