"""Time of steps of few tokens on this CPU, from which the drafter weighs draft nodes.

Measured once at start, behind a context of usual length: attention over it costs more the more
nodes a step has, and for a small model as much as its weights. What other contexts cost, the
drafter observes in real steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from time import perf_counter

import numpy as np

from hetero_llm.cpu.executor import GREEDY, Executor, StepInput, StepSamples
from hetero_llm.runner.kv_cache import PagedKVCache

_MEASURED = (1, 2, 3, 4, 6, 8, 16, 32, 64)
_SIZES = (*range(1, 9), *range(16, 65, 8))
"""Sizes returned, in tokens; times between measured sizes are interpolated."""
_CONTEXT = 256  # tokens, whatever the cache holds of them
_LEAST_REPEATS, _MOST_REPEATS = 3, 24
_SECONDS = 0.3
"""Time limit: after it no larger size is measured, nor any oftener than `_LEAST_REPEATS` times."""


def profile_executor(executor: Executor, cache: PagedKVCache) -> list[tuple[int, float]]:
    """Tokens and seconds of steps, ascending, each the minimum of some runs.

    Sizes take turns: what other programs do meanwhile then disturbs all of them, and each size that
    runs often enough has a quiet moment. Before each measured step runs one of a single token, as
    in decoding: behind a larger step, which has filled the caches, a token takes up to half as long
    again, and more of them would look free. Reads and writes K and V of the cache's first blocks:
    to be called before the first request.
    """
    room = min(_MEASURED[-1], cache.num_blocks * cache.shape.block_size)
    begun = perf_counter()
    runs: dict[int, Callable[[], object]] = {}
    best: dict[int, float] = {}
    for num_tokens in _MEASURED:
        if num_tokens > room or perf_counter() - begun > _SECONDS:
            break
        runs[num_tokens] = _step_of(executor, cache, num_tokens)
        runs[num_tokens]()  # the first run is slower
        best[num_tokens] = math.inf
    for repeat in range(_MOST_REPEATS):
        if repeat >= _LEAST_REPEATS and perf_counter() - begun > _SECONDS:
            break
        for num_tokens, run in runs.items():
            runs[_MEASURED[0]]()
            started = perf_counter()
            run()
            best[num_tokens] = min(best[num_tokens], perf_counter() - started)
    sizes = list(best)
    # A step that takes longer than one of more tokens was disturbed.
    seconds = np.minimum.accumulate(list(best.values())[::-1])[::-1]
    returned = [size for size in _SIZES if size <= sizes[-1]]
    return list(zip(returned, np.interp(returned, sizes, seconds).tolist(), strict=True))


def _step_of(executor: Executor, cache: PagedKVCache, num_tokens: int) -> Callable[[], object]:
    """Runs a token and a chain of draft nodes behind it, sampled after each."""
    numbers = np.arange(num_tokens, dtype=np.int32)
    zero, zeros = np.zeros(1, np.int32), np.zeros(num_tokens, np.int32)
    size = cache.shape.block_size
    context = min(_CONTEXT, cache.num_blocks * size - num_tokens)
    blocks = -(-(context + num_tokens) // size)
    indices = numbers + np.int32(context)
    inputs = StepInput(
        token_ids=zeros,
        positions=numbers,  # those behind the context may be more than the model has
        slot_mapping=indices,
        request_slots=zero,
        num_computed_tokens=zero + np.int32(context),
        num_scheduled_tokens=np.array([num_tokens], np.int32),
        bases=zero + np.int32(context),
        is_tree=np.array([num_tokens > 1], np.uint8),
        ancestors=(np.uint64(2) << numbers.astype(np.uint64)) - np.uint64(1),
        block_tables=np.arange(blocks, dtype=np.int32).reshape(1, blocks),
    )
    return partial(executor.step, inputs, StepSamples.plain(numbers, GREEDY))
