"""Compiles the kernels of captured steps side by side, before the first one is captured.

A first start compiles some 60 kernels, half a second each. Captured one after the other, each step
would wait for its own; here all steps run once with launches that only compile, in threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.jit import JITFunction

from hetero_llm.gpu.kernels.launch import INTERPRETED

_FIRST, _MORE = 1, 8  # steps at a time: the first one, then each time this many times as many
_MOST_THREADS = 16  # the compiler's Python holds the interpreter: more gain nothing


def compile_ahead(bodies: Sequence[Callable[[], None]]) -> int:
    """Compiles what `bodies` launch. Returns how many kernels were not in Triton's cache on disk.

    Nothing of ours runs on the device, operators of torch do: a body must bear that its kernels
    write nothing, and must have no lasting effect. If the first body finds all of its kernels in
    the cache, the others are taken to find theirs, too. What does not compile is left to its first
    launch, which raises the error.
    """
    if INTERPRETED:
        return 0
    compiled, begin, size = 0, 0, _FIRST
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        while begin < len(bodies):
            # Launches are found in the kernels' own caches only when compilations have ended, so
            # that most of the steps walk behind the end of the first few.
            mode = triton.AsyncCompileMode(pool, ignore_errors=True)
            with _misses() as misses, mode, _only_compile():
                for body in bodies[begin : begin + size]:
                    body()
            compiled += len(misses)
            if not compiled:
                break
            begin, size = begin + size, size * _MORE
    return compiled


@contextmanager
def _only_compile() -> Iterator[None]:
    """Launches of this thread compile their kernel and do not run it."""
    run, owner = JITFunction.run, threading.get_ident()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        mine = threading.get_ident() == owner
        return run(self, *args, grid=grid, warmup=warmup or mine, **options)

    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run


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
