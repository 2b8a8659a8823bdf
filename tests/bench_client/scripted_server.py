"""An HTTP server that does as it is told, byte by byte, and a clock that only scripts move."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any


class FakeClock:
    """Stands still until a script sets `now`. A script that writes and then awaits `was_read`
    knows that the client has looked at the clock since, so no timing is left to chance."""

    def __init__(self) -> None:
        self.now = 0.0
        self._reads = 0
        self._read = asyncio.Event()

    def __call__(self) -> float:
        self._reads += 1
        self._read.set()
        return self.now

    async def advance(self, now: float, write: Callable[[], None]) -> None:
        """Sets the time, writes, and waits until the client took note of it."""
        self.now = now
        before = self._reads
        write()
        while self._reads == before:
            self._read.clear()
            await self._read.wait()


@dataclass
class Request:
    """What came in."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Reply:
    """What goes out; every call is one write."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    closed: bool = field(default=False)

    def head(self, status: int = 200, kind: str = "text/event-stream") -> None:
        self.writer.write(
            f"HTTP/1.1 {status} Word\r\nContent-Type: {kind}\r\n"
            "Transfer-Encoding: chunked\r\n\r\n".encode()
        )

    def raw(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n" % len(data) + data + b"\r\n")

    def event(self, data: Any) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        self.raw(f"data: {text}\n\n".encode())

    def text(self, text: str, finish: str | None = None) -> None:
        """One event of a completion stream."""
        self.event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})

    def usage(self, prompt: int, completion: int) -> None:
        usage = {"prompt_tokens": prompt, "completion_tokens": completion}
        self.event({"choices": [], "usage": usage})

    def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")

    def json(self, answer: Any, status: int = 200) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.writer.write(
            f"HTTP/1.1 {status} Word\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )

    async def client_left(self) -> None:
        """Returns when the client has closed the connection."""
        await self.writer.drain()
        await self.reader.read()
        self.closed = True

    def hang_up(self) -> None:
        """Closes the connection in the middle of an answer."""
        self.writer.close()
        self.closed = True


Script = Callable[[Request, Reply], Awaitable[None]]


async def _serve(
    script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    reply = Reply(reader, writer)
    try:
        while not reply.closed:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, path, _ = head[0].split(" ")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            data = await reader.readexactly(int(headers.get("content-length", 0)))
            request = Request(method, path, headers, json.loads(data) if data else None)
            await script(request, reply)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[str]:
    """The server's address, on the caller's loop."""
    handlers: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(_serve(script, reader, writer))
        handlers.add(task)
        task.add_done_callback(handlers.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(handlers):
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


@contextmanager
def serving_beside(script: Script) -> Iterator[str]:
    """The server's address, on a loop in a thread of its own."""
    ready = threading.Event()
    shared: dict[str, Any] = {}

    async def main() -> None:
        shared["stop"] = asyncio.Event()
        shared["loop"] = asyncio.get_running_loop()
        async with serving(script) as url:
            shared["url"] = url
            ready.set()
            await shared["stop"].wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    ready.wait()
    try:
        yield shared["url"]
    finally:
        shared["loop"].call_soon_threadsafe(shared["stop"].set)
        thread.join()


GENERATION = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


def model_script(
    answer: Script, *, seen: list[Request] | None = None, tokenize: bool = True
) -> Script:
    """A whole server: models, `/tokenize` (which counts words) and `answer` for the rest."""

    async def script(request: Request, reply: Reply) -> None:
        if seen is not None:
            seen.append(request)
        if request.path == "/v1/models":
            reply.json({"object": "list", "data": [{"id": "org/name"}]})
        elif request.path == "/tokenize" and tokenize:
            reply.json({"count": len(request.body["prompt"].split())})
        elif request.path in GENERATION:
            await answer(request, reply)
        else:
            reply.json({"detail": "Not Found"}, 404)

    return script


async def words(request: Request, reply: Reply) -> None:
    """Answers with as many words as tokens were asked for, streamed or not."""
    limit = "max_output_tokens" if request.path.endswith("/responses") else "max_tokens"
    count = request.body.get(limit, 3)
    parts = [f"w{number} " for number in range(count)]
    if request.path.endswith("/responses"):
        return say_response(request, reply, parts)
    if request.path.endswith("/messages"):
        return say_message(request, reply, parts)
    usage = {"prompt_tokens": 5, "completion_tokens": count}
    name = "delta" if "messages" in request.body else "text"
    if not request.body["stream"]:
        reply.json({"choices": [choice(name, "".join(parts), "length")], "usage": usage})
        return
    reply.head()
    for number, part in enumerate(parts):
        reply.event({"choices": [choice(name, part, "length" if number == count - 1 else None)]})
    reply.event({"choices": [], "usage": usage})
    reply.event("[DONE]")
    reply.end()


def say_response(request: Request, reply: Reply, parts: list[str]) -> None:
    """As OpenAI's Responses API."""
    usage = {"input_tokens": 5, "output_tokens": len(parts)}
    cut = {"reason": "max_output_tokens"}
    whole: dict[str, Any] = {"object": "response", "usage": usage, "incomplete_details": cut}
    if not request.body["stream"]:
        content = [{"type": "output_text", "text": "".join(parts)}]
        reply.json({**whole, "output": [{"type": "message", "content": content}]})
        return
    reply.head()
    reply.event({"type": "response.created", "response": {}})
    for part in parts:
        reply.event({"type": "response.output_text.delta", "delta": part})
    reply.event({"type": "response.output_text.done", "text": "".join(parts)})
    reply.event({"type": "response.incomplete", "response": whole})
    reply.end()


def say_message(request: Request, reply: Reply, parts: list[str]) -> None:
    """As Anthropic's Messages API."""
    made = {"output_tokens": len(parts)}
    if not request.body["stream"]:
        content = [{"type": "text", "text": "".join(parts)}]
        usage = {"input_tokens": 5, **made}
        reply.json(
            {"type": "message", "stop_reason": "max_tokens", "content": content, "usage": usage}
        )
        return
    reply.head()
    start = {"usage": {"input_tokens": 1, "cache_read_input_tokens": 4, "output_tokens": 0}}
    reply.event({"type": "message_start", "message": start})
    for part in parts:
        reply.event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": part}})
    reply.event({"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": made})
    reply.event({"type": "message_stop"})
    reply.end()


def choice(name: str, text: str, finish: str | None) -> dict[str, Any]:
    """A choice as it stands in an event."""
    part: Any = {"content": text} if name == "delta" else text
    return {"index": 0, name: part, "finish_reason": finish}
