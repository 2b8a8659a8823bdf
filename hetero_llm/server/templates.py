"""Chat templates, rendered in processes that can be killed.

A template is a program by the author of the checkpoint: it may loop or write without end, maybe for
some conversations only, and a thread inside a call of C code cannot be stopped. So worker processes
render, one conversation at a time; a worker that takes too long is killed. A normal conversation
costs two messages over a socket pair, some 0.2 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hetero_llm.server.errors import busy, without_paths, wrong
from hetero_llm.server.template_worker import LENGTH, READY, Job, Rendered, Setup
from hetero_llm.utils.env import child_environment

MODULE = "hetero_llm.server.template_worker"
_START_SECONDS = 60.0
_RETRY_SECONDS = 5.0
_DECODER = msgspec.json.Decoder(Rendered)


class ChatTemplate:
    """One template and the workers that render it; the first one starts when it is needed.

    All methods but `start` and `close` have to be called in one event loop.

    Args:
        text: Jinja, as transformers takes it.
        special_tokens: of the tokenizer, by the names that templates use.
        seconds: time limit of one conversation.
        most_workers: workers at once.
        patience: seconds after which a conversation that waits for a worker starts a new one.
        queue_seconds: after which it is refused, if all workers are busy.
    """

    def __init__(
        self,
        text: str,
        special_tokens: Mapping[str, Any],
        *,
        seconds: float,
        most_workers: int = 4,
        patience: float = 1.0,
        queue_seconds: float = 10.0,
    ) -> None:
        self.text = text
        self._seconds = seconds
        self._most_workers = most_workers
        self._patience, self._queue_seconds = patience, queue_seconds
        plain = {name: _plain(value) for name, value in special_tokens.items()}
        self._setup = msgspec.json.encode(Setup(text, plain, seconds))
        self._workers: set[_Worker] = set()
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._waiting = 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        return [worker.pid for worker in self._workers]

    def mentions(self, name: str) -> bool:
        return name in self.text

    def start(self) -> None:
        """Starts a worker, so that the first conversation finds one ready."""
        if not self._workers:
            self._idle.put_nowait(self._new_worker())

    def close(self) -> None:
        """Ends all workers."""
        for worker in tuple(self._workers):
            self._drop(worker)

    async def render(
        self, messages: Sequence[dict[str, Any]], kwargs: Mapping[str, Any], *, most_chars: int
    ) -> str:
        """Renders a conversation.

        Raises:
            ApiError: 400, the template refuses it, takes too long or writes more than
                `most_chars`; 503, all workers are busy.
        """
        job = msgspec.json.encode(Job(list(messages), dict(kwargs), most_chars))
        rendered = await self._rendered(job)
        if rendered is None:  # the worker may have been killed while idle: try another one
            rendered = await self._rendered(job)
        if rendered is None:
            raise _refused("the process that renders it died")
        if rendered.refused is not None:
            raise _refused(without_paths(rendered.refused))
        return rendered.text

    async def _rendered(self, job: bytes) -> Rendered | None:
        """None if the worker died."""
        worker = await self._take()
        alive = False
        try:
            await worker.ready()
            async with asyncio.timeout(self._seconds):
                rendered = await worker.ask(job)
            alive = not rendered.spent
        except TimeoutError:
            raise _refused(f"it did not end within {self._seconds:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        finally:
            self._give_back(worker, alive=alive)
        return rendered

    async def _take(self) -> _Worker:
        """An idle worker, or a new one: a slow conversation must not block all others. A worker
        that is starting is waited for: on a machine with much to do others would only delay it."""
        if not self._idle.empty():
            return self._idle.get_nowait()
        if not self._workers:
            return self._new_worker()
        self._waiting += 1
        try:
            while True:
                may_start = len(self._workers) < self._most_workers
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(
                        self._patience if may_start else self._queue_seconds
                    ):
                        return await self._idle.get()
                if not all(worker.is_ready for worker in self._workers):
                    continue  # a start has a time limit of its own
                if len(self._workers) < self._most_workers:
                    return self._new_worker()
                if not may_start:
                    raise busy(
                        "overloaded",
                        "all processes that render chat templates are busy; try again later",
                        _RETRY_SECONDS,
                    )
        finally:
            self._waiting -= 1

    def _give_back(self, worker: _Worker, *, alive: bool) -> None:
        """Keeps the worker if none is idle or conversations wait, else ends it."""
        if alive and (self._waiting or self._idle.empty()):
            self._idle.put_nowait(worker)
            return
        self._drop(worker)
        if self._waiting:
            self._idle.put_nowait(self._new_worker())

    def _new_worker(self) -> _Worker:
        worker = _Worker(self._setup)
        self._workers.add(worker)
        return worker

    def _drop(self, worker: _Worker) -> None:
        self._workers.discard(worker)
        worker.kill()


class _Worker:
    """One process. It renders one conversation at a time: the one that took it from the queue.

    Attributes:
        is_ready: the process has started.
    """

    def __init__(self, setup: bytes) -> None:
        self._setup = setup
        self.is_ready = False
        self._socket, theirs = socket.socketpair()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**child_environment(), "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"},
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    async def ready(self) -> None:
        """Waits until the process has started.

        Raises:
            RuntimeError: the process does not start.
        """
        if self.is_ready:
            return
        self._streams = await asyncio.open_connection(sock=self._socket)
        try:
            async with asyncio.timeout(_START_SECONDS):
                self._write(self._setup)
                assert await self._read() == READY
            self.is_ready = True
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            raise RuntimeError("the process that renders chat templates does not start") from None

    async def ask(self, job: bytes) -> Rendered:
        """Raises:
        asyncio.IncompleteReadError, ConnectionError: the process has ended.
        """
        self._write(job)
        return _DECODER.decode(await self._read())

    def kill(self) -> None:
        self._popen.kill()
        if self._streams is None:
            self._socket.close()
        else:
            with contextlib.suppress(RuntimeError):  # the loop may be closed
                self._streams[1].transport.abort()
        # In a thread: freeing its memory takes a moment.
        threading.Thread(target=self._popen.wait, daemon=True).start()

    def _write(self, message: bytes) -> None:
        assert self._streams is not None
        self._streams[1].write(LENGTH.pack(len(message)) + message)

    async def _read(self) -> bytes:
        assert self._streams is not None
        reader = self._streams[0]
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return await reader.readexactly(length)


def _plain(value: Any) -> Any:
    """A special token as text, or the texts of several."""
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else str(value)


def _refused(reason: str) -> Exception:
    return wrong("messages", f"the chat template cannot be applied: {reason}")
