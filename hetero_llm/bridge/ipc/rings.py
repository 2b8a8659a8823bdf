"""Message rings between two processes in shared memory: one producer, one consumer.

The engine creates a ring for each direction and starts the worker with descriptors and handles:

    ring = create_ring(slots)
    Popen([..., ring.handle], pass_fds=[ring.fd])        # in the child: attach_ring(handle)

The memory has no name, so a killed process leaves nothing behind. There are no locks: a push
returns at once, with FULL if the ring has no room, and a pop waits a bounded time. Damaged memory
is detected by checksums, counted and skipped (csrc/ring.h). A restarted worker gets new rings.

A ring consists of slots of 64 bytes; a message takes one or more of them.
"""

from __future__ import annotations

import ctypes
import enum
import os
import secrets
import time
from dataclasses import dataclass, fields
from typing import NamedTuple, Self

import numpy as np

from hetero_llm.bridge.ipc import ring_library
from hetero_llm.bridge.ipc.messages import HEADER, MAX_WORDS, Messages, Outbox
from hetero_llm.bridge.ipc.ring_library import RingCounters
from hetero_llm.bridge.ipc.shared_memory import SharedMemory, create_shared, map_shared
from hetero_llm.core.errors import RingError

DEFAULT_SLOTS = 1 << 14
"""1 MiB: room for prompts of some 200,000 tokens, or 5,000 messages of 8 nodes."""

_REFUSALS = {
    1: "it is too small",
    2: "it is no ring",
    3: "it is of another version",
    4: "its header is damaged",
    5: "its size is not the handle's",
    6: "it is another ring than the handle's",
}
_INTERRUPTED = 5

# Bit layout of the result of a pop (csrc/ring.h).
_KIND_BIT, _MESSAGES_BIT, _WORDS_BIT = 4, 12, 32
_STATUS_MASK, _KIND_MASK, _MESSAGES_MASK = 0xF, 0xFF, 0xFFFFF
_MAX_WORDS = 2**31 - 1


class RingStatus(enum.IntEnum):
    """Outcome of a push or a pop."""

    OK = 0
    EMPTY = 1
    """The ring was empty and the pop had no timeout."""
    FULL = 2
    """Some or all messages did not fit."""
    CORRUPT = 3
    """Some messages were damaged and are lost; those returned are sound."""
    TIMEOUT = 4
    """The ring stayed empty until the timeout."""


_STATUSES = tuple(RingStatus)
_OK, _FULL = RingStatus.OK, RingStatus.FULL  # attribute access on an enum class is slow


class Popped(NamedTuple):
    """Result of a pop."""

    status: RingStatus
    messages: Messages


_NO_MESSAGES = Messages(np.zeros(0, HEADER), np.zeros(0, np.int32))
_NOTHING = {status.value: Popped(status, _NO_MESSAGES) for status in RingStatus}
"""Results without messages, by the compiled function's return value."""


@dataclass(frozen=True, slots=True, eq=False)
class Ring(SharedMemory):
    """A ring's memory in this process.

    Attributes:
        slots: number of 64-byte slots.
        stamp: random number that identifies the ring.
    """

    slots: int
    stamp: int

    @property
    def handle(self) -> str:
        """Argument of `attach_ring` in a process that inherited `fd`."""
        return f"{self.fd}:{self.slots}:{self.stamp:016x}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def create_ring(slots: int = DEFAULT_SLOTS, *, start: int = 0) -> Ring:
    """Create an empty ring.

    Args:
        slots: a power of two; a message with the longest body takes 512.
        start: first position, so that tests can cross 2**32.

    Raises:
        RingError: not enough memory, or no compiled library.
    """
    library = ring_library.load().quick
    size = library.hetero_ring_bytes(slots)
    assert size > 0, slots
    made, stamp = create_shared(size), secrets.randbits(64)
    library.hetero_ring_format(made.address, slots, stamp, start)
    return Ring(made.fd, made.memory, slots, stamp)


def attach_ring(handle: str) -> Ring:
    """Map a ring that another process created and this one inherited.

    Raises:
        RingError: the descriptor is closed or of another file, or there is no compiled library.
    """
    library = ring_library.load().quick
    try:
        fd_text, slots_text, stamp_text = handle.split(":")
        fd, slots, stamp = int(fd_text), int(slots_text), int(stamp_text, 16)
        size = os.fstat(fd).st_size
        ring = Ring(fd, map_shared(fd, size), slots, stamp)
    except (OSError, OverflowError, ValueError) as error:
        raise RingError(f"ring handle {handle!r} leads to no memory: {error}") from error
    refusal = library.hetero_ring_refusal(ring.address, size, slots, stamp)
    if refusal != 0:
        ring.memory.close()
        raise RingError(f"ring handle {handle!r} is refused: {_REFUSALS[refusal]}")
    return ring


