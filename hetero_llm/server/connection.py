"""One client's connection: the limits that apply before a request reaches the application.

uvicorn gives a client unlimited time to send a request's head, and accepts any number of
connections. Both are limited here, with errors in OpenAI's form; so are bytes that are no HTTP, and
requests whose end a proxy may see elsewhere than we do (RFC 9112, section 6.3).
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
"""Key in the ASGI state of requests over a connection above the limit; its value is the limit."""
_SPARE_CONNECTIONS = 64
"""Connections accepted above the limit, so that a full server still answers health probes."""
_RETRY_SECONDS = 1.0
_OTHER_FILES = 128
"""File descriptors besides connections: the engine's socket, libraries, files."""
_FEWEST_CONNECTIONS = 8
_MOST_HEAD_BYTES = 256 << 10  # above the middleware's own limit, whose error is clearer
_MOST_NOT_SENT = 128 << 10  # bytes
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", None)


class _DelayedLogger:
    """Delays uvicorn's access line, which precedes the first byte of a response, until the event
    loop has sent that byte: formatting the line takes longer than the first token's frame."""

    def __init__(self, logger: logging.Logger) -> None:
        self._info = logger.info

    def info(self, text: str, *values: Any) -> None:
        asyncio.get_running_loop().call_soon(self._info, text, *values)


class StrictHttp(h11.Connection):
    """h11's parser that refuses what h11 lets through: other major versions of HTTP, and two
    statements about the length of one body.

    Attributes:
        refused: The error of the refused request; None before.
    """

    refused: ApiError | None = None

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.refused = _why_refused(event)
            if self.refused is not None:
                raise h11.RemoteProtocolError(self.refused.message)
        return event


def _why_refused(request: h11.Request) -> ApiError | None:
    version = request.http_version.decode("ascii")
    if not version.startswith("1."):
        return ApiError(
            505,
            "http_version_not_supported",
            f"HTTP/{version} is not supported, only HTTP/1.1 and 1.0",
            headers={"x-should-retry": "false"},
        )
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" not in names:
        return None
    if b"content-length" in names:
        reason = "Content-Length and Transfer-Encoding in one request: send one of them"
    elif version == "1.0":
        reason = "HTTP/1.0 has no Transfer-Encoding"
    else:
        return None
    return ApiError(400, "invalid_http", reason)


class Connection(H11Protocol):
    """uvicorn's connection with a time limit on request heads and a limit on connections.

    A head must be complete `header_seconds` after the connection's start, or after its first byte
    on a connection with earlier requests. A later one gets a 408; if no byte came at all, the
    connection is closed.
    """

    header_seconds: float
    most: int
    refused: Callable[[str], None]

    _head_timer: asyncio.TimerHandle | None = None
    _over_limit = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = StrictHttp(h11.SERVER, _MOST_HEAD_BYTES)
        self.access_logger = _DelayedLogger(self.access_logger)  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most + _SPARE_CONNECTIONS:
            self._over_limit = True
            self._refuse(crowded(self.most))
            self.refused("too_many_connections")
            return
        if len(self.connections) > self.most:
            self.app_state = {**self.app_state, CROWDED: self.most}
        self._start_clock()

    def data_received(self, data: bytes) -> None:
        if self._over_limit:
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
        assert isinstance(self.conn, StrictHttp)
        invalid = ApiError(400, "invalid_http", "what came is not a valid HTTP request")
        self._refuse(self.conn.refused or invalid)

    def _start_clock(self) -> None:
        """Starts the head's time limit; further bytes of the same head do not extend it."""
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
        self._refuse(ApiError(408, "request_timeout", f"the headers took longer than {seconds}"))
        self.refused("slow_headers")

    def _refuse(self, error: ApiError) -> None:
        """Writes an error, without the application, and closes the connection."""
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
        except h11.LocalProtocolError:  # in the middle of a response: no other can be sent
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
    """The error for a request over a connection above the limit."""
    error = busy("too_many_connections", f"more than {most} connections are open", _RETRY_SECONDS)
    error.headers["connection"] = "close"
    return error


def connections_possible(wanted: int) -> int:
    """Returns `wanted`, or fewer (logged) if this process may not open as many files.

    Raises the soft limit on open files as far as needed and allowed.

    Raises:
        ConfigError: fewer than 8 connections are possible.
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
    """Limits the kernel's unsent bytes to 128 KiB for each connection of this socket; by default it
    buffers megabytes for a client that reads slowly."""
    if _TCP_NOTSENT_LOWAT is not None:
        listener.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _MOST_NOT_SENT)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket. It does not listen yet: clients cannot connect while the model loads.

    Raises:
        ConfigError: the address is not of this machine, or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError("host", host, f"is no address: {error.strerror or error}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound_kernel_buffers(listener)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        reason = f"{host}:{port} cannot be listened on: {error.strerror}; choose another --port"
        raise ConfigError("port", port, reason) from None
    return listener
