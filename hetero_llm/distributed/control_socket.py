"""Messages between the engine's process and one rank outside of steps: settings, readiness, errors.

A message is a value in its plain form.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

from hetero_llm.core.errors import ConfigError, HeteroLLMError, ModelLoadError, RankDeadError
from hetero_llm.distributed.value_codec import ValueCodec
from hetero_llm.utils.message_socket import MessageSocket


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


_FORM = ValueCodec(RankReached, RankFailed)


class ControlSocket:
    """One end of a socket pair. Sends wait for room; messages to a closed end are dropped.

    Args:
        end: the socket, owned by this object from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = MessageSocket(end)

    def send(self, message: RankReached | RankFailed) -> None:
        self.send_bytes(_FORM.write(message))

    def send_bytes(self, data: bytes) -> None:
        self._socket.send(data)
        self._socket.drain()

    def receive(self) -> list[RankReached | RankFailed]:
        """The messages that have come."""
        return [_FORM.read(data) for data in self._socket.receive()]

    def receive_bytes(self) -> bytes:
        """Waits for one message.

        Raises:
            EOFError: the other end has closed.
        """
        data = self._socket.wait()
        if data is None:
            raise EOFError
        return data

    def close(self) -> None:
        self._socket.close()