class _End:
    """One end of a ring, open in this process. One thread at a time."""

    _role: int

    def __init__(self, ring: Ring) -> None:
        """Raises:
        RingError: this end is open already, or the memory is damaged.
        """
        self._library = ring_library.load()
        # While this exists, closing the mapping fails.
        self._memory = ctypes.c_char.from_buffer(ring.memory)
        self._ring = ring
        base = ctypes.addressof(self._memory)
        handle = self._library.quick.hetero_ring_open(base, self._role)
        if handle is None:
            del self._memory
            raise RingError("this end is open already, or the positions are damaged")
        self._handle: ctypes.c_void_p | None = ctypes.c_void_p(handle)

    def counters(self) -> RingCounters:
        assert self._handle is not None, "closed"
        result = ring_library.Counters()
        self._library.quick.hetero_ring_counters(self._handle, ctypes.addressof(result))
        return RingCounters(*(getattr(result, each.name) for each in fields(RingCounters)))

    def close(self) -> None:
        """Close the end; calling it again has no effect."""
        if self._handle is not None:
            self._library.quick.hetero_ring_close(self._handle)
            self._handle = None
            del self._memory

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Producer(_End):
    """The pushing end."""

    _role = 0

    def push(self, outbox: Outbox) -> RingStatus:
        """Move messages from the outbox into the ring, as many as fit: OK or FULL. Never waits.
        Takes microseconds, more if it has to wake the consumer."""
        assert self._handle is not None, "closed"
        return _FULL if outbox.push_into(self._handle) else _OK


class Consumer(_End):
    """The popping end."""

    _role = 1

    def __init__(
        self,
        ring: Ring,
        *,
        spin_us: int = 50,
        max_messages: int = 256,
        max_words: int = 1 << 15,
        max_views: int = 4096,
    ) -> None:
        """Open the end.

        Args:
            spin_us: how long a wait spins before it sleeps.
            max_messages, max_words: maximum that one pop returns.
            max_views: maximum number of results of `pop` that are kept for later ones of the same
                shape.
        """
        super().__init__(ring)
        assert spin_us >= 0 and 0 < max_messages <= _MESSAGES_MASK
        assert MAX_WORDS <= max_words <= _MAX_WORDS
        self._spin_ns = spin_us * 1000
        self._headers = np.zeros(max_messages, HEADER)
        self._words = np.zeros(max_words, np.int32)
        self._popped = _NOTHING.copy()
        self._max_views = max_views
        self._library.quick.hetero_ring_buffers(
            self._handle,
            self._headers.ctypes.data,
            self._words.ctypes.data,
            max_messages,
            max_words,
        )
        self._pop = self._library.quick.hetero_ring_pop
        self._wait = self._library.waiting.hetero_ring_wait

    @property
    def num_views(self) -> int:
        """Results kept for later pops of the same shape."""
        return len(self._popped)

    def pop(self, timeout_us: int = 0) -> Popped:
        """Pop the available messages. Status OK; CORRUPT if damaged ones were skipped; EMPTY if
        there are none; TIMEOUT if none came within `timeout_us` > 0.

        The messages lie in buffers of this end that the next pop overwrites (`Messages.copy`). The
        GIL is released only while waiting.
        """
        assert self._handle is not None, "closed"
        if timeout_us <= 0:
            result = self._pop(self._handle)
        else:
            deadline = time.monotonic_ns() + timeout_us * 1000
            result = self._wait(self._handle, deadline, self._spin_ns)
            while result == _INTERRUPTED:  # Python's signal handler has run by now
                result = self._wait(self._handle, deadline, self._spin_ns)
        return self._popped.get(result) or self._new_popped(result)

    def _new_popped(self, result: int) -> Popped:
        """Views of the buffers for a new combination of counts; cached, since they recur."""
        count, words = result >> _MESSAGES_BIT & _MESSAGES_MASK, result >> _WORDS_BIT
        kind = result >> _KIND_BIT & _KIND_MASK
        messages = Messages(self._headers[:count], self._words[:words], kind or None)
        popped = Popped(_STATUSES[result & _STATUS_MASK], messages)
        if len(self._popped) >= self._max_views:
            self._popped = _NOTHING.copy()
        self._popped[result] = popped
        return popped
