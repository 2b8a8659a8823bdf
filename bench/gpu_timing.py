"""Timing on a CUDA device: captured graphs, replayed; medians by events."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

COPY_BYTES = 4 << 30
CALLS = 100


def graph_ms(body: Callable[[], object], *, replays: int = 7) -> float:
    """Median milliseconds of one replay of `body`, captured after a warm-up run."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    graph.replay()
    return event_ms(graph.replay, replays=replays)


def call_us(call: Callable[[], object], calls: int = CALLS) -> float:
    """Microseconds of one call: its share of a graph of `calls`, so kernels only."""

    def body() -> None:
        for _ in range(calls):
            call()

    return graph_ms(body) / calls * 1e3


def event_ms(body: Callable[[], object], *, replays: int = 7) -> float:
    """Median milliseconds of `body` between two events on the current stream."""
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        body()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """TB/s of a large device copy, bytes read plus bytes written."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    ms = event_ms(lambda: target.copy_(source), replays=9)
    return 2 * COPY_BYTES / ms / 1e9
