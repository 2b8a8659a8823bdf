"""Decodes server-sent events from bytes; does no I/O, so tests can split the bytes anywhere."""

from __future__ import annotations

from hetero_llm.bench_client.errors import ServerError

LONGEST_EVENT = 16 * 2**20
"""Maximum bytes of one event; a longer one is an error."""

_BOM = b"\xef\xbb\xbf"


class SseDecoder:
    """Decodes a stream that arrives in pieces of any size into the data of each event.

    Comments and fields other than `data` are ignored, as the standard requires.
    """

    def __init__(self) -> None:
        self._rest = b""  # the beginning of a line
        self._data: list[bytes] = []  # of the event that has begun
        self._size = 0
        self._at_start = True

    def feed(self, piece: bytes) -> list[str]:
        """The data of the events that `piece` completes.

        Raises:
            ServerError: an event is not UTF-8 text, or longer than `LONGEST_EVENT`.
        """
        lines = self._lines(self._rest + piece)
        events = []
        for line in lines:
            if line:
                self._take(line)
            elif self._data:
                events.append(_text(b"\n".join(self._data)))
                self._data, self._size = [], 0
        if self._size + len(self._rest) > LONGEST_EVENT:
            raise ServerError(f"an event of the stream is longer than {LONGEST_EVENT} bytes")
        return events

    @property
    def is_whole(self) -> bool:
        """Whether the bytes so far end between two events."""
        return not self._data and not self._rest.strip(b"\r")

    def _lines(self, received: bytes) -> list[bytes]:
        """The complete lines; keeps the bytes after the last one."""
        if self._at_start:
            if _BOM.startswith(received) and len(received) < len(_BOM):
                self._rest = received
                return []
            received = received.removeprefix(_BOM)
            self._at_start = False
        if b"\r" in received:
            # A carriage return at the end may be the first half of a line end: it is kept back.
            held = received.endswith(b"\r")
            received = received[:-1] if held else received
            received = received.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            received += b"\r" if held else b""
        *lines, self._rest = received.split(b"\n")
        return lines

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._size += len(value)


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ServerError(f"an event of the stream is not UTF-8 text: {error}") from None
