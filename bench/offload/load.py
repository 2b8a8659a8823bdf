"""Parts "shared", "behind", "decode", "stores" of `bench.offload.suite`: concurrent requests."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from bench.common import median_ratio
from bench.generation import greedy, seconds
from bench.offload.engines import (
    BLOCK,
    Engines,
    Served,
    Settings,
    WrongTier,
    plain_intervals,
    summary,
    token_seconds,
)
from bench.shapes import Prompts
from hetero_llm.core.request import Request

TAIL = 8
"""Tokens behind a prefix in host memory: less than a block, so nothing new is stored."""
SHARERS, SHARED = 50, 10240
SMALL, LARGE = 1024, 65536
BEHIND = 0.005  # seconds from the large load's arrival to the small one's
ROWS, LOADED = 32, 16384
_ROW_PROMPT = 128
_STEPS, _TURNS = 100, 5  # plain steps of a turn; turns without and with loads
CLOSED = (64, 1024, 128)  # requests, tokens in, tokens out
_LEAST_STORED = 0.9


def shared(engines: Engines, settings: Settings) -> dict[str, Any]:
    """50 requests at once on a prefix in host memory, against one: one transfer serves all."""
    ids, served = settings.ids("shared"), engines.get("lazy")
    head = ids.one(SHARED)
    served.keep(head)
    alone, together = [], []
    for _ in range(1 + settings.runs):
        alone += _first_tokens(served, head, ids, 1)
        together.append(_first_tokens(served, head, ids, SHARERS))
    one = summary([s * 1e3 for s in alone[1:]], "one_ms")
    all_ms = [s * 1e3 for group in together[1:] for s in group]
    many = summary(all_ms, "all_ms")
    return {
        "rows": [
            {
                "requests": SHARERS,
                "prefix": SHARED,
                "transfers": 1,  # else `_first_tokens` has raised
                **one,
                **many,
                "p99/one": many["all_ms_p99"] / one["one_ms_p50"],
                "goal": 1.3,
            }
        ]
    }


def _first_tokens(served: Served, head: list[int], ids: Prompts, count: int) -> list[float]:
    """Seconds to the first token of each of `count` requests that come at once.

    Raises:
        WrongTier: the prefix was not copied exactly once.
    """
    requests = [served.request(head + ids.one(TAIL), 1) for _ in range(count)]
    before, begin = served.counters(), time.monotonic()
    for request in requests:
        served.engine.add_request(request)
    served.run_until(lambda: not served.engine.has_unfinished)
    found, blocks = served.since(before), len(head) // BLOCK
    if found.h2d != blocks * served.block_bytes or found.failed:
        raise WrongTier(f"{count} requests on {blocks} blocks: wanted one transfer, got {found}")
    served.wait_idle()
    return [token_seconds(request, begin) for request in requests]


def behind(engines: Engines, settings: Settings) -> dict[str, Any]:
    """A hit of 1K tokens that arrives 5 ms after one of 64K, against one that is alone."""
    ids, served = settings.ids("behind"), engines.get("lazy")
    large, small = ids.one(LARGE), ids.one(SMALL)
    served.keep(large)
    served.keep(small)
    alone, late, ahead = [], [], []
    for _ in range(1 + settings.runs):
        alone += _first_tokens(served, small, ids, 1)
        first, second = _behind_once(served, large, small, ids)
        late.append(second)
        ahead.append(first)
    return {
        "rows": [
            {
                **summary([s * 1e3 for s in alone[1:]], "alone_ms"),
                **summary([s * 1e3 for s in late[1:]], "behind_ms"),
                "large_ms": float(np.median(ahead[1:])) * 1e3,
                "goal": 15.0,
            }
        ]
    }


def _behind_once(
    served: Served, large: list[int], small: list[int], ids: Prompts
) -> tuple[float, float]:
    """Seconds to the first tokens of both. The small one's count from when it was due, even if the
    step loop did not look then."""
    first = served.request(large + ids.one(TAIL), 1)
    second = served.request(small + ids.one(TAIL), 1)
    before, begin = served.counters(), time.monotonic()
    due = begin + BEHIND
    served.engine.add_request(first)
    served.run_until(lambda: time.monotonic() >= due)
    if first.num_unfinished == 0:
        raise WrongTier("the large load ended before the small one came")
    served.engine.add_request(second)
    served.run_until(lambda: not served.engine.has_unfinished)
    blocks = (LARGE + SMALL) // BLOCK
    served.since(before).expect_host(blocks, blocks, served.block_bytes)
    served.wait_idle()
    return token_seconds(first, begin), token_seconds(second, due)


class _Loaders:
    """Keeps one request with a prefix in host memory in the engine: a new one as soon as the last
    has finished. `count` of them are made beforehand."""

    def __init__(self, served: Served, heads: list[list[int]], ids: Prompts, count: int) -> None:
        self._served = served
        self._heads = heads
        self._ids = ids
        self._num_made = 0
        self._ready = [self._make() for _ in range(count)]
        self._now: Request | None = None
        self._added = 0.0
        self.times: list[float] = []

    def keep_one(self) -> None:
        """Adds a request if none is running."""
        if self._now is None:
            self._now = self._ready.pop() if self._ready else self._make()
            self._added = time.monotonic()
            self._served.engine.add_request(self._now)

    def _make(self) -> Request:
        self._num_made += 1
        head = self._heads[self._num_made % len(self._heads)]
        return self._served.request(head + self._ids.one(TAIL), 1)

    def poll(self) -> bool:
        """After a step: notes the time of a request that has finished. True if none is running."""
        if self._now is not None and self._now.num_unfinished == 0:
            self.times.append(token_seconds(self._now, self._added))
            self._now = None
        return self._now is None


def decode(engines: Engines, settings: Settings) -> dict[str, Any]:
    """Steps of 32 decoding rows while prefixes of 16K tokens arrive one after the other, against
    none; only steps without a row of a prompt. Turns alternate, as contexts grow."""
    ids, served = settings.ids("decode"), engines.get("lazy")
    served.engine.reset_prefix_cache()  # prefixes of earlier parts would keep these out of the pool
    heads = [ids.one(LOADED) for _ in range(6)]  # more than the GPU has room for
    for head in heads:
        served.keep(head)
    rows = [served.request(ids.one(_ROW_PROMPT), 4096) for _ in range(ROWS)]
    for row in rows:
        served.engine.add_request(row)
    served.run_until(lambda: all(row.metrics.first_token_time for row in rows))
    loaders = _Loaders(served, heads, ids, _STEPS * _TURNS // 3)
    intervals: dict[str, list[float]] = {"none": [], "loads": []}
    _turn(served, 20, None)
    before = served.counters()
    for _ in range(_TURNS):
        intervals["none"] += _turn(served, _STEPS, None)
        intervals["loads"] += _turn(served, _STEPS, loaders)
    found = served.since(before)
    blocks = len(loaders.times) * LOADED // BLOCK
    if found.h2d < 0.98 * blocks * served.block_bytes:
        raise WrongTier(f"{len(loaders.times)} prefixes of {LOADED} tokens: got {found}")
    for row in rows:
        served.engine.abort(row.request_id)
    served.wait_idle()
    none, loads = (summary([s * 1e3 for s in intervals[k]], "ms") for k in ("none", "loads"))
    return {
        "rows": [
            {
                "rows": ROWS,
                "loads": len(loaders.times),
                **{f"none_{name}": value for name, value in none.items()},
                **{f"loads_{name}": value for name, value in loads.items()},
                "p50_ratio": loads["ms_p50"] / none["ms_p50"],
                "p99_ratio": loads["ms_p99"] / none["ms_p99"],
                "goal": 1.1,
                "load_first_token_ms": float(np.median(loaders.times)) * 1e3,
            }
        ]
    }


def _turn(served: Served, count: int, loaders: _Loaders | None) -> list[float]:
    """At least `count` plain steps, each with a prefix on its way if there are loaders; the last
    one's rest does not count."""
    watch = served.watch
    watch.begin()
    while watch.num_plain <= count:
        if loaders is not None:
            loaders.keep_one()
        served.engine.step()
        if loaders is not None:
            loaders.poll()
    steps = watch.end()
    if loaders is not None:
        served.run_until(loaders.poll)
    return plain_intervals(steps)


