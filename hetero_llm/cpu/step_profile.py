"""What steps of few rows cost on this CPU: for whoever weighs draft nodes.

Measured once at start, over an empty cache: attention over long contexts comes on top, and steps
that really run tell by how much.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np

from hetero_llm.cpu.executor import GREEDY, Executor, StepDraws, StepRows
from hetero_llm.runner.kv_cache import PagedKVCache

_MEASURED = (1, 2, 4, 8, 16, 32, 64)
_SIZES = (*range(1, 9), *range(16, 65, 8))
"""Sizes told; those between measured ones are interpolated."""
_REPEATS = 3
_SECONDS = 0.3
"""After so long no larger size is measured."""


def profile_executor(executor: Executor, cache: PagedKVCache) -> list[tuple[int, float]]:
    """Rows and seconds of steps, ascending, each the least of some runs.

    Writes K and V to the cache's first places: to be called before anybody uses it.
    """
    room = min(_MEASURED[-1], cache.num_blocks * cache.shape.block_size)
    begun = perf_counter()
    measured: list[tuple[int, float]] = []
    for rows in _MEASURED:
        if rows > room or perf_counter() - begun > _SECONDS:
            break
        measured.append((rows, _seconds(executor, cache, rows)))
    sizes, seconds = zip(*measured, strict=True)
    told = [size for size in _SIZES if size <= sizes[-1]]
    return list(zip(told, np.interp(told, sizes, seconds).tolist(), strict=True))


def _seconds(executor: Executor, cache: PagedKVCache, rows: int) -> float:
    """Of a chain of draft nodes, every one drawn after."""
    numbers = np.arange(rows, dtype=np.int32)
    zero, one = np.zeros(1, np.int32), np.ones(1, np.uint8)
    ancestors = (np.uint64(2) << numbers.astype(np.uint64)) - np.uint64(1)
    blocks = -(-rows // cache.shape.block_size)
    step = StepRows(
        np.zeros(rows, np.int32), numbers, numbers, zero, zero, np.array([rows], np.int32), zero,
        one, ancestors, np.arange(blocks, dtype=np.int32).reshape(1, blocks),
    )  # fmt: skip
    draws = StepDraws(
        numbers, np.full(rows, GREEDY, np.uint8), np.ones(rows, np.float32),
        np.zeros(rows, np.uint64), numbers, np.zeros(rows, np.int32),
    )  # fmt: skip
    times = []
    for _ in range(_REPEATS + 1):  # the first run is slower
        begun = perf_counter()
        executor.step(step, draws)
        times.append(perf_counter() - begun)
    return min(times)
