"""A channel from one process to several in shared memory; every reader gets every message in order.

The writer creates it and starts its readers with the descriptor:

    channel = create_broadcast(readers=3)
    writer = BroadcastWriter(channel)
    Popen([..., channel.handle], pass_fds=[channel.fd])     # in the child: attach_broadcast(handle)

A write takes some microseconds, whatever the number of readers: one copy, one position, and one
wake-up of those that sleep. It waits only where the slowest reader has left no room
(csrc/broadcast.h).
"""

from __future__ import annotations

import atexit
import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hetero_llm.bridge.ipc import ring_library
from hetero_llm.bridge.ipc.shared_memory import SharedMemory, create_shared, map_shared
from hetero_llm.core.errors import RingError

DEFAULT_BYTES = 4 << 20
"""Of the frames: some 1,000 steps of 64 sequences, or two prompts of 256K tokens."""

MAX_READERS = 63

_TIMEOUT, _INTERRUPTED, _CLOSED = -2, -3, -5
_WAIT_SECONDS = 0.0005  # of a writer without room, between two looks


class ChannelClosedError(Exception):
    """The writer has closed the channel, and every message of it was read."""


@dataclass(frozen=True, slots=True, eq=False)
class Broadcast(SharedMemory):
    """A channel's memory in this process."""

    @property
    def handle(self) -> str:
        """Argument of `attach_broadcast` in a process that inherited `fd`."""
        return str(self.fd)


def create_broadcast(readers: int, *, size: int = DEFAULT_BYTES, start: int = 0) -> Broadcast:
    """Create an empty channel.

    Args:
        readers: 1 to `MAX_READERS`.
        size: bytes of its frames, a power of two; longer messages take several frames.
        start: first position, so that tests can cross 2**32; a multiple of 64.

    Raises:
        RingError: not enough memory, or no compiled library.
    """
    library = ring_library.load().quick
    total = library.hetero_broadcast_bytes(size)
    assert total > 0 and 0 < readers <= MAX_READERS and start % 64 == 0, (size, readers, start)
    made = create_shared(total)
    library.hetero_broadcast_format(made.address, size, readers, start)
    return Broadcast(made.fd, made.memory)


def attach_broadcast(handle: str) -> Broadcast:
    """Map a channel that another process created and this one inherited.

    Raises:
        RingError: the descriptor is closed, or there is no compiled library.
    """
    ring_library.load()
    try:
        fd = int(handle)
        return Broadcast(fd, map_shared(fd, os.fstat(fd).st_size))
    except (OSError, OverflowError, ValueError) as error:
        raise RingError(f"handle {handle!r} leads to no memory: {error}") from error


class _End:
    """One side of a channel, open in this process. One thread at a time."""

    def __init__(self, channel: Broadcast, reader: int) -> None:
        self._library = ring_library.load()
        # While this exists, closing the mapping fails.
        self._memory = ctypes.c_char.from_buffer(channel.memory)
        base, size = ctypes.addressof(self._memory), len(channel.memory)
        handle = self._library.quick.hetero_broadcast_open(base, size, reader)
        if handle is None:
            del self._memory
            raise RingError("the memory holds no channel with such a reader")
        self._handle: ctypes.c_void_p | None = ctypes.c_void_p(handle)

    def free(self) -> None:
        """Release this side; calling it again has no effect."""
        if self._handle is not None:
            self._library.quick.hetero_broadcast_free(self._handle)
            self._handle = None
            del self._memory