def stores(engines: Engines, settings: Settings) -> dict[str, Any]:
    """64 requests of 1024 tokens in and 128 out, in rounds. With a host tier every round's blocks
    are stored and leave the GPU; nothing is ever found again."""
    ids = settings.ids("stores")
    off, on = engines.get("off"), engines.get("wide")
    requests, prompt, tokens = CLOSED
    params = greedy(tokens)
    times: dict[str, list[float]] = {"off": [], "on": []}
    rounds = max(3, settings.runs // 4)
    before = on.counters()
    for turn in range(1 + rounds):  # the first round warms up and fills the GPU's cache
        if turn == 1:
            before = on.counters()
        for name, served in (("off", off), ("on", on)):
            prompts = [ids.one(prompt) for _ in range(requests)]
            times[name].append(seconds(served.llm, prompts, params))
    found = on.since(before)
    full = requests * ((prompt + tokens - 1) // BLOCK)
    stored = found.d2h / on.block_bytes / rounds
    if stored < _LEAST_STORED * full or found.h2d or found.cpu:
        raise WrongTier(f"of {full} blocks a round {stored:.0f} were stored: {found}")
    ratio = median_ratio(times["on"][1:], times["off"][1:])
    without, with_ = (float(np.median(times[name][1:])) for name in ("off", "on"))
    return {
        "rows": [
            {
                "requests": f"{requests} x ({prompt} in, {tokens} out)",
                "off_s": without,
                "on_s": with_,
                "tok_per_s": requests * tokens / with_,
                "loss": ratio - 1.0,
                "goal": 0.01,
                "stored_blocks": stored,
                "of_blocks": full,
                "dropped": found.dropped,
            }
        ]
    }
