"""What the machine gives at this moment: reading memory, and multiplying bfloat16 matrices; and the
best times of calls that take turns."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

_SOURCE = Path(__file__).parent / "read_probe.cpp"
_STEP = 512
_PASS_S = 0.05
_GEMM_ROWS = 512
_GEMM_SQUARE = 2048


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    """The probe, compiled into a temporary folder.

    Raises:
        RuntimeError: there is no compiler. subprocess.CalledProcessError: it failed.
    """
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("the read probe needs a C++ compiler")
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "read_probe.so"
        flags = ["-O3", "-std=c++17", "-Wall", "-Wextra", "-Wno-psabi", "-fPIC", "-shared"]
        subprocess.run([compiler, *flags, "-pthread", str(_SOURCE), "-o", str(built)], check=True)
        library = ctypes.CDLL(str(built))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.probe_new.restype = pointer
    library.probe_new.argtypes = [number, number]
    library.probe_free.restype = None
    library.probe_free.argtypes = [pointer, number]
    library.probe_read.restype = number
    library.probe_read.argtypes = [pointer, number, number, number]
    return library


class ReadProbe:
    """A buffer and its plain read by `threads` threads; 2 MiB pages where the system grants them.

    Args:
        size: bytes, as many as the work to be compared reads; rounded up to 512.
    """

    def __init__(self, size: int, threads: int) -> None:
        self.size = -(-size // _STEP) * _STEP
        self.threads = threads
        self._data = _library().probe_new(self.size, threads)
        if not self._data:
            raise MemoryError(f"{self.size} bytes for the read probe")

    def __enter__(self) -> ReadProbe:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _library().probe_free(self._data, self.size)
        self._data = None

    def seconds(self, tries: int = 7) -> float:
        """Seconds of the fastest of `tries` reads, each the mean of at least 50 ms of passes."""
        passes = 1
        self._read(passes)
        while (elapsed := self._read(passes) * passes) < _PASS_S:
            passes = max(passes + 1, int(passes * _PASS_S / max(elapsed, 1e-6)))
        return min(self._read(passes) for _ in range(tries))

    def gigabytes_per_s(self, tries: int = 7) -> float:
        """1e9 bytes per second, of `seconds`."""
        return self.size / self.seconds(tries) / 1e9

    def _read(self, passes: int) -> float:
        nanoseconds = _library().probe_read(self._data, self.size, self.threads, passes)
        return float(nanoseconds) / passes / 1e9


def best_seconds(
    calls: list[Callable[[], Any]],
    rounds: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """The shortest time of each call, all called in turns."""
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for i, call in enumerate(calls):
            begin = clock()
            call()
            best[i] = min(best[i], clock() - begin)
    return best


def gemm_gflops(depth: int, outputs: int, threads: int, tries: int = 5) -> float:
    """torch's bfloat16 product: the better of 512 x depth x outputs and 2048 cubed, best try.

    On x86-64 this is oneDNN's.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        sizes = [(_GEMM_ROWS, depth, outputs), (_GEMM_SQUARE,) * 3]
        return max(_product_gflops(*size, tries) for size in sizes)
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def _product_gflops(rows: int, depth: int, outputs: int, tries: int) -> float:
    x = torch.full((rows, depth), 0.5, dtype=torch.bfloat16)
    weight = torch.full((outputs, depth), 0.5, dtype=torch.bfloat16)
    torch.nn.functional.linear(x, weight)
    (best,) = best_seconds([lambda: torch.nn.functional.linear(x, weight)], tries)
    return 2e-9 * rows * depth * outputs / best
