"""Messages between the engine's process and one rank outside of steps: settings, readiness, errors.

A message is a length of four bytes and a value in its plain form.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Any

from hetero_llm.core.errors import ConfigError, HeteroLLMError, ModelLoadError, RankDeadError
from hetero_llm.distributed.plain_form import PlainForm

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class RankReached:
    """A rank has come to a point of its start, which has a name."""

    point: str


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A rank ends with an error.

    Attributes:
        kind: name of the error's class.
        field, value, reason: of a ConfigError; else the message is `reason`.
    """

    kind: str
    reason: str
    field: str = ""
    value: Any = None

    @staticmethod
    def of(error: BaseException) -> RankFailed:
        kind = type(error).__name__
        if isinstance(error, ConfigError):
            plain = (type(None), bool, int, float, str)
            value = error.value if isinstance(error.value, plain) else repr(error.value)
            return RankFailed(kind, error.reason, error.field, value)
        return RankFailed(kind, str(error))

    def as_error(self, rank: int) -> HeteroLLMError:
        """The error as the engine's process raises it: a user's mistake as itself."""
        if self.kind == ConfigError.__name__:
            return ConfigError(self.field, self.value, f"rank {rank}: {self.reason}")
        if self.kind == ModelLoadError.__name__:
            return ModelLoadError(f"rank {rank}: {self.reason}")
        return RankDeadError(f"rank {rank} has failed: {self.kind}: {self.reason}")


_FORM = PlainForm(RankReached, RankFailed)


class ControlSocket:
    """One end of a socket pair. Sends wait for room; receives do not wait.

    Args:
        end: the socket, owned by this object from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._unread = bytearray()

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: RankReached | RankFailed) -> None:
        """Raises OSError: the other end has closed."""
        self.send_bytes(_FORM.write(message))

    def send_bytes(self, data: bytes) -> None:
        """Raises OSError: the other end has closed."""
        self._end.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> list[RankReached | RankFailed]:
        """The messages that have come."""
        return [_FORM.read(data) for data in self._arrived()]

    def receive_bytes(self) -> bytes:
        """Waits for one message.

        Raises:
            EOFError: the other end has closed.
        """
        while (found := self._take()) is None:
            data = self._end.recv(_CHUNK)
            if not data:
                raise EOFError
            self._unread += data
        return found

    def _arrived(self) -> list[bytes]:
        while True:
            try:
                data = self._end.recv(_CHUNK, socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:  # reset by the other end
                break
            if not data:
                break
            self._unread += data
        found = []
        while (one := self._take()) is not None:
            found.append(one)
        return found

    def _take(self) -> bytes | None:
        """The first whole message of what was read; None if there is none."""
        size = _LENGTH.size
        if len(self._unread) < size:
            return None
        end = size + _LENGTH.unpack_from(self._unread)[0]
        if len(self._unread) < end:
            return None
        data = bytes(self._unread[size:end])
        del self._unread[:end]
        return data

    def close(self) -> None:
        self._end.close()
