"""The router's side of one server: its connections, whether it serves, and requests on their way.

A request is sent whole, since its body was read for the choice; an answer passes through piece by
piece. A replica that fails is left out (circuit breaker) until a probe finds it well again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import httptools

from hetero_llm.server.router.http_heads import Headers, value_of
from hetero_llm.server.router.settings import ReplicaAddress

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 4.0
"""A connection unused for longer is not used again: servers close theirs after 5 s or more."""
_MOST_IDLE = 256
_MOST_HEAD_BYTES = 64 << 10
_MOST_PROBE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """An answer's head; `headers` have names in lower case."""

    status: int
    headers: Headers


class ReplicaError(Exception):
    """A replica did not answer, or broke off.

    Attributes:
        stale: the connection had served before and ended without a byte: another one may work.
    """

    def __init__(self, reason: str, *, stale: bool = False) -> None:
        super().__init__(reason)
        self.stale = stale


class BodySink(Protocol):
    """Receives an answer's body."""

    def write_pieces(self, pieces: list[bytes]) -> None: ...


class Exchange:
    """One request and its answer over one connection.

    Attributes:
        head: the answer's head; raises ReplicaError.
        done: set when the answer has come whole; raises ReplicaError.
        is_over: the answer has come whole, or never will.
    """

    def __init__(self, connection: ReplicaConnection) -> None:
        loop = asyncio.get_running_loop()
        self._connection = connection
        self.head: asyncio.Future[ResponseHead] = loop.create_future()
        self.done: asyncio.Future[None] = loop.create_future()
        self.is_over = False
        self._pieces: list[bytes] = []  # until there is a sink
        self._sink: BodySink | None = None

    def take(self) -> list[bytes]:
        """Returns and clears the pieces that have come so far."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def relay_to(self, sink: BodySink) -> None:
        """Later pieces go to the sink as they come."""
        self._sink = sink

    def pause(self, paused: bool) -> None:
        """Called when the client reads too slowly, and when it has caught up. An answer that has
        come whole leaves the connection alone: it may serve another client by now."""
        if not self.is_over:
            (self._connection.pause if paused else self._connection.resume)()

    def stop(self) -> None:
        """Ends the connection unless the answer has come whole: the replica then stops, too."""
        if not self.is_over:
            self._connection.close()

    def received(self, pieces: list[bytes]) -> None:
        if self._sink is None:
            self._pieces += pieces
        else:
            self._sink.write_pieces(pieces)

    def end(self) -> None:
        """Called when the answer has come whole."""
        self.is_over = True
        if not self.done.done():
            self.done.set_result(None)

    def fail(self, error: ReplicaError) -> None:
        self.is_over = True
        for future in (self.head, self.done):
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as seen: the client may have left


# large: the connection's state, and that of the answer on it.
class ReplicaConnection(asyncio.Protocol):
    """One connection to a replica: one request at a time.

    Args:
        released: called when it is idle again.
        lost: called when it has ended.
    """

    def __init__(
        self,
        released: Callable[[ReplicaConnection], None],
        lost: Callable[[ReplicaConnection], None],
    ) -> None:
        self._released, self._lost = released, lost
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._pieces: list[bytes] = []
        self._has_head = self._ended = self._until_end = self._keeps_alive = False
        self._asked_head = False  # by HEAD: an answer without body, whatever its head says
        self._exchange: Exchange | None = None
        self._transport: asyncio.Transport | None = None
        self._served_before = False
        self._silent = True  # no byte of the answer has come
        self.idle_since = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    @property
    def is_usable(self) -> bool:
        fresh = time.monotonic() - self.idle_since < _IDLE_SECONDS
        return fresh and self._transport is not None and not self._transport.is_closing()

    def start(self, method: bytes, target: bytes, headers: Headers, body: bytes) -> Exchange:
        """Sends a request. `headers`: all of them, the body's length included."""
        assert self._exchange is None and self._transport is not None
        exchange = self._exchange = Exchange(self)
        self._silent, self._asked_head = True, method == b"HEAD"
        lines = [method + b" " + target + b" HTTP/1.1"]
        lines += [name + b": " + value for name, value in headers]
        self._transport.write(b"\r\n".join([*lines, b"", body]))
        return exchange

    def close(self) -> None:
        """Ends the connection, and with it a request under way."""
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """The client reads too slowly."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:  # bytes that nothing asked for
            self.close()
            return
        self._silent = False
        if not self._has_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            exchange.fail(ReplicaError("sent no valid HTTP"))
            self.close()
            return
        if not self._has_head and self._head_bytes > _MOST_HEAD_BYTES:
            exchange.fail(ReplicaError(f"sent a head of over {_MOST_HEAD_BYTES} bytes"))
            self.close()
            return
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            exchange.received(pieces)
        if self._ended:
            self._end(exchange)

    def eof_received(self) -> None:
        if self._exchange is not None and self._has_head and self._until_end:
            self._end(self._exchange)

    def connection_lost(self, exc: Exception | None) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            why = "reset the connection" if exc else "closed the connection"
            exchange.fail(ReplicaError(why, stale=self._served_before and self._silent))
        self._lost(self)

    # -- what the parser calls --------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._ended:  # a second answer: what nothing asked for
            raise ReplicaError("sent two answers")
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # 100 Continue, 103 Early Hints
            return
        assert self._exchange is not None
        self._has_head = True
        self._keeps_alive = self._parser.should_keep_alive()
        headers = self._headers
        self._until_end = not (
            value_of(headers, b"content-length") or value_of(headers, b"transfer-encoding")
        ) and status not in (204, 304)
        if not self._exchange.head.done():
            self._exchange.head.set_result(ResponseHead(status, headers))
        if self._asked_head:
            self._ended = True

    def on_body(self, data: bytes) -> None:
        if not self._asked_head:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        if self._has_head:
            self._ended = True

    # ---------------------------------------------------------------------------------------

    def _end(self, exchange: Exchange) -> None:
        self._exchange = None
        exchange.end()
        self.resume()
        reusable = self._keeps_alive and not (self._asked_head or self._until_end)
        self._has_head = self._ended = self._until_end = False
        self._head_bytes = 0
        if reusable:
            self._served_before = True
            self.idle_since = time.monotonic()
            self._released(self)
        else:
            assert self._transport is not None
            self._transport.close()


class Replica:
    """A server, its idle connections, and whether requests are sent to it.

    Attributes:
        is_up: requests may be sent to it.
    """

    def __init__(
        self,
        address: ReplicaAddress,
        *,
        failures: int,
        connect_seconds: float,
        tls: ssl.SSLContext | None = None,
        recovered: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self.is_up = True
        self.host = address.host_in_url.encode("ascii", "replace") + b":%d" % address.port
        self._tls = tls if address.tls else None
        self._most_failures = failures
        self._connect_seconds = connect_seconds
        self._recovered = recovered
        self._num_failures = 0  # in a row
        self._idle: list[ReplicaConnection] = []
        self._all: set[ReplicaConnection] = set()

    # -- health -----------------------------------------------------------------------------

    def succeeded(self) -> None:
        """Called when the replica has answered."""
        self._num_failures = 0

    def failed(self, reason: str, *, for_certain: bool = False) -> None:
        """Called when the replica did not answer. `for_certain`: it cannot serve at all."""
        self._num_failures += 1
        if self.is_up and (for_certain or self._num_failures >= self._most_failures):
            self.is_up = False
            logger.warning("%s gets no requests: it %s", self.address.name, reason)

    async def probe(self, path: str, seconds: float) -> None:
        """Asks for a path and notes whether the replica serves."""
        try:
            async with asyncio.timeout(seconds):
                status, _ = await self.fetch(b"GET", path.encode(), [], b"")
        except (ReplicaError, TimeoutError) as error:
            reason = str(error) or f"did not answer a probe in {seconds:g} s"
            self.failed(reason)
            return
        if status != 200:
            self.failed(f"answered a probe with status {status}", for_certain=True)
            return
        self._num_failures = 0
        if not self.is_up:
            self.is_up = True
            logger.info("%s gets requests again", self.address.name)
            self._recovered()

    # -- requests ---------------------------------------------------------------------------

    async def fetch(
        self, method: bytes, path: bytes, headers: Headers, body: bytes
    ) -> tuple[int, bytes]:
        """A whole answer of at most 1 MiB: status and body.

        Raises:
            ReplicaError: there is none.
        """
        added = [(b"host", self.host), (b"content-length", b"%d" % len(body))]
        target = self.address.base_path.encode() + path
        for _ in range(2):  # the second time over a new connection
            connection = await self.connect()
            exchange = connection.start(method, target, [*added, *headers], body)
            try:
                head = await exchange.head
                await exchange.done
                answer = b"".join(exchange.take())
                if len(answer) > _MOST_PROBE_BYTES:
                    raise ReplicaError("answered with more than 1 MiB")
                return head.status, answer
            except ReplicaError as error:
                if not error.stale:
                    raise
                self.close_idle()
            finally:
                exchange.stop()
        raise ReplicaError("closed the connection")

    async def connect(self) -> ReplicaConnection:
        """An idle connection, or a new one.

        Raises:
            ReplicaError: none can be opened.
        """
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
            connection.close()
        loop, address = asyncio.get_running_loop(), self.address
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, made = await loop.create_connection(
                    lambda: ReplicaConnection(self._release, self._forget),
                    address.host,
                    address.port,
                    ssl=self._tls,
                )
        except TimeoutError:
            raise ReplicaError(f"took no connection in {self._connect_seconds:g} s") from None
        except OSError as error:
            raise ReplicaError(f"took no connection: {error.strerror or error}") from None
        self._all.add(made)
        return made

    def close_idle(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def close(self) -> None:
        """Ends all connections."""
        for connection in list(self._all):
            connection.close()

    def _release(self, connection: ReplicaConnection) -> None:
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.close()

    def _forget(self, connection: ReplicaConnection) -> None:
        self._all.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)
