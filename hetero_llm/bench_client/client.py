"""Sends requests over HTTP and times their answers. Uses aiohttp, whose parser is in C: the client
must not be the bottleneck of a measurement."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hetero_llm.bench_client.errors import ServerError
from hetero_llm.bench_client.sse import SseDecoder
from hetero_llm.bench_client.wire_format import (
    DONE,
    Piece,
    Usage,
    read_event,
    refusal,
)
from hetero_llm.core.errors import ConfigError, HeteroLLMError

if TYPE_CHECKING:
    import aiohttp

Clock = Callable[[], float]
"""Monotonic seconds."""

_CONNECT_SECONDS = 10.0
_COUNTED_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Server:
    """The server of the requests. `url` has no final slash and no `/v1`; `timeout`: maximum seconds
    without a received byte; `max_answer_bytes`: of an answer that is no stream; `headers`: of every
    request, besides the key's."""

    url: str
    api_key: str | None = None
    timeout: float = 300.0
    max_answer_bytes: int = 64 * 2**20
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestResult:
    """Times and output of one request. Times are in seconds of one clock.

    Attributes:
        arrival: when the load scheduled the request.
        start: when it was sent.
        first, last: when the first and the last output arrived.
        itls: durations between events with output.
        error: None if the answer is complete. Output before an error is kept but not counted.
    """

    arrival: float
    start: float
    first: float | None
    last: float | None
    itls: tuple[float, ...]
    text: str
    num_ids: int
    usage: Usage | None
    finish_reason: str | None
    error: str | None

    @property
    def ok(self) -> bool:
        return self.error is None


def base_url(url: str) -> str:
    """`url` without a final slash or `/v1`, which users often copy along.

    Raises:
        ConfigError: it is not an http or https address.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("base_url", url, "must be like http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


@asynccontextmanager
async def open_session(server: Server) -> AsyncIterator[aiohttp.ClientSession]:
    """Opens a session with one connection for each concurrent request.

    Raises:
        HeteroLLMError: aiohttp is not installed.
    """
    try:
        import aiohttp
    except ModuleNotFoundError:
        raise HeteroLLMError(
            "module 'aiohttp' is not installed; pip install 'hetero-llm[bench]' brings it"
        ) from None
    key = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    headers = {**key, **server.headers}
    async with aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_SECONDS, sock_read=server.timeout
        ),
        read_bufsize=2**20,
    ) as session:
        yield session


async def first_model(session: aiohttp.ClientSession, server: Server) -> str:
    """The name of the first model that the server offers.

    Raises:
        ServerError: it cannot be reached, refuses, or offers none.
    """
    answer = await get_json(session, server, "/v1/models")
    models = answer.get("data") if isinstance(answer, dict) else None
    name = models[0].get("id") if models and isinstance(models[0], dict) else None
    if not isinstance(name, str):
        raise ServerError(f"{server.url}/v1/models names no model; give one with --model")
    return name


async def get_json(session: aiohttp.ClientSession, server: Server, path: str) -> Any:
    """The JSON answer to a GET; raises `ServerError`."""
    async with _translated(server), session.get(server.url + path) as response:
        body = await response.read()
    return _decoded(response.status, body, path)


async def count_tokens(
    session: aiohttp.ClientSession, server: Server, model: str, texts: Sequence[str]
) -> list[int] | None:
    """Number of tokens of each text by the server's `/tokenize`; None if the server has none."""
    limit = asyncio.Semaphore(_COUNTED_AT_ONCE)

    async def count(text: str) -> int:
        if not text:
            return 0
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        url = f"{server.url}/tokenize"
        async with limit, _translated(server), session.post(url, json=body) as response:
            data = await response.read()
        answer = _decoded(response.status, data, "/tokenize")
        number = answer.get("count") if isinstance(answer, dict) else None
        if type(number) is not int:
            raise ServerError("/tokenize gave no count")
        return number

    counts = await asyncio.gather(*map(count, texts), return_exceptions=True)
    for found in counts:
        if isinstance(found, BaseException) and not isinstance(found, ServerError):
            raise found
    return None if any(isinstance(found, ServerError) for found in counts) else list(counts)  # type: ignore[arg-type]


