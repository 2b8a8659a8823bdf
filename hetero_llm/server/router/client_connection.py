"""The router's side of one client: requests in, answers out, limits before a request."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httptools

from hetero_llm.server.errors import ApiError, error_form, internal
from hetero_llm.server.router.http_heads import (
    LAST_CHUNK,
    Framing,
    Headers,
    response_head,
    value_of,
)

logger = logging.getLogger(__name__)

_MOST_HEAD_BYTES = 64 << 10
_MOST_HEADERS = 128
_MOST_EARLY = 16
"""Whole requests that a client sends before its first answer has ended."""
_KEEP_ALIVE_SECONDS = 75.0
_BODY_TIMES = 6  # a body may take this many times as long as a head
_METHODS = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"))


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A whole request. `target`: path and query; `headers` have names in lower case."""

    method: bytes
    target: bytes
    headers: Headers
    body: bytes
    http_1_0: bool

    @property
    def path(self) -> str:
        return self.target.partition(b"?")[0].decode("latin-1")


# large: one owner of a client's connection in all its states.
class ClientConnection(asyncio.Protocol):
    """One client's connection: a request is read whole, answered, and then the next one is read.

    Args:
        answer: called with each request; it writes the answer into this connection.
        opened, closed: called at the connection's beginning and end.
        header_seconds, body_bytes: see `RouterSettings`.

    Attributes:
        busy: a request is being answered.
        close_after: the connection ends with the present answer.
    """

    def __init__(
        self,
        answer: Callable[[ClientConnection, ClientRequest], Awaitable[None]],
        *,
        opened: Callable[[ClientConnection], None],
        closed: Callable[[ClientConnection], None],
        header_seconds: float,
        body_bytes: int,
    ) -> None:
        self._answer, self._opened, self._closed = answer, opened, closed
        self._header_seconds, self._most_body = header_seconds, body_bytes
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._in_head = self._keeps_alive = True
        self._head_bytes = 0
        self._refused = False
        self._early: deque[tuple[ClientRequest, bool]] = deque()
        self.on_message_begin()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._on_pause: Callable[[bool], None] = lambda paused: None
        self._paused = False
        self._framing = Framing()
        self._begun = False
        self.close_after = False
        self.peer = "unknown"

    @property
    def busy(self) -> bool:
        return self._task is not None

    # -- what asyncio calls -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        address = transport.get_extra_info("peername")
        if isinstance(address, tuple) and address:
            self.peer = str(address[0])
        self._start_timer(self._header_seconds)
        self._opened(self)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
            if self._in_head and self._head_bytes > _MOST_HEAD_BYTES:
                raise ApiError(431, "headers_too_large", f"at most {_MOST_HEAD_BYTES} bytes")
        except httptools.HttpParserUpgrade:
            self._refuse(ApiError(400, "invalid_http", "no other protocol is spoken here"))
        except httptools.HttpParserError as error:
            # What a callback has raised comes as the cause of the parser's error.
            cause = error.__context__
            if not isinstance(cause, ApiError):
                cause = ApiError(400, "invalid_http", "what came is not a valid HTTP request")
            self._refuse(cause)
        except ApiError as error:
            self._refuse(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._task is not None:
            self._task.cancel()
        self._closed(self)

    def pause_writing(self) -> None:
        self._paused = True
        self._on_pause(True)

    def resume_writing(self) -> None:
        self._paused = False
        self._on_pause(False)

    # -- what the parser calls --------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_head = True
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._length = 0

    def on_url(self, data: bytes) -> None:
        self._target += data

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))
        if len(self._headers) > _MOST_HEADERS:
            raise ApiError(431, "headers_too_large", f"at most {_MOST_HEADERS} headers")

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        self._stop_timer()
        parser = self._parser
        self._keeps_alive = parser.should_keep_alive()
        if parser.get_method() not in _METHODS:
            raise ApiError(501, "method_not_supported", "this method is not supported")
        if parser.get_http_version() not in ("1.0", "1.1"):
            text = "only HTTP/1.1 and 1.0 are supported"
            raise ApiError(505, "http_version_not_supported", text)
        if not _is_path(self._target):
            raise ApiError(400, "invalid_http", "the target of a request must be a path")
        names = [name for name, _ in self._headers]
        if names.count(b"host") > 1 or any(b"\n" in value for _, value in self._headers):
            raise ApiError(400, "invalid_http", "what came is not a valid HTTP request")
        length = value_of(self._headers, b"content-length")
        if b"transfer-encoding" in names:
            if length or value_of(self._headers, b"transfer-encoding").lower() != b"chunked":
                text = "a body has a Content-Length or is chunked, not both nor anything else"
                raise ApiError(400, "invalid_http", text)
        elif length and int(length) > self._most_body:
            raise self._too_large()
        if self._task is None:
            self._start_timer(self._header_seconds * _BODY_TIMES)
            if value_of(self._headers, b"expect").lower() == b"100-continue":
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._length += len(data)
        if self._length > self._most_body:
            raise self._too_large()
        self._body.append(data)

    def on_message_complete(self) -> None:
        self._stop_timer()
        parser = self._parser
        old = parser.get_http_version() == "1.0"
        request = ClientRequest(
            parser.get_method(), self._target, self._headers, b"".join(self._body), old
        )
        last = old or not self._keeps_alive
        if self._task is None:
            self._start_answer(request, last)
        elif len(self._early) < _MOST_EARLY:
            self._early.append((request, last))
        else:
            self._transport.abort()

    # -- requests ---------------------------------------------------------------------------

    def _too_large(self) -> ApiError:
        text = f"a request may have {self._most_body} bytes at most"
        return ApiError(413, "request_too_large", text)

    def _start_answer(self, request: ClientRequest, last: bool) -> None:
        self.close_after |= last
        self._begun = False
        self._task = self._loop.create_task(self._run(request))

    async def _run(self, request: ClientRequest) -> None:
        try:
            await self._answer(self, request)
        except ApiError as error:
            self._send_error(error, request)
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("a request could not be passed on")
            self._send_error(internal("of the router"), request)
        self._task = None
        self._on_pause = lambda paused: None
        if self.close_after:
            self._transport.close()
        elif not self._transport.is_closing():
            self._next()

    def _next(self) -> None:
        if self._early:
            self._start_answer(*self._early.popleft())
        elif self._refused:
            self._transport.close()
        else:
            self._start_timer(_KEEP_ALIVE_SECONDS)

    # -- answers ----------------------------------------------------------------------------

    def begin(
        self,
        status: int,
        headers: Headers,
        framing: Framing,
        pieces: list[bytes],
        *,
        on_pause: Callable[[bool], None] = lambda paused: None,
    ) -> None:
        """Sends an answer's head and the beginning of its body.

        Args:
            on_pause: called with True when the client reads too slowly, and with False when it has
                caught up.
        """
        self._begun = True
        self._framing = framing
        self.close_after |= framing.closes
        head = response_head(status, headers, framing, close=self.close_after)
        self._transport.write(head + framing.frame(pieces))
        self._on_pause = on_pause
        if self._paused:
            on_pause(True)

    def write_pieces(self, pieces: list[bytes]) -> None:
        """Sends more of the body."""
        self._transport.write(self._framing.frame(pieces))

    def finish(self) -> None:
        """Ends the answer."""
        if self._framing.chunked:
            self._transport.write(LAST_CHUNK)

    def break_off(self) -> None:
        """Ends the connection in the middle of an answer, so that the client sees that it is not
        whole."""
        self.close_after = True
        self._transport.abort()

    def send(
        self, status: int, content_type: bytes, body: bytes, *more: tuple[bytes, bytes]
    ) -> None:
        """Sends a whole answer."""
        length = (b"content-length", b"%d" % len(body))
        self.begin(status, [(b"content-type", content_type), length, *more], Framing(), [body])

    def _send_error(self, error: ApiError, request: ClientRequest) -> None:
        if self._begun:
            self.break_off()
            return
        body = b"" if request.method == b"HEAD" else error.body(error_form(request.path))
        more = [(name.encode(), value.encode()) for name, value in error.headers.items()]
        self.send(error.status, b"application/json", body, *more)

    def _refuse(self, error: ApiError) -> None:
        """Answers what is no request that could be served, and ends the connection; behind answers
        to earlier requests it ends without a word."""
        self._stop_timer()
        self._refused = True
        if self._task is None:
            self.close_after = True
            self.send(error.status, b"application/json", error.body())
            self._transport.close()

    # -- time limits ------------------------------------------------------------------------

    def close_if_idle(self) -> None:
        """Called when the router drains."""
        self.close_after = True
        if self._task is None:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(seconds, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self._task is None:
            self._transport.close()


def _is_path(target: bytes) -> bool:
    return target[:1] == b"/" and target.isascii() and min(target) > 0x20
