"""Readings of the server's figures for the status page: the one of now, and those of the last five
minutes, so that a page that has just been opened has something to draw."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass

from hetero_llm.core.histogram import Histogram
from hetero_llm.engine.engine_client import EngineClient
from hetero_llm.server.machine import Machine, MachineUse
from hetero_llm.server.metrics import Metrics

INTERVAL = 2.0
"""Seconds between two readings that are kept."""
KEPT = 150
"""Readings that are kept: five minutes of them."""
_WINDOW = 30
"""Readings over which percentiles are computed: one minute of them."""
_COUNTERS = {
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "requests_finished": "num_requests_finished",
    "preemptions": "num_preemptions",
    "steps": "num_steps",
    "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits",
    "drafts": "spec_decode_num_drafts",
    "draft_tokens": "spec_decode_num_draft_tokens",
    "accepted_tokens": "spec_decode_num_accepted_tokens",
}
"""Names in status.json, and the engine's."""
_LATENCIES = {
    "first_token": "time_to_first_token_seconds",
    "between_tokens": "inter_token_latency_seconds",
}
"""Names in status.json, and those of `Metrics.latencies`."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of the values of the last minute, in seconds."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Now:
    """The engine's load as of its last heartbeat.

    Attributes:
        queue: requests accepted and not finished.
        kv_usage: used part of the KV cache, 0 to 1.
        host_kv_usage: the same of host memory behind the prefix cache; None without any.
        last_step_age: seconds since the engine last showed life; JSON has null for infinity.
    """

    running: float
    waiting: float
    queue: int
    kv_usage: float
    host_kv_usage: float | None
    last_step_age: float


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading. `uptime` is in seconds; counters count since the engine's start; a latency
    without values in the last minute is None."""

    uptime: float
    counters: dict[str, float]
    now: Now
    latency: dict[str, Percentiles | None]
    machine: MachineUse


class Readings:
    """Takes readings. `run` alone writes the history; everyone may `read`."""

    def __init__(self, client: EngineClient, metrics: Metrics) -> None:
        self._client = client
        self._histograms = {name: metrics.latencies[of] for name, of in _LATENCIES.items()}
        self._machine = Machine(client.info.device)
        self._begun = time.monotonic()
        self._history: deque[Reading] = deque(maxlen=KEPT)
        # Of each histogram at the last readings: what it had counted by then.
        self._counted: deque[dict[str, list[int]]] = deque(maxlen=_WINDOW)

    async def read(self) -> Reading:
        """The figures now."""
        machine = await asyncio.to_thread(self._machine.read)
        stats = self._client.stats()
        figures = stats.metrics
        host_blocks = figures.get("kv_offload_host_slots", 0.0)
        return Reading(
            uptime=time.monotonic() - self._begun,
            counters={name: figures.get(theirs, 0) for name, theirs in _COUNTERS.items()},
            now=Now(
                running=figures.get("num_requests_running", 0),
                waiting=figures.get("num_requests_waiting", 0),
                queue=stats.queue,
                kv_usage=figures.get("kv_cache_usage_perc", 0.0),
                host_kv_usage=(
                    figures.get("kv_offload_host_slots_used", 0.0) / host_blocks
                    if host_blocks
                    else None
                ),
                last_step_age=stats.last_step_age,
            ),
            latency={name: self._percentiles(name) for name in self._histograms},
            machine=machine,
        )

    def since(self, uptime: float) -> list[Reading]:
        """The readings of the last five minutes that are later than `uptime`, in order."""
        return [reading for reading in self._history if reading.uptime > uptime]

    async def take(self) -> None:
        """Adds a reading to the history; only `run` calls it, and tests."""
        self._history.append(await self.read())
        self._counted.append({name: [*one.counts] for name, one in self._histograms.items()})

    async def run(self) -> None:
        """Takes a reading every `INTERVAL` seconds until it is cancelled."""
        while True:
            await self.take()
            await asyncio.sleep(INTERVAL)

    def _percentiles(self, name: str) -> Percentiles | None:
        """Of the values since the oldest count that is kept, or since the start."""
        histogram = self._histograms[name]
        counts = histogram.counts
        if len(self._counted) == _WINDOW:
            before = self._counted[0][name]
            counts = [new - old for new, old in zip(counts, before, strict=True)]
        recent = Histogram(histogram.bounds, counts)
        if recent.count == 0:
            return None
        return Percentiles(*(recent.quantile(share) for share in (0.5, 0.95, 0.99)))
