"""One client's connection: what has to be bounded before a request reaches the application.

uvicorn gives a client for ever to send a request's head, and takes any number of connections. Both
are answered here in OpenAI's form, and so is what is no HTTP at all.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from hetero_llm.core.errors import ConfigError
from hetero_llm.server.errors import ApiError, busy

logger = logging.getLogger(__name__)

CROWDED = "crowded"
"""In the ASGI state of requests that came over a connection more than there should be."""
_SPARE_CONNECTIONS = 64
"""Taken above the limit, so that probes of a full server's health are answered."""
_RETRY_SECONDS = 1.0
_OTHER_FILES = 128
"""Descriptors that are not connections: the engine's link, libraries, files that are read."""
_FEWEST_CONNECTIONS = 8
_MOST_NOT_SENT = 128 << 10  # bytes
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", None)


class _Later:
    """What uvicorn logs before an answer's first byte, logged when what there is has been written:
    making a line takes longer than making the first token's frame."""

    def __init__(self, logger: logging.Logger) -> None:
        self._info = logger.info

    def info(self, text: str, *values: Any) -> None:
        asyncio.get_running_loop().call_soon(self._info, text, *values)


class Connection(H11Protocol):
    """uvicorn's connection with a clock on heads of requests and a place in a bounded set.

    A head has `header_seconds` from the connection's start, or from the first byte after the
    request before. What takes longer gets a 408, or, where not a byte came, just the end.
    """

    header_seconds: float
    most: int
    refused: Callable[[str], None]

    _head_timer: asyncio.TimerHandle | None = None
    _turned_away = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.access_logger = _Later(self.access_logger)  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most + _SPARE_CONNECTIONS:
            self._turned_away = True
            self._answer(crowded(self.most))
            self.refused("too_many_connections")
            return
        if len(self.connections) > self.most:
            self.app_state = {**self.app_state, CROWDED: self.most}
        self._start_clock()

    def data_received(self, data: bytes) -> None:
        if self._turned_away:
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._start_clock()
        else:
            self._stop_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._answer(ApiError(400, "invalid_http", "what came is not a valid HTTP request"))

    def _start_clock(self) -> None:
        """More bytes of the same head do not give it more time."""
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.header_seconds, self._head_too_slow)

    def _stop_clock(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_too_slow(self) -> None:
        self._head_timer = None
        if self.transport.is_closing() or self.conn.their_state is not h11.IDLE:
            return
        if not self.conn.trailing_data[0]:
            self.transport.close()
            return
        seconds = f"{self.header_seconds:g} s"
        self._answer(ApiError(408, "request_timeout", f"the headers took longer than {seconds}"))
        self.refused("slow_headers")

    def _answer(self, error: ApiError) -> None:
        """Writes an error without an application, and closes."""
        body = error.body()
        headers = {
            **error.headers,
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        raw = [(name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()]
        try:
            reason = HTTPStatus(error.status).phrase.encode("ascii")
            head = self.conn.send(
                h11.Response(status_code=error.status, headers=raw, reason=reason)
            )
        except h11.LocalProtocolError:  # in the middle of an answer: there is no place for another
            self.transport.abort()
            return
        self.transport.write((head or b"") + body)
        self.transport.close()


def connection_class(
    *, header_seconds: float, most: int, refused: Callable[[str], None]
) -> type[Connection]:
    """The class that uvicorn makes connections of.

    Args:
        header_seconds: that a client has for a request's head.
        most: connections at once.
        refused: called with the cause when one is turned away here.
    """
    values = {"header_seconds": header_seconds, "most": most, "refused": staticmethod(refused)}
    return type("BoundConnection", (Connection,), values)


def crowded(most: int) -> ApiError:
    """The answer to a request over a connection above the limit."""
    error = busy("too_many_connections", f"more than {most} connections are open", _RETRY_SECONDS)
    error.headers["connection"] = "close"
    return error


def connections_possible(wanted: int) -> int:
    """`wanted`, or fewer if this process may not open as many files; says so in the log.

    Raises the soft limit on open files as far as needed and allowed.

    Raises:
        ConfigError: there is room for next to none.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _SPARE_CONNECTIONS + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    possible = min(wanted, soft - _SPARE_CONNECTIONS - _OTHER_FILES)
    if possible < min(wanted, _FEWEST_CONNECTIONS):
        reason = f"needs {needed} open files, this process may have {hard}; see ulimit -n"
        raise ConfigError("max_connections", wanted, reason)
    if possible < wanted:
        logger.warning(
            "%d connections at once instead of %d: this process may open only %d files",
            possible,
            wanted,
            soft,
        )
    return possible


def bound_kernel_buffers(listener: socket.socket) -> None:
    """Connections of this socket leave at most 128 KiB unsent with the kernel, which would take
    megabytes for a client that reads slowly."""
    if _TCP_NOTSENT_LOWAT is not None:
        listener.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _MOST_NOT_SENT)
