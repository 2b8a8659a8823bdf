"""Rings of records between two processes: shared memory, one that pushes, one that pops.

The engine makes a ring for each direction and starts the worker with the descriptors and tickets:

    ring = create_ring(slots)
    Popen([..., ring.ticket], pass_fds=[ring.fd])        # there: attach_ring(ticket)

The memory has no name, so a killed process leaves nothing behind. Neither side waits for a lock,
ever: the producer pushes or is told that the ring is full, the consumer waits a bounded time. What
was damaged in the memory is noticed, counted and skipped (csrc/ring.h). A worker that is started
anew gets new rings.
"""

from __future__ import annotations

import ctypes
import enum
import fcntl
import logging
import mmap
import os
import secrets
import tempfile
import time
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from hetero_llm.bridge.ipc import ring_library
from hetero_llm.bridge.ipc.messages import HEADER, MAX_WORDS, Outbox, Records
from hetero_llm.core.errors import RingError

logger = logging.getLogger(__name__)

DEFAULT_SLOTS = 1 << 14
"""1 MiB: prompts of some 200,000 tokens, or 5,000 records of 8 nodes, not popped yet."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FOLDERS = ("/dev/shm", None)
"""Where the memory lies if there is no memfd; None: the folder for temporary files."""

_REFUSALS = {
    1: "it is too small",
    2: "it is no ring",
    3: "it is of another version",
    4: "its header is damaged",
    5: "its size is not the ticket's",
    6: "it is another ring than the ticket's",
}
_INTERRUPTED = 5

# What a pop tells (csrc/ring.h).
_KIND_BIT, _RECORDS_BIT, _WORDS_BIT = 4, 12, 32
_STATUS_MASK, _KIND_MASK, _RECORDS_MASK = 0xF, 0xFF, 0xFFFFF
_MOST_WORDS = 2**31 - 1

_MOST_SHAPES = 4096
"""Views of its buffers that a consumer keeps."""


class RingStatus(enum.IntEnum):
    """How a push or a pop went."""

    OK = 0
    EMPTY = 1
    """Nothing was there, and nobody waited for it."""
    FULL = 2
    """Some or all records had no room."""
    CORRUPT = 3
    """Something was damaged and is lost; the records that came are sound."""
    TIMEOUT = 4
    """Nothing came in time."""


_STATUSES = tuple(RingStatus)
_OK, _FULL = RingStatus.OK, RingStatus.FULL  # looking a member up takes long


class Popped(NamedTuple):
    """What a pop gave."""

    status: RingStatus
    records: Records


_NO_RECORDS = Records(np.zeros(0, HEADER), np.zeros(0, np.int32))
_NOTHING = {status.value: Popped(status, _NO_RECORDS) for status in RingStatus}
"""By what a pop tells without any record."""


@dataclass(frozen=True, slots=True)
class RingCounters:
    """Totals of one end since it was opened.

    Attributes:
        records, slots: pushed or popped.
        corrupt_slots: that failed their checks.
        dropped_slots: sound ones of records that have a corrupt one.
        bad_positions: times that the other side's position was not to be believed.
        full: pushes that could not push everything.
        naps: waits that went to sleep.
        wakes: sleepers that were woken.
        missed_wakes: naps that ran to their end although something had come: lost is a part of a
            second, no record.
    """

    records: int
    slots: int
    corrupt_slots: int
    dropped_slots: int
    bad_positions: int
    full: int
    naps: int
    wakes: int
    missed_wakes: int


@dataclass(frozen=True, slots=True, eq=False)
class Ring:
    """A ring's memory in this process.

    Attributes:
        fd: descriptor of the memory, for the other process to inherit.
        slots: of 64 bytes.
        stamp: marks what belongs to this ring.
        memory: the mapping.
    """

    fd: int
    slots: int
    stamp: int
    memory: mmap.mmap

    @property
    def ticket(self) -> str:
        """What `attach_ring` needs to know in a process that inherited `fd`."""
        return f"{self.fd}:{self.slots}:{self.stamp:016x}"

    def close(self) -> None:
        """Gives descriptor and memory back; ends in this process are closed before. For the other
        process nothing changes."""
        self.memory.close()
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def create_ring(slots: int = DEFAULT_SLOTS, *, start: int = 0) -> Ring:
    """A new, empty ring.

    Args:
        slots: a power of two; a record of the longest body takes 512.
        start: first position, for tests of what happens beyond 2**32.

    Raises:
        RingError: there is no memory, or no compiled library.
    """
    library = ring_library.load().quick
    size = library.hetero_ring_bytes(slots)
    assert size > 0, slots
    fd = _allocate(size)
    stamp = secrets.randbits(64)
    try:
        memory = _mapped(fd, size)
    except OSError as error:
        os.close(fd)
        raise RingError(f"{size} bytes cannot be mapped: {error.strerror}") from error
    library.hetero_ring_format(_address(memory), slots, stamp, start)
    return Ring(fd, slots, stamp, memory)


def attach_ring(ticket: str) -> Ring:
    """The ring that another process made and this one inherited.

    Raises:
        RingError: the descriptor is not open or not that ring, or there is no compiled library.
    """
    library = ring_library.load().quick
    try:
        fd_text, slots_text, stamp_text = ticket.split(":")
        fd, slots, stamp = int(fd_text), int(slots_text), int(stamp_text, 16)
        size = os.fstat(fd).st_size
        memory = _mapped(fd, size)
    except (OSError, OverflowError, ValueError) as error:
        raise RingError(f"ticket {ticket!r} leads to no memory: {error}") from error
    refusal = library.hetero_ring_refusal(_address(memory), size, slots, stamp)
    if refusal != 0:
        memory.close()
        raise RingError(f"ticket {ticket!r} is refused: {_REFUSALS[refusal]}")
    return Ring(fd, slots, stamp, memory)


class _End:
    """One end of a ring, open in this process. For one thread at a time."""

    _role: int

    def __init__(self, ring: Ring) -> None:
        """Raises:
        RingError: the ring has this end open already, or was damaged.
        """
        self._library = ring_library.load()
        # As long as this exists the mapping refuses to be closed.
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
        told = ring_library.Counters()
        self._library.quick.hetero_ring_counters(self._handle, ctypes.addressof(told))
        return RingCounters(*(getattr(told, name) for name in ring_library.COUNTERS))

    def close(self) -> None:
        """May be called again; nothing else may."""
        if self._handle is not None:
            self._library.quick.hetero_ring_close(self._handle)
            self._handle = None
            del self._memory

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Producer(_End):
    """The end that pushes."""

    _role = 0

    def push(self, outbox: Outbox) -> RingStatus:
        """Pushes what waits, as far as there is room: OK or FULL. What was pushed leaves the
        outbox. Never waits. Takes microseconds, more if the consumer sleeps (it is woken)."""
        assert self._handle is not None, "closed"
        return _FULL if outbox.push_into(self._handle) else _OK


class Consumer(_End):
    """The end that pops."""

    _role = 1

    def __init__(
        self,
        ring: Ring,
        *,
        spin_us: int = 50,
        max_records: int = 256,
        max_words: int = 1 << 15,
    ) -> None:
        """Opens the end.

        Args:
            spin_us: how long a wait spins before it sleeps.
            max_records, max_words: most that one pop gives.
        """
        super().__init__(ring)
        assert spin_us >= 0 and 0 < max_records <= _RECORDS_MASK
        assert MAX_WORDS <= max_words <= _MOST_WORDS
        self._spin_ns = spin_us * 1000
        self._headers = np.zeros(max_records, HEADER)
        self._words = np.zeros(max_words, np.int32)
        self._popped = _NOTHING.copy()
        self._library.quick.hetero_ring_buffers(
            self._handle,
            self._headers.ctypes.data,
            self._words.ctypes.data,
            max_records,
            max_words,
        )
        self._pop = self._library.quick.hetero_ring_pop
        self._wait = self._library.waiting.hetero_ring_wait

    def pop(self, timeout_us: int = 0) -> Popped:
        """Records that are there: OK, or CORRUPT with those that are sound. If nothing is there,
        EMPTY, or TIMEOUT after waiting so long.

        The records lie in this end's own buffers: the next pop overwrites them (`Records.copy`).
        The GIL is kept without a timeout, and given away while waiting.
        """
        assert self._handle is not None, "closed"
        if timeout_us <= 0:
            told = self._pop(self._handle)
        else:
            deadline = time.monotonic_ns() + timeout_us * 1000
            told = self._wait(self._handle, deadline, self._spin_ns)
            while told == _INTERRUPTED:  # Python's handler has run by now
                told = self._wait(self._handle, deadline, self._spin_ns)
        return self._popped.get(told) or self._new_popped(told)

    def _new_popped(self, told: int) -> Popped:
        """Views of the buffers, kept: the same shapes come again and again."""
        count, words = told >> _RECORDS_BIT & _RECORDS_MASK, told >> _WORDS_BIT
        kind = told >> _KIND_BIT & _KIND_MASK
        records = Records(self._headers[:count], self._words[:words], kind or None)
        popped = Popped(_STATUSES[told & _STATUS_MASK], records)
        if len(self._popped) >= _MOST_SHAPES:
            self._popped = _NOTHING.copy()
        self._popped[told] = popped
        return popped


def _mapped(fd: int, size: int) -> mmap.mmap:
    """The memory, with its pages there: who first comes to one would wait for it."""
    return mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _allocate(size: int) -> int:
    """A descriptor of so many bytes that are really there: a full /dev/shm is no SIGBUS later.

    Raises:
        RingError: there are not as many.
    """
    try:
        created = os.memfd_create("hetero-llm-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fd = _filled(created, size)
        # A process that shrank it would kill the other one by SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return fd
    except OSError as error:
        last = error
    logger.warning("there is no memfd (%s): rings lie in files without a name", last.strerror)
    for folder in _FOLDERS:
        try:
            with tempfile.TemporaryFile(prefix="hetero-llm-ring-", dir=folder) as file:
                return _filled(os.dup(file.fileno()), size)
        except OSError as error:
            last = error
    raise RingError(f"{size} bytes of shared memory cannot be had: {last.strerror}") from last


def _filled(fd: int, size: int) -> int:
    """The descriptor, with memory behind it; closed if there is none."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        os.close(fd)
        raise
    return fd