class BroadcastWriter(_End):
    """The writing side.

    Args:
        readers: of the channel.
    """

    def __init__(self, channel: Broadcast, readers: int) -> None:
        """Raises:
        RingError: the memory holds no channel.
        """
        super().__init__(channel, -1)
        self._frame = self._library.quick.hetero_broadcast_frame_bytes(self._handle)
        self._write = self._library.quick.hetero_broadcast_write
        self._beats = np.zeros(readers, np.uint64)
        self._unread = np.zeros(readers, np.uint64)

    def write(self, message: bytes, check: Callable[[], None]) -> None:
        """Write a message and wake the readers.

        Args:
            check: called again and again while the slowest reader leaves no room; what it raises
                ends the wait, and with it the channel if a part of the message is written.
        """
        assert self._handle is not None, "closed"
        if len(message) <= self._frame:
            while self._write(self._handle, message, len(message), 0) < 0:
                self._wait(check)
            return
        for begin in range(0, len(message), self._frame):
            part = message[begin : begin + self._frame]
            more = int(begin + self._frame < len(message))
            while self._write(self._handle, part, len(part), more) < 0:
                self._wait(check)

    def _wait(self, check: Callable[[], None]) -> None:
        check()
        time.sleep(_WAIT_SECONDS)

    def end(self) -> None:
        """Let readers know that nothing follows."""
        if self._handle is not None:
            self._library.quick.hetero_broadcast_close(self._handle)

    def beats(self) -> tuple[list[int], list[int]]:
        """Signs of life of each reader so far, and bytes that it has not read. Any thread may call
        it, before `free`."""
        assert self._handle is not None, "closed"
        self._library.quick.hetero_broadcast_beats(
            self._handle, self._beats.ctypes.data, self._unread.ctypes.data
        )
        return self._beats.tolist(), self._unread.tolist()


class BroadcastReader(_End):
    """A reading side.

    Args:
        reader: its number, from 0 on.
        spin_us: how long a wait spins before it sleeps.
    """

    def __init__(self, channel: Broadcast, reader: int, *, spin_us: int = 50) -> None:
        """Raises:
        RingError: the memory holds no channel with such a reader.
        """
        super().__init__(channel, reader)
        self._spin_ns = 0
        self.set_spin(spin_us)
        self._wait = self._library.waiting.hetero_broadcast_wait
        self._take = self._library.quick.hetero_broadcast_take

    def set_spin(self, spin_us: int) -> None:
        """How long a wait spins from now on before it sleeps."""
        self._spin_ns = spin_us * 1000

    def read(self, timeout_us: int) -> np.ndarray | None:
        """The next message, [bytes / 4] int32 in memory of its own; None if none has come within
        the time. Messages are multiples of four bytes.

        Raises:
            ChannelClosedError: nothing follows.
            RingError: the memory is damaged.
        """
        first = self._next(timeout_us)
        if first is None:
            return None
        words, more = first
        if not more:
            return words
        parts = [words]
        while more:
            following = self._next(timeout_us)
            if following is not None:
                parts.append(following[0])
                more = following[1]
        return np.concatenate(parts)

    def _next(self, timeout_us: int) -> tuple[np.ndarray, bool] | None:
        """The next frame, and whether more frames of its message follow."""
        assert self._handle is not None, "closed"
        deadline = time.monotonic_ns() + timeout_us * 1000
        count = self._wait(self._handle, deadline, self._spin_ns)
        while count == _INTERRUPTED:  # Python's signal handler has run by now
            count = self._wait(self._handle, deadline, self._spin_ns)
        if count >= 0:
            words = np.empty(count // 4, np.int32)
            more = self._take(self._handle, words.ctypes.data)
            return words, bool(more)
        if count == _TIMEOUT:
            return None
        if count == _CLOSED:
            raise ChannelClosedError
        raise RingError("a message of the channel is damaged")

    def live(self, parent: int) -> None:
        """Start a thread, outside of Python, that gives signs of life until `free`, and ends this
        process at once when process `parent` is no longer its parent.

        Raises:
            RingError: no thread can be started.
        """
        assert self._handle is not None, "closed"
        error = self._library.quick.hetero_broadcast_live(self._handle, parent)
        if error:
            raise RingError(f"no thread can be started: {os.strerror(error)}")
        atexit.register(self.free)  # the thread ends before the interpreter unmaps its memory
