"""Captured steps: one CUDA graph for each bucket of rows, replayed with new inputs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

K = TypeVar("K")

MAX_GRAPH_ROWS = 512


def row_buckets(limit: int) -> tuple[int, ...]:
    """Row counts that are captured, ascending: padding wastes at most a quarter from 64 rows on.
    448 is left out: cuBLAS computes 512 rows of a 7B or 8B shape in 9.8 ms, 448 in 13.8.

    Args:
        limit: most rows that a step can have; the last bucket holds it (or `MAX_GRAPH_ROWS`).
    """
    buckets = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    buckets += [320, 384, MAX_GRAPH_ROWS]
    enough = next((i for i, bucket in enumerate(buckets) if bucket >= limit), len(buckets) - 1)
    return tuple(buckets[: enough + 1])


def gated_buckets(buckets: tuple[int, ...]) -> tuple[int, ...]:
    """Those that steps with loads under way use. Up to 128 rows a step takes about as long as
    reading the weights takes, and such a step seldom less than its load: a few sizes serve, and the
    larger ones are kept, where padding would cost time. The last is always there."""
    few = (8, 32, 64, 128)
    return tuple(b for b in buckets if b in few or b > few[-1] or b == buckets[-1])


@contextmanager
def _no_collection() -> Iterator[None]:
    """Graphs of an earlier engine must not be destroyed while a stream is captured."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class GraphSet(Generic[K]):
    """Graphs by key, in one memory pool: only one of them runs at a time."""

    def __init__(self) -> None:
        self._graphs: dict[K, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def capture(self, key: K, body: Callable[[], None]) -> None:
        """Runs `body` once so that its kernels are compiled and loaded, then captures it.

        `body` must read its inputs and leave its results in tensors that live on. Other threads may
        use the device meanwhile: host memory may still be being pinned.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            body()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with (
            _no_collection(),
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            body()
        self._graphs[key] = graph

    def replay(self, key: K) -> None:
        self._graphs[key].replay()

    def __contains__(self, key: K) -> bool:
        return key in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)


@torch.inference_mode()
def why_not_captured(body: Callable[[], None]) -> str | None:
    """Why the current device cannot capture `body`; None if it can.

    A capture in which the host waits for the device breaks off in a state that is hard to leave,
    so that is looked for before anything is captured. What `body` does must not matter: it runs
    a few times.

    Raises:
        OutOfMemoryError: of torch.
    """
    body()  # compiles kernels and fills tables, both of which may wait
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        try:
            body()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        GraphSet[str]().capture("trial", body)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return " ".join(str(error).split())[:200]
    return None
