"""Compiles the kernels of captured steps side by side, before the first one runs.

A first start compiles some 30 to 60 kernels, half a second each. Launched one after the other, each
step would wait for its own; here all steps run once with launches that only compile, in threads.
Triton's passes, LLVM and ptxas leave Python's lock, which a third of the time is needed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from hetero_llm.gpu.kernels.launch import INTERPRETED
from hetero_llm.utils.gc_control import long_turns, usual_wakeups

logger = logging.getLogger(__name__)

_MOST_THREADS = 16  # the compiler's Python holds the interpreter: more gain nothing


class KernelsAhead:
    """Kernels that are being compiled, see `compiling_ahead`."""

    def __init__(self, mode: triton.AsyncCompileMode, misses: list[str]) -> None:
        self._mode = mode
        self._misses = misses

    @property
    def num_compiled(self) -> int:
        """Kernels compiled so far that were not in Triton's cache on disk."""
        return len(self._misses)

    def add(self, bodies: Sequence[Callable[[], None]]) -> None:
        """Begins to compile what `bodies` launch, in threads.

        Nothing of ours runs on the device, operators of torch do: a body must bear that its kernels
        write nothing, and must have no lasting effect. If the first body finds all of its kernels
        in the cache, the others are taken to find theirs, too.
        """
        with torch.inference_mode(), _only_compile():
            for body in bodies[:1]:
                body()
            if self._all_were_cached():
                return
            for body in bodies[1:]:
                body()

    def _all_were_cached(self) -> bool:
        """Waits for the kernels so far, but for none behind the first that was not in the cache."""
        return not self._misses and not any(
            self._misses for _ in as_completed(list(self._mode.raw_futures))
        )


@contextmanager
def compiling_ahead() -> Iterator[KernelsAhead]:
    """Threads that compile kernels until the block has ended, and all that they were given is done.

    A launch of this thread waits for its kernel if that is being compiled. What does not compile is
    left to its first launch, which raises the error. Not to be nested, nor used in Triton's
    interpreter.
    """
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(threads, "hetero-llm-triton", initializer=usual_wakeups)
    with _misses() as misses, long_turns(), pool:
        mode = triton.AsyncCompileMode(pool, ignore_errors=True)
        with mode:
            yield KernelsAhead(mode, misses)


def compile_ahead(bodies: Sequence[Callable[[], None]]) -> int:
    """Compiles what `bodies` launch, see `KernelsAhead.add`. Returns how many kernels were not in
    Triton's cache on disk."""
    if INTERPRETED:
        return 0
    with compiling_ahead() as ahead:
        ahead.add(bodies)
    return ahead.num_compiled


def log_compiled(count: int) -> None:
    """Says in the log how many kernels a start has compiled, if any."""
    if count:
        logger.info("compiled %d GPU kernels", count)


@contextmanager
def _only_compile() -> Iterator[None]:
    """Launches of this thread compile their kernel and do not run it.

    A launch like an earlier one of the block is left out: looking up a kernel that is still being
    compiled takes Triton longer than a launch, and the layers of a model are alike.
    """
    run, owner = JITFunction.run, threading.get_ident()
    seen: set[Any] = set()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != owner:
            return run(self, *args, grid=grid, warmup=warmup, **options)
        launch = id(self), _kind(args), _kind(tuple(options.items()))
        if launch in seen:
            return None
        seen.add(launch)
        return run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run


def _kind(value: Any) -> Any:
    """Equal for arguments for which Triton compiles the same kernel."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    if value is None or isinstance(value, bool | int | float | str):
        return type(value), value
    return object()  # of a type that we do not know: equal to nothing


@contextmanager
def _misses() -> Iterator[list[str]]:
    """The names of kernels that are compiled meanwhile and were not in the cache on disk."""
    found: list[str] = []
    before = triton.knobs.compilation.listener

    def listen(*, src: Any, cache_hit: bool, **others: Any) -> None:
        if not cache_hit:
            found.append(src.name)
        if before is not None:
            before(src=src, cache_hit=cache_hit, **others)

    triton.knobs.compilation.listener = listen
    try:
        yield found
    finally:
        triton.knobs.compilation.listener = before
