"""The compiled rings, built at first use: `csrc/ring.h` tells what each function does."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hetero_llm.core.env import native_choice
from hetero_llm.core.errors import RingError
from hetero_llm.core.native_build import (
    FAST,
    PORTABLE,
    SANITIZED,
    SANITIZERS,
    Recipe,
    open_library,
    reason,
)

_SOURCES = Path(__file__).parent / "csrc"
_POINTER, _INT, _UINT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32


COUNTERS = (
    "records",
    "slots",
    "corrupt_slots",
    "dropped_slots",
    "bad_positions",
    "full",
    "naps",
    "wakes",
    "missed_wakes",
)


class Popped(ctypes.Structure):
    """What `hetero_ring_pop` tells."""

    _fields_ = [("status", _INT), ("records", _INT), ("words", _INT)]


class Counters(ctypes.Structure):
    """What `hetero_ring_counters` tells."""

    _fields_ = [(name, _INT) for name in COUNTERS]


@dataclass(frozen=True, slots=True)
class RingLibrary:
    """The same functions called in two ways.

    Attributes:
        waiting: gives the GIL away during a call, for what may wait.
        quick: keeps it, for what takes microseconds: who gives it away may get it back late.
    """

    waiting: ctypes.CDLL
    quick: ctypes.PyDLL


def recipe(*, sanitize: bool = False) -> Recipe:
    """How the library is built; `sanitize`: with AddressSanitizer and UBSan."""
    return Recipe(
        "rings-sanitized" if sanitize else "rings",
        _SOURCES,
        (*PORTABLE, *(SANITIZED if sanitize else FAST)),
        link_flags=SANITIZERS if sanitize else (),
    )


@lru_cache(maxsize=1)
def load() -> RingLibrary:
    """The library, compiled if need be.

    Raises:
        RingError: there is no compiler, it fails, or HETERO_LLM_NATIVE is 0.
    """
    choice = native_choice()
    if choice == "0":
        raise RingError("HETERO_LLM_NATIVE=0 leaves the compiled library out")
    try:
        library = open_library(recipe(sanitize=choice == "sanitized"))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise RingError(f"the compiled library is not available: {reason(error)}") from error
    quick = ctypes.PyDLL(library._name)
    _declare(library)
    _declare(quick)
    return RingLibrary(library, quick)


def _declare(library: ctypes.CDLL) -> None:
    for name, result, arguments in (
        ("hetero_ring_bytes", _INT, [_INT]),
        ("hetero_ring_format", None, [_POINTER, _INT, ctypes.c_uint64, _UINT]),
        ("hetero_ring_refusal", _INT, [_POINTER, _INT, _INT, ctypes.c_uint64]),
        ("hetero_ring_open", _POINTER, [_POINTER, _INT]),
        ("hetero_ring_close", None, [_POINTER]),
        ("hetero_ring_push", _INT, [_POINTER] * 3 + [_INT] * 2),
        ("hetero_ring_buffers", None, [_POINTER] * 3 + [_INT] * 2 + [_POINTER]),
        ("hetero_ring_pop", None, [_POINTER] + [_INT] * 2),
        ("hetero_ring_counters", None, [_POINTER, _POINTER]),
        ("hetero_crc32c", _UINT, [_POINTER, _INT, _UINT, _INT]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
