"""ctypes bindings of the compiled rings, built at first use. csrc/*.h document the functions."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from hetero_llm.core.errors import RingError
from hetero_llm.utils.native_build import CallableLibrary, open_both_ways, usual_recipe

_SOURCES = Path(__file__).parent / "csrc"
_POINTER, _INT, _UINT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32


@dataclass(frozen=True, slots=True)
class RingCounters:
    """Totals of one end since it was opened.

    Attributes:
        messages, slots: pushed or popped.
        corrupt_slots: slots whose checksum was wrong.
        dropped_slots: sound slots of messages that have a corrupt one.
        bad_positions: implausible positions of the other side.
        full: pushes that could not push everything.
        naps: waits that went to sleep.
        wakes: wake-ups of the sleeping consumer.
        missed_wakes: naps that lasted to their end although a message had come; this costs up to
            0.1 s, no message.
    """

    messages: int
    slots: int
    corrupt_slots: int
    dropped_slots: int
    bad_positions: int
    full: int
    naps: int
    wakes: int
    missed_wakes: int


class Counters(ctypes.Structure):
    """Output of `hetero_ring_counters`."""

    _fields_ = [(each.name, _INT) for each in fields(RingCounters)]


recipe = partial(usual_recipe, "rings", _SOURCES)

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
    return open_both_ways("compiled library", recipe, _FUNCTIONS, RingError)
