"""Sends the requests of a load when they are due, and measures whether the client keeps up."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hetero_llm.bench_client.client import Clock, RequestResult

Item = TypeVar("Item")

LAG_INTERVAL = 0.01
"""Seconds between two measurements of the event loop's delay."""

_MOST_LAG = 0.01
_MOST_CPU = 0.9


@dataclass(frozen=True, slots=True)
class Load:
    """Arrival of requests: `rate` per second (infinite: all at once), gaps gamma-distributed with
    shape `burstiness` (1: Poisson, less: burstier), at most `max_concurrency` at a time."""

    rate: float
    burstiness: float
    max_concurrency: int | None


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """Whether the client itself was the bottleneck. `lag_p99`, `lag_max`: delay of the event loop
    in seconds; `cpu`: share of one core that the client used."""

    lag_p99: float
    lag_max: float
    cpu: float


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Results in the order of the samples; `duration`: seconds from the first arrival to the end of
    the last answer."""

    results: list[RequestResult]
    duration: float
    health: ClientHealth


def arrival_times(count: int, load: Load, rng: random.Random) -> list[float]:
    """When each request is due, in seconds after the first."""
    if math.isinf(load.rate):
        return [0.0] * count
    scale = 1.0 / (load.rate * load.burstiness)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(load.burstiness, scale)
    return times


async def run_load(
    items: Sequence[Item],
    send: Callable[[Item, float], Awaitable[RequestResult]],
    *,
    arrivals: Sequence[float],
    max_concurrency: int | None,
    clock: Clock = time.perf_counter,
    finished: Callable[[RequestResult], None] = lambda result: None,
) -> LoadResult:
    """Runs one load.

    Args:
        items: what to send, in order of arrival.
        send: sends one item that is due at the given time, and returns its result.
        arrivals: result of `arrival_times`.
        clock: returns seconds; must run as fast as the event loop's clock.
        finished: called with each result.
    """
    limit = asyncio.Semaphore(max_concurrency or len(items) or 1)
    begin, cpu = clock(), time.process_time()

    async def one(item: Item, due: float) -> RequestResult:
        async with limit:
            result = await send(item, due)
        finished(result)
        return result

    lags: list[float] = []
    watch = asyncio.create_task(_watch(lags, clock))
    tasks: list[asyncio.Task[RequestResult]] = []
    try:
        for item, offset in zip(items, arrivals, strict=True):
            wait = begin + offset - clock()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(item, begin + offset)))
        results = list(await asyncio.gather(*tasks))
    finally:
        for task in (watch, *tasks):
            task.cancel()
        await asyncio.gather(watch, *tasks, return_exceptions=True)
    duration = clock() - begin
    health = _health(lags, (time.process_time() - cpu) / max(duration, 1e-9))
    return LoadResult(results, duration, health)


async def _watch(lags: list[float], clock: Clock) -> None:
    while True:
        asked = clock()
        await asyncio.sleep(LAG_INTERVAL)
        lags.append(max(clock() - asked - LAG_INTERVAL, 0.0))


def _health(lags: list[float], cpu: float) -> ClientHealth:
    if not lags:
        return ClientHealth(0.0, 0.0, cpu)
    ordered = sorted(lags)
    return ClientHealth(ordered[int(0.99 * (len(ordered) - 1))], ordered[-1], cpu)


def saturation_warning(health: ClientHealth) -> str | None:
    """A warning if the client may have limited the figures, else None."""
    if health.lag_p99 < _MOST_LAG and health.cpu < _MOST_CPU:
        return None
    return (
        f"the client did not keep up (its event loop was {health.lag_p99 * 1e3:.1f} ms late at "
        f"p99, with {health.cpu:.0%} of one core used): latencies include its own delays; give it "
        "more of the processor or less load"
    )
