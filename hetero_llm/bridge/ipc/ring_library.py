"""ctypes bindings of the compiled rings, built at first use. csrc/*.h document the functions."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

from hetero_llm.core.errors import RingError
from hetero_llm.utils.native_build import (
    FAST,
    PORTABLE,
    SANITIZED,
    SANITIZERS,
    CallableLibrary,
    NativeMissingError,
    Recipe,
    open_both_ways,
)

_SOURCES = Path(__file__).parent / "csrc"
_POINTER, _INT, _UINT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32


COUNTERS = (
    "messages",
    "slots",
    "corrupt_slots",
    "dropped_slots",
    "bad_positions",
    "full",
    "naps",
    "wakes",
    "missed_wakes",
)


class Counters(ctypes.Structure):
    """Output of `hetero_ring_counters`."""

    _fields_ = [(name, _INT) for name in COUNTERS]


def recipe(*, sanitize: bool = False) -> Recipe:
    """Build recipe of the library; `sanitize`: with AddressSanitizer and UBSan."""
    return Recipe(
        "rings-sanitized" if sanitize else "rings",
        _SOURCES,
        (*PORTABLE, *(SANITIZED if sanitize else FAST)),
        link_flags=SANITIZERS if sanitize else (),
    )


# No argument types (None): the function is called with `c_void_p`, bytes and integers below 2^31,
# whose conversion by declared types would take longer than the function.
_FUNCTIONS: tuple[tuple[str, Any, list[Any] | None], ...] = (
    ("hetero_ring_bytes", _INT, [_INT]),
    ("hetero_ring_format", None, [_POINTER, _INT, ctypes.c_uint64, _UINT]),
    ("hetero_ring_refusal", _INT, [_POINTER, _INT, _INT, ctypes.c_uint64]),
    ("hetero_ring_open", _POINTER, [_POINTER, _INT]),
    ("hetero_ring_close", None, [_POINTER]),
    ("hetero_ring_push", _INT, [_POINTER] * 3 + [_INT] * 2),
    ("hetero_ring_buffers", None, [_POINTER] * 3 + [_INT] * 2),
    ("hetero_ring_pop", _INT, None),
    ("hetero_ring_wait", _INT, [_POINTER] + [_INT] * 2),
    ("hetero_ring_counters", None, [_POINTER, _POINTER]),
    ("hetero_outbox_make", _POINTER, []),
    ("hetero_outbox_free", None, [_POINTER]),
    ("hetero_outbox_push", _INT, None),
    ("hetero_outbox_drop", None, [_POINTER, _INT]),
    ("hetero_outbox_words", _INT, [_POINTER]),
    ("hetero_outbox_copy", None, [_POINTER] * 3),
    ("hetero_crc32c", _UINT, [_POINTER, _INT, _UINT, _INT]),
    ("hetero_broadcast_bytes", _INT, [_INT]),
    ("hetero_broadcast_format", None, [_POINTER, _INT, _INT, ctypes.c_uint64]),
    ("hetero_broadcast_open", _POINTER, [_POINTER, _INT, _INT]),
    ("hetero_broadcast_free", None, [_POINTER]),
    ("hetero_broadcast_frame_bytes", _INT, [_POINTER]),
    ("hetero_broadcast_write", _INT, None),
    ("hetero_broadcast_close", None, [_POINTER]),
    ("hetero_broadcast_wait", _INT, [_POINTER] + [_INT] * 2),
    ("hetero_broadcast_take", _INT, [_POINTER, _POINTER]),
    ("hetero_broadcast_live", _INT, [_POINTER, _INT]),
    ("hetero_broadcast_beats", None, [_POINTER] * 3),
)


@lru_cache(maxsize=1)
def load() -> CallableLibrary:
    """The library, compiled if it is not cached.

    Raises:
        RingError: there is no compiler, it fails, or HETERO_LLM_NATIVE is 0.
    """
    try:
        return open_both_ways("compiled library", recipe, _FUNCTIONS)
    except NativeMissingError as error:
        raise RingError(str(error)) from error
