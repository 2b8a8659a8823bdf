"""Servers that do what a test says, and a router before them, all in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from hetero_llm.server.router.router import Router
from hetero_llm.server.router.settings import RouterSettings, read_addresses

PATIENCE = 120.0  # seconds; only a hang comes near


@dataclass
class Seen:
    """One request as a replica got it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for known, value in self.headers if known == name), None)


Handler = Callable[[Seen, asyncio.StreamWriter], Awaitable[None]]


def answer(body: bytes, *, status: str = "200 OK", headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


@dataclass
class FakeReplica:
    """A server whose answers a test may replace. GET /health says whether it is well."""

    name: str
    healthy: bool = True
    handler: Handler | None = None
    seen: list[Seen] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    num_lost: int = 0
    port: int = 0
    _server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.drop()

    def drop(self) -> None:
        """Ends all connections."""
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, target, _ = head[0].split(" ")
                headers = [tuple(line.split(": ", 1)) for line in head[1:] if line]
                length = next((int(v) for n, v in headers if n == "content-length"), 0)
                seen = Seen(method, target, headers, await reader.readexactly(length))
                if target == "/health":
                    status = "200 OK" if self.healthy else "503 Service Unavailable"
                    writer.write(answer(b"", status=status))
                    continue
                self.seen.append(seen)
                if self.handler is None:
                    writer.write(answer(self.name.encode()))
                else:
                    handling = asyncio.ensure_future(self.handler(seen, writer))
                    gone = asyncio.ensure_future(reader.read(1))
                    await asyncio.wait((handling, gone), return_when=asyncio.FIRST_COMPLETED)
                    if gone.done():
                        self.num_lost += 1
                        handling.cancel()
                        return
                    gone.cancel()
                    with suppress(asyncio.CancelledError):
                        await gone
                    await handling
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@dataclass
class Routed:
    """A running router."""

    router: Router
    replicas: list[FakeReplica]
    port: int
    http: httpx.AsyncClient

    async def post(self, prompt: str = "x", **rest: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": prompt}, **rest)

    async def raw(self, data: bytes) -> bytes:
        """All that comes over a connection to which these bytes were sent, until its end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            return await asyncio.wait_for(reader.read(), PATIENCE)
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    def metric(self, name: str, *labels: str) -> float:
        found = 0.0
        for line in self.router.metrics.text().decode().splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == f"hetero_llm:router_{name}" and all(
                label in series for label in labels
            ):
                found += float(value)
        return found


@asynccontextmanager
async def routed(count: int = 2, **settings: Any) -> AsyncIterator[Routed]:
    """A router before this many replicas; nothing probes them, unless a test does."""
    replicas = [FakeReplica(f"r{number}") for number in range(count)]
    for replica in replicas:
        await replica.start()
    urls = [f"http://127.0.0.1:{one.port}" for one in replicas]
    router = Router(RouterSettings(replicas=read_addresses(urls), **settings))
    server = await asyncio.get_running_loop().create_server(router.connection, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        base = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=base, timeout=PATIENCE, trust_env=False) as http:
            yield Routed(router, replicas, port, http)
    finally:
        server.close()
        router.close()
        for replica in replicas:
            await replica.stop()


async def until(condition: Callable[[], bool]) -> None:
    """Lets the event loop run until the condition holds."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)
