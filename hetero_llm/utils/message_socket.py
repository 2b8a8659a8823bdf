"""Whole messages over one end of a socket pair; all calls but `wait` and `drain` return at once.

A socket pair, not a socket with a name: no other process can connect to it, it leaves no file
behind, and each side notices the other's end at once, by the end of the stream.
"""

from __future__ import annotations

import select
import socket
import time

_HEADER = 4  # bytes of a message's length, little endian
_READ = 1 << 18
_MOST_AT_ONCE = 1 << 20
"""Bytes read in one call, so that an event loop gets its turn between."""


class MessageSocket:
    """Sends and receives byte strings of up to 4 GiB, in order.

    `closed` becomes True when the other end has closed; messages sent after that are dropped.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        # One buffer for all reads: bytes of this size for each would cost 15 µs of page faults.
        self._read_into = memoryview(bytearray(_READ))
        self._received = bytearray()
        self._unsent = bytearray()
        self._kept: list[bytes] = []  # that `wait` has received besides its own
        self.closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def num_unsent(self) -> int:
        """Bytes that did not fit into the kernel's buffer; `flush` tries again."""
        return len(self._unsent)

    def send(self, message: bytes) -> None:
        data = len(message).to_bytes(_HEADER, "little") + message
        if self._unsent:
            self._unsent += data
            self.flush()
            return
        sent = self._send(data)
        if sent < len(data):
            self._unsent += memoryview(data)[sent:]

    def flush(self) -> None:
        """Sends unsent bytes as far as the kernel's buffer has room."""
        while self._unsent:
            with memoryview(self._unsent) as view, view[:_READ] as part:
                sent = self._send(part)
            if sent == 0:
                return
            del self._unsent[:sent]

    def drain(self, seconds: float | None = None) -> None:
        """Waits until the kernel's buffer has taken all unsent bytes, at most for `seconds`; None:
        as long as the other end is open."""
        deadline = None if seconds is None else time.monotonic() + seconds
        poll = select.poll()
        poll.register(self, select.POLLOUT)
        while self._unsent:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            poll.poll(None if left is None else left * 1e3)
            self.flush()

    def receive(self) -> list[bytes]:
        """Returns the messages that have arrived whole, maybe none."""
        size = 0
        while size < _MOST_AT_ONCE:
            try:
                num_read = self._socket.recv_into(self._read_into)
            except BlockingIOError:
                break
            except OSError:  # reset by a peer that died
                num_read = 0
            if not num_read:
                self.closed = True
                break
            self._received += self._read_into[:num_read]
            size += num_read
            if num_read < _READ:
                break
        found = self._kept + self._split()
        self._kept = []
        return found

    def wait(self) -> bytes | None:
        """Waits for the next message; None: the other end has closed."""
        poll = select.poll()
        poll.register(self, select.POLLIN)
        while True:
            found = self.receive()
            if found:
                self._kept = found[1:]
                return found[0]
            if self.closed:
                return None
            poll.poll()

    def close(self) -> None:
        self.closed = True
        self._socket.close()

    def _send(self, data: bytes | memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # `receive` meets the same error and sets `closed`
            return len(data)

    def _split(self) -> list[bytes]:
        received, messages, first = self._received, [], 0
        while first + _HEADER <= len(received):
            end = first + _HEADER + int.from_bytes(received[first : first + _HEADER], "little")
            if end > len(received):
                break
            messages.append(bytes(received[first + _HEADER : end]))
            first = end
        del received[:first]
        return messages
