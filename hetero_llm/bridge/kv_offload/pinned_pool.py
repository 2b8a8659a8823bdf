"""Host memory for offloaded blocks: touched by several threads, page-locked chunk by chunk.

The threads are native (`pool_csrc/pool.h`). The engine can serve with the rows that are ready, and
uses more of them as they become so.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from hetero_llm.bridge.kv_offload.sizing import gib
from hetero_llm.core.errors import HeteroLLMError
from hetero_llm.utils.native_build import CallableLibrary, open_both_ways, usual_recipe

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 30
BACKGROUND_CHUNK_BYTES = 128 << 20
"""Page-locked at a time. The driver's lock is held meanwhile, some 0.1 s a GiB, and every launch of
a serving engine waits for that lock."""

_SOURCES = Path(__file__).parent / "pool_csrc"
_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_NAP_S = 0.1  # Python handles signals in between


class PoolError(HeteroLLMError):
    """No memory for the pool, or no compiled library; the engine serves without it."""


class _Options(ctypes.Structure):
    _fields_ = [
        *((name, _INT) for name in ("row_bytes", "num_rows", "chunk_rows")),
        *((name, _INT) for name in ("node", "threads", "pause")),
        ("libcuda", ctypes.c_char_p),
    ]


class _State(ctypes.Structure):
    _fields_ = [
        *((name, _INT) for name in ("address", "ready_rows", "mbind_error")),
        *((name, _DOUBLE) for name in ("touch_seconds", "register_seconds")),
    ]


class PinnedPool:
    """Contiguous rows of equal size in memory that the device can copy from and to.

    To be created in a thread whose current CUDA context is the device's.

    Args:
        row_bytes: of one block.
        num_rows: number of rows if nothing fails.
        chunk_bytes: about as much is page-locked at a time; None: a size that suits `background`.
        node: preferred NUMA node, that of the device; None: any.
        threads: number of threads that touch the memory.
        background: return at once, while rows become ready; else when all are.
        libcuda: the driver library's path or name; None: nothing is pinned.

    Attributes:
        address: of the first row, page-aligned.
        chunk_rows: rows page-locked together; no single copy may span two such chunks.

    Raises:
        PoolError: the memory cannot be mapped, or there is no compiled library.
    """

    def __init__(
        self,
        row_bytes: int,
        num_rows: int,
        *,
        chunk_bytes: int | None = None,
        node: int | None = None,
        threads: int = 8,
        background: bool = False,
        libcuda: str | None = "libcuda.so.1",
    ) -> None:
        assert row_bytes > 0 and num_rows > 0 and threads > 0
        if chunk_bytes is None:
            chunk_bytes = BACKGROUND_CHUNK_BYTES if background else CHUNK_BYTES
        self.row_bytes = row_bytes
        self.num_rows = num_rows
        self.chunk_rows = _chunk_rows(row_bytes, chunk_bytes)
        self._node = node
        self._reported = False
        library = load()
        self._waiting, self._quick = library.waiting, library.quick
        path = None if libcuda is None else os.fsencode(libcuda)
        options = _Options(
            row_bytes,
            num_rows,
            self.chunk_rows,
            -1 if node is None else node,
            threads,
            background,
            path,
        )
        error = _INT()
        pool = self._waiting.hetero_pool_open(ctypes.byref(options), ctypes.byref(error))
        if not pool:
            what = os.strerror(error.value)
            raise PoolError(f"no {gib(row_bytes * num_rows)} of host memory for the pool: {what}")
        self._pool: int | None = pool
        self._last = _State()
        self.address = self._state().address
        if not background:
            try:
                while not self.wait(_NAP_S):
                    pass
            except BaseException:
                self.close()
                raise

    @property
    def ready_rows(self) -> int:
        """Number of leading rows that can be used; grows in the background."""
        if self._pool is None:
            return 0
        rows = self._quick.hetero_pool_ready(self._pool)
        if rows >= 0:
            return rows
        if not self._reported:
            self._reported = True
            logger.warning("host memory for prefix KV: %s", self.failure)
        return ~rows

    @property
    def failure(self) -> str:
        """Text of the failure because of which no more rows become ready; "" if there was none."""
        if self._pool is None:
            return ""
        buffer = ctypes.create_string_buffer(400)
        self._waiting.hetero_pool_failure(self._pool, buffer, len(buffer))
        text = buffer.value.decode(errors="replace")
        if not text:
            return ""
        ready = self._state().ready_rows * self.row_bytes
        total = self.num_rows * self.row_bytes
        return f"{text}; {gib(ready)} of {gib(total)} can be used"

    @property
    def placement(self) -> str:
        """Text saying on which NUMA node the memory is."""
        if self._node is None:
            return "any NUMA node"
        error = self._state().mbind_error
        if error:
            return f"any NUMA node ({self._node} cannot be preferred: {os.strerror(error)})"
        return f"NUMA node {self._node} preferred"

    @property
    def touch_seconds(self) -> float:
        """Seconds until all memory was touched."""
        return self._state().touch_seconds

    @property
    def register_seconds(self) -> float:
        """Seconds spent in the driver, page-locking."""
        return self._state().register_seconds

    def wait(self, seconds: float) -> bool:
        """Waits until no more rows will become ready, for at most `seconds`; whether that is so."""
        return self._pool is None or bool(self._waiting.hetero_pool_wait(self._pool, seconds))

    def close(self) -> None:
        """Unlocks and frees the memory; further calls do nothing. No copy may be under way."""
        if self._pool is not None:
            self._last = self._state()
            pool, self._pool = self._pool, None
            self._waiting.hetero_pool_close(pool)

    def _state(self) -> _State:
        if self._pool is None:
            return self._last
        state = _State()
        self._waiting.hetero_pool_state(self._pool, ctypes.byref(state))
        return state


def _chunk_rows(row_bytes: int, chunk_bytes: int) -> int:
    """Number of rows, at least one, of about `chunk_bytes` that end at a page boundary: a page can
    be locked only once.

    The result is larger than requested if only many rows together fill whole pages.
    """
    unit = mmap.PAGESIZE // math.gcd(row_bytes, mmap.PAGESIZE)
    return max(chunk_bytes // (unit * row_bytes), 1) * unit


recipe = partial(usual_recipe, "pool", _SOURCES, link_flags=("-ldl",))

_FUNCTIONS: tuple[tuple[str, Any, list[Any]], ...] = (
    ("hetero_pool_open", _POINTER, [_POINTER, _POINTER]),
    ("hetero_pool_state", None, [_POINTER, _POINTER]),
    ("hetero_pool_ready", _INT, [_POINTER]),
    ("hetero_pool_wait", _INT, [_POINTER, _DOUBLE]),
    ("hetero_pool_failure", None, [_POINTER, _POINTER, _INT]),
    ("hetero_pool_close", None, [_POINTER]),
)


@lru_cache(maxsize=1)
def load() -> CallableLibrary:
    """The library, compiled if need be."""
    return open_both_ways("compiled pool of host memory", recipe, _FUNCTIONS, PoolError)
