"""Server-sent events: one stream's wire, and the watch over all of them.

Rules of the wire: an event is written whole or not at all; a stream ends with `[DONE]`, after an
error frame if something went wrong, or is cut off where even that cannot be trusted. A clean end
without a finish reason would be a silent truncation.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from typing import Any

import msgspec
from starlette.types import Send

from hetero_llm.server.errors import ApiError

_ENCODER = msgspec.json.Encoder()
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_COMMENT = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"
_CHECKS_PER_INTERVAL = 15


def event(payload: Any) -> bytes:
    """One frame. JSON has no raw line ends, so one data line is enough."""
    return b"data: " + _ENCODER.encode(payload) + b"\n\n"


class EventStream:
    """Writes one stream. The status line goes out with the first frame, so that mistakes found
    before it are answered with a status of their own.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._task: asyncio.Task[Any] | None = None
        self._lock = asyncio.Lock()
        self._closed = False
        self._writing_since: float | None = None
        self._last = time.monotonic()
        self.started = False
        self.stalled = False

    def runs_in_this_task(self) -> None:
        """This task is what ends when the client takes nothing any more."""
        self._task = asyncio.current_task()

    def has_ended(self) -> None:
        """Forgets the task. One that was cancelled refers to us through its traceback: all of its
        request would wait for a collection of garbage."""
        self._task = None

    async def send(self, payload: Any) -> None:
        """Writes a payload as one event; waits while the client's buffers are full."""
        await self._write(event(payload))

    async def done(self) -> None:
        """The stream's clean end."""
        await self._write(_DONE, last=True)

    async def fail(self, error: ApiError, *, clean: bool) -> None:
        """Tells the client what went wrong. Not `clean`: the connection is to be cut off."""
        await self._write(b"data: " + error.body() + b"\n\n")
        if clean:
            await self.done()

    async def keep_alive(self) -> None:
        """Writes a comment, which clients skip."""
        with contextlib.suppress(OSError):  # the client has left; the stream's own task sees to it
            await self._write(_COMMENT)

    def is_silent(self, now: float, seconds: float) -> bool:
        return self._writing_since is None and now - self._last >= seconds

    def drop_if_stalled(self, now: float, seconds: float) -> None:
        """Gives up on a client that has let one write wait for so long."""
        since = self._writing_since
        if since is not None and now - since >= seconds and not self.stalled:
            self.stalled = True
            if self._task is not None:
                self._task.cancel()

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        async with self._lock:
            if self._closed:
                return
            self._writing_since = time.monotonic()
            try:
                if not self.started:
                    self.started = True
                    await self._send(
                        {"type": "http.response.start", "status": 200, "headers": list(_HEADERS)}
                    )
                await self._send(
                    {"type": "http.response.body", "body": data, "more_body": not last}
                )
            finally:
                self._last = time.monotonic()
                self._writing_since = None
            self._closed = last


class Watch:
    """One task for all open streams: comments into silent ones, an end to stalled ones.

    It looks at the streams some times per interval, so nothing is spent per event.

    Args:
        keep_alive_seconds: of silence; 0 is never.
        write_seconds: see `Limits`.
    """

    def __init__(self, *, keep_alive_seconds: float, write_seconds: float) -> None:
        self._keep_alive = keep_alive_seconds or math.inf
        self._write = write_seconds
        self._streams: set[EventStream] = set()
        self._task: asyncio.Task[None] | None = None
        self._comments: set[asyncio.Task[None]] = set()

    def add(self, stream: EventStream) -> None:
        self._streams.add(stream)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def remove(self, stream: EventStream) -> None:
        self._streams.discard(stream)

    async def _run(self) -> None:
        """Ends when no stream is left."""
        pause = min(self._keep_alive, self._write) / _CHECKS_PER_INTERVAL
        while self._streams:
            await asyncio.sleep(pause)
            now = time.monotonic()
            for stream in tuple(self._streams):
                stream.drop_if_stalled(now, self._write)
                if stream.is_silent(now, self._keep_alive):
                    # A task each: one client's full buffers must not hold up the others'.
                    task = asyncio.get_running_loop().create_task(stream.keep_alive())
                    self._comments.add(task)
                    task.add_done_callback(self._comments.discard)