def _decoded(status: int, body: bytes, path: str) -> Any:
    if status != 200:
        raise refusal(status, body)
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ServerError(f"{path} did not answer with JSON") from None


@asynccontextmanager
async def _translated(server: Server) -> AsyncIterator[None]:
    """Raises aiohttp's errors as `ServerError`."""
    import aiohttp

    try:
        yield
    except aiohttp.ClientConnectorError as error:
        reason = os.strerror(error.errno) if error.errno else str(error.os_error)
        raise ServerError(f"cannot connect to {server.url}: {reason}; is it running?") from None
    except TimeoutError:
        raise ServerError(f"no answer from {server.url} within the time limit") from None
    except (aiohttp.ClientError, OSError) as error:
        raise ServerError(f"the connection broke: {str(error) or type(error).__name__}") from None


async def pieces(
    session: aiohttp.ClientSession,
    server: Server,
    path: str,
    body: Mapping[str, Any],
    *,
    received: Callable[[], None] = lambda: None,
) -> AsyncGenerator[Piece, None]:
    """Sends one request and yields the parts of its answer; calls `received` when bytes arrive.

    Closing the iterator closes the connection, upon which the server stops.

    Raises:
        ServerError: no connection, a status other than 200, an error frame, or a stream that
            ended before the answer did.
    """
    async with _translated(server), session.post(server.url + path, json=body) as response:
        if response.status != 200:
            raise refusal(response.status, await response.content.read(2**16))
        if response.content_type != "text/event-stream":
            data = await _whole(response, server.max_answer_bytes)
            received()
            yield read_event(data)
            return
        async for piece in _events(response, received):
            yield piece


async def _events(
    response: aiohttp.ClientResponse, received: Callable[[], None]
) -> AsyncIterator[Piece]:
    decoder = SseDecoder()
    finished = False
    async for data in response.content.iter_any():
        received()
        for event in decoder.feed(data):
            if event == DONE:
                return
            piece = read_event(event)
            finished = finished or piece.finish_reason is not None
            yield piece
    # A clean end does not show success: a proxy or a dying server closes the connection cleanly.
    if not finished or not decoder.is_whole:
        raise ServerError("the stream ended before the answer did (no finish_reason, no [DONE])")


async def _whole(response: aiohttp.ClientResponse, most: int) -> str:
    data = bytearray()
    async for part in response.content.iter_any():
        data += part
        if len(data) > most:
            raise ServerError(f"the answer is longer than {most} bytes")
    return data.decode("utf-8", "replace")


async def measure(
    session: aiohttp.ClientSession,
    server: Server,
    path: str,
    body: Mapping[str, Any],
    *,
    clock: Clock,
    arrival: float | None = None,
) -> RequestResult:
    """Sends one request and times its answer. Failures are in the result, not raised."""
    start = now = clock()

    def received() -> None:
        nonlocal now
        now = clock()

    first: float | None = None
    last: float | None = None
    itls: list[float] = []
    texts: list[str] = []
    num_ids = 0
    usage: Usage | None = None
    reason: str | None = None
    error: str | None = None
    try:
        async for piece in pieces(session, server, path, body, received=received):
            usage = piece.usage if usage is None else usage.later(piece.usage)
            reason = piece.finish_reason or reason
            if piece.text or piece.num_ids:
                texts.append(piece.text)
                num_ids += piece.num_ids
                if last is None:
                    first = now
                else:
                    itls.append(now - last)
                last = now
            elif piece.finish_reason:
                # A last event without text: a stop token, or output without any text.
                first = now if first is None else first
                last = now
    except ServerError as failure:
        error = str(failure)
    return RequestResult(
        arrival=start if arrival is None else arrival,
        start=start,
        first=first,
        last=last,
        itls=tuple(itls),
        text="".join(texts),
        num_ids=num_ids,
        usage=usage,
        finish_reason=reason,
        error=error,
    )
