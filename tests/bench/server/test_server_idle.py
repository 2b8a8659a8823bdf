"""The client of the idle-streams bench ends whatever a server does, and counts all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from bench.server import server_idle
from bench.server.server_idle import Load, short_requests

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
LIMIT = 120.0  # seconds; only a hang comes near
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]


def load_on(handle: Handler, *, rate: float = 200.0) -> Load:
    """Half a second of requests, each of which `handle` is called for."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            handle(reader, writer)

    async def run() -> Load:
        async with asyncio.timeout(LIMIT):
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            try:
                return await short_requests(port, rate, 0.5, seed=1)
            finally:
                server.close()

    return asyncio.run(run())


def test_all_are_answered() -> None:
    load = load_on(lambda _, writer: writer.write(ANSWER))
    assert load.statuses["200"] == len(load.latencies) > 50


def test_connections_that_the_server_has_closed_are_not_used_again() -> None:
    """As servers close connections that were idle for a while: such a run did not end."""

    def answer_and_close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(ANSWER)
        writer.close()

    load = load_on(answer_and_close, rate=50.0)
    assert sum(load.statuses.values()) == len(load.latencies) > 10
    assert load.statuses["200"] > 0.8 * len(load.latencies)
    assert load.statuses.keys() <= {"200", "closed"}


def test_no_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_idle, "PATIENCE", 0.05)
    load = load_on(lambda *_: None, rate=50.0)
    assert load.statuses["none"] == len(load.latencies) > 10


def test_no_connection_is_an_error() -> None:
    async def run() -> Load:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        return await short_requests(port, 50.0, 0.2, seed=1)

    load = asyncio.run(run())
    assert load.statuses["refused"] == len(load.latencies) > 3
