"""Runs the application in a real uvicorn on 127.0.0.1, in a thread with a loop of its own."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from hetero_llm.engine.engine_client import EngineClient
from hetero_llm.server.app import build_app
from hetero_llm.server.context import Context
from hetero_llm.server.settings import ServerSettings

LIMIT = 120.0  # seconds; only a hang comes near


@dataclass
class Served:
    """A running server. `http` sends no key of its own."""

    url: str
    port: int
    engine: Any
    context: Context
    loop: asyncio.AbstractEventLoop
    http: httpx.Client

    def post(self, path: str, body: Any, **rest: Any) -> httpx.Response:
        return self.http.post(path, json=body, **rest)

    def wait(self, condition: Any) -> None:
        """Until `condition()` holds, looked at inside the server's loop."""

        async def poll() -> None:
            while not condition():
                await asyncio.sleep(0.002)

        asyncio.run_coroutine_threadsafe(poll(), self.loop).result(LIMIT)

    def call(self, function: Any) -> None:
        """Calls something in the server's loop and waits for it."""

        async def run() -> None:
            function()

        asyncio.run_coroutine_threadsafe(run(), self.loop).result(LIMIT)


@contextmanager
def serving(
    engine: EngineClient,
    settings: ServerSettings | None = None,
    *,
    send_buffer: int | None = None,
    wrap: type | None = None,
) -> Iterator[Served]:
    """`send_buffer`: bytes that the kernel takes for a client that does not read; `wrap`: ASGI
    middleware."""
    app = build_app(engine, settings or ServerSettings())
    if wrap is not None:
        app.add_middleware(wrap)
    config = uvicorn.Config(
        app,
        http="h11",  # as the server; httptools, the router's parser, refuses unknown methods itself
        log_level="critical",
        lifespan="off",
        h11_max_incomplete_event_size=1 << 18,
    )
    server = uvicorn.Server(config)
    # asyncio turns Nagle's delay off only where a socket says that it is TCP.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    loop = asyncio.new_event_loop()
    started, stop = threading.Event(), asyncio.Event()

    async def run() -> None:
        """What `Server.serve` does, without its ticks of a tenth of a second."""
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listener])
        started.set()
        await stop.wait()
        for one in server.servers:
            one.close()
        for connection in list(server.server_state.connections):
            connection.shutdown()
        for task in server.server_state.tasks:
            task.cancel()
        await asyncio.gather(*server.server_state.tasks, return_exceptions=True)
        app.state.context.tokenizer.close()
        # What still sleeps, such as the watch of the streams, would be destroyed with a message on
        # standard error in the middle of some later test.
        sleeping = asyncio.all_tasks() - {asyncio.current_task()}
        for task in sleeping:
            task.cancel()
        await asyncio.gather(*sleeping, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), daemon=True)
    thread.start()
    assert started.wait(LIMIT)
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, timeout=LIMIT, trust_env=False) as http:
            yield Served(url, port, engine, app.state.context, loop, http)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(LIMIT)
        assert not thread.is_alive()
        listener.close()
        loop.close()


def raw_post(
    served: Served, path: str, body: Any, *, receive_buffer: int | None = None
) -> socket.socket:
    """Sends a request and leaves everything else to the caller, who closes the socket."""
    content = json.dumps(body).encode()
    return raw(served, head(path, len(content)) + content, receive_buffer=receive_buffer)


def raw(served: Served, data: bytes, *, receive_buffer: int | None = None) -> socket.socket:
    """A connection over which these bytes were sent."""
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(LIMIT)
    connection.connect(("127.0.0.1", served.port))
    connection.sendall(data)
    return connection


def received(connection: socket.socket, end: bytes) -> bytes:
    """What comes over a connection up to these bytes."""
    data = b""
    while end not in data:
        piece = connection.recv(1 << 16)
        assert piece, data
        data += piece
    return data


def head(path: str, length: int) -> bytes:
    text = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    return f"{text}content-length: {length}\r\n\r\n".encode()


def events(text: str) -> list[Any]:
    """The data of each event; "[DONE]" as it is, comments left out."""
    found = []
    for frame in text.split("\n\n"):
        if not frame or frame.startswith(":"):
            continue
        assert frame.startswith("data: "), frame
        data = frame.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found
