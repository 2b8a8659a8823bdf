"""Timing on a CUDA device: captured graphs, replayed; medians by events."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

COPY_BYTES = 4 << 30
CALLS = 100


def need_cuda() -> None:
    """Ends the bench where there is no CUDA device."""
    if not torch.cuda.is_available():
        raise SystemExit("this bench needs a CUDA device")


def capture(body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`body` as a graph, after a run that warms up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def graph_ms(body: Callable[[], object], *, replays: int = 7) -> float:
    """Median milliseconds of one replay of `body`, captured after a warm-up run."""
    graph = capture(body)
    graph.replay()
    return event_ms(graph.replay, replays=replays)


def queued_us(body: Callable[[], object], *, replays: int = 7) -> float:
    """Median microseconds of one replay of `body`; replays are queued, so none waits for the
    host."""
    graph = capture(body)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    graph.replay()
    for event in events:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    pairs = zip(events[:-1], events[1:], strict=True)
    return statistics.median(a.elapsed_time(b) for a, b in pairs) * 1e3


def call_us(call: Callable[[], object], calls: int = CALLS) -> float:
    """Microseconds of one call: its share of a graph of `calls`, so kernels only."""

    def body() -> None:
        for _ in range(calls):
            call()

    return graph_ms(body) / calls * 1e3


def largest_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest difference over the largest exact value."""
    exact = exact.float()
    return float((found.float() - exact).abs().max() / exact.abs().max())


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


def link_rate(size: int = 1 << 30) -> float:
    """Bytes a second of a large copy from page-locked memory: the best of a few."""
    source = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    copies = (event_ms(lambda: target.copy_(source, non_blocking=True), replays=1) for _ in "12345")
    return size / min(copies) * 1e3
