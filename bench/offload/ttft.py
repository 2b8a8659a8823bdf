"""Parts "ttft" and "busy" of `bench.offload.suite`: one prompt at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from bench.gpu_timing import link_rate
from bench.offload.engines import BLOCK, Engines, Served, Settings, summary
from bench.shapes import Prompts

SUFFIXES = (0, 256, 1024)
"""Tokens behind the prefix; 0: the whole prompt is resent, and its last block is computed."""
COLD_RUNS = 3
_LAYERS = 32
_SLACK_MS = 3.0

# vLLM 0.22.1 with its offloading connector on one H200, Llama-3.1-8B shape, bf16, 67K-token GPU
# cache, prompt evicted first, then resent.
VLLM_CPU_HIT_MS = {4096: 19.1, 16384: 51.8, 32768: 96.0}
RESENT_GOAL_MS = {4096: 13.0, 16384: 44.0, 32768: 86.0}


def goal_ms(load: float, compute: float) -> float:
    """What overlapping layer by layer can reach, with 3 ms to spare: the longer of load and
    computation, and of the shorter one a layer's share."""
    return max(load, compute) + min(load, compute) / _LAYERS + _SLACK_MS


@contextmanager
def blocking(served: Served) -> Iterator[None]:
    """Requests run only when all their layers have landed."""
    served.loads.wait_whole = True
    try:
        yield
    finally:
        served.loads.wait_whole = False


def host_hit(served: Served, prompt: list[int], prefix: int) -> float:
    """Milliseconds to the first token of a prompt whose prefix only host memory holds."""
    before = served.counters()
    ms, found = served.first_token(prompt)
    rest = len(prompt) - prefix
    blocks = prefix // BLOCK - (not rest)  # of a resent prompt the last block is computed
    found.expect_host(blocks, blocks, served.block_bytes)
    served.wait_stored(before, rest // BLOCK)
    return ms


def on_device(off: Served, ids: Prompts, prefix: int, runs: int) -> dict[int, float]:
    """Suffix to milliseconds (median) with the prefix in the GPU's cache."""
    head = ids.one(prefix)
    _, found = off.first_token(head)
    found.expect_nothing()
    times: dict[int, float] = {}
    for suffix in SUFFIXES:
        seen = []
        for _ in range(1 + runs):
            ms, found = off.first_token(head + ids.one(suffix))
            found.expect_device(prefix if suffix else prefix - 1)
            seen.append(ms)
        times[suffix] = float(np.median(seen[1:]))
    return times


def recomputed(off: Served, ids: Prompts, length: int) -> float:
    """Median milliseconds of prompts that no cache has seen."""
    times = []
    for _ in range(COLD_RUNS):
        ms, found = off.first_token(ids.one(length))
        found.expect_nothing()
        times.append(ms)
    return float(np.median(times))


def hits(
    engines: Engines, head: list[int], ids: Prompts, suffix: int, runs: int
) -> dict[str, list[float]]:
    """Milliseconds of the three ways to load, taking turns; the first turn warms up."""
    lazy, not_lazy = engines.get("lazy"), engines.get("not lazy")
    times: dict[str, list[float]] = {"blocking": [], "not_lazy": [], "lazy": []}
    for _ in range(1 + runs):
        with blocking(lazy):
            times["blocking"].append(host_hit(lazy, head + ids.one(suffix), len(head)))
        times["not_lazy"].append(host_hit(not_lazy, head + ids.one(suffix), len(head)))
        times["lazy"].append(host_hit(lazy, head + ids.one(suffix), len(head)))
    return {arm: seen[1:] for arm, seen in times.items()}


def row_of(
    case: tuple[int, int], load: float, compute: float, cold: float, loaded: dict[str, list[float]]
) -> dict[str, Any]:
    """One line of the table: prefix and suffix in tokens, all times in milliseconds."""
    prefix, suffix = case
    median = {arm: float(np.median(times)) for arm, times in loaded.items()}
    return {
        "prefix": prefix,
        "suffix": suffix or "resent",
        "link": load,
        "C": compute,
        "recompute": cold,
        "blocking": median["blocking"],
        "not_lazy": median["not_lazy"],
        **summary(loaded["lazy"], "lazy"),
        "goal": goal_ms(load, compute) if suffix else RESENT_GOAL_MS.get(prefix, "-"),
        "bound": goal_ms(load, compute),
        "lazy/not_lazy": median["lazy"] / median["not_lazy"],
        "lazy/blocking": median["lazy"] / median["blocking"],
        "vllm": "-" if suffix else VLLM_CPU_HIT_MS.get(prefix, "-"),
    }


def ttft(engines: Engines, settings: Settings) -> dict[str, Any]:
    """All arms, by length of the prefix and of what follows it."""
    ids = settings.ids("ttft")
    off, lazy, not_lazy = (engines.get(name) for name in ("off", "lazy", "not lazy"))
    rate = link_rate()
    rows = []
    for prefix in settings.lengths:
        compute = on_device(off, ids, prefix, settings.runs)
        cold = {suffix: recomputed(off, ids, prefix + suffix) for suffix in SUFFIXES}
        head = ids.one(prefix)
        for served in (lazy, not_lazy):
            served.keep(head)
        load = prefix // BLOCK * lazy.block_bytes / rate * 1e3
        for suffix in SUFFIXES:
            loaded = hits(engines, head, ids, suffix, settings.runs)
            rows.append(row_of((prefix, suffix), load, compute[suffix], cold[suffix], loaded))
    return {"link_gb_per_s": rate / 1e9, "rows": rows}


@contextmanager
def busy_thread() -> Iterator[None]:
    """A Python thread that never gives the GIL away by itself."""
    over = False

    def spin() -> None:
        count = 0
        while not over:
            count += 1

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over = True
        thread.join()


def busy(engines: Engines, settings: Settings) -> dict[str, Any]:
    """A hit in host memory with and without a busy Python thread, beside a hit on the GPU, which
    shows what the thread costs an engine that copies nothing."""
    ids = settings.ids("busy")
    lazy, off = engines.get("lazy"), engines.get("off")
    length = settings.lengths[0]
    kept, cached = ids.one(length), ids.one(length)
    lazy.keep(kept)
    off.first_token(cached)

    def gpu_hit() -> float:
        ms, found = off.first_token(cached)
        found.expect_device(length - 1)
        return ms

    rows = []
    for name, measure in (("host", lambda: host_hit(lazy, kept, length)), ("GPU", gpu_hit)):
        measure()
        quiet, beside = [], []
        for _ in range(settings.runs):
            quiet.append(measure())
            with busy_thread():
                beside.append(measure())
        rows.append(
            {
                "hit": f"{length} tokens on the {name}",
                **summary(quiet, "quiet_ms"),
                **summary(beside, "busy_ms"),
                "more_ms": float(np.median(beside) - np.median(quiet)),
                "goal_more_ms": 1.0 if name == "host" else "-",
            }
        )
    return {"rows": rows}
