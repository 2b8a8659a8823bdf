"""Processes for functions of tests, forked from one that has imported what they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

_IMPORTED = [
    "tests.gpu.test_collectives",
    "tests.gpu.kernels.test_collectives",
    "tests.scenarios.test_hybrid_ranks",
]


def run_processes(run: Callable[..., None], args: tuple[Any, ...], count: int) -> None:
    """Calls `run(index, *args)` in each of `count` processes and waits for them.

    Raises:
        ProcessRaisedException: one has failed.
    """
    mp.set_forkserver_preload(_IMPORTED)  # type: ignore[attr-defined]  # of `multiprocessing`
    mp.start_processes(run, args, nprocs=count, start_method="forkserver")
