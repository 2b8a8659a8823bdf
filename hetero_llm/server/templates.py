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
from hetero_llm.server.template_worker import READY, Job, Rendered, Setup
from hetero_llm.utils.env import child_environment
from hetero_llm.utils.message_socket import MessageSocket

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
            rendered = await worker.render(job, self._seconds)
            alive = not rendered.spent
        except TimeoutError:
            raise _refused(f"it did not end within {self._seconds:g} s") from None
        except ConnectionError:
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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reply: asyncio.Future[bytes] | None = None  # that is waited for
        ours, theirs = socket.socketpair()
        self._socket = MessageSocket(ours)
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
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket.fileno(), self._receive)
        try:
            assert await self._ask(self._setup, _START_SECONDS) == READY
            self.is_ready = True
        except (TimeoutError, ConnectionError):
            raise RuntimeError("the process that renders chat templates does not start") from None

    async def render(self, job: bytes, seconds: float) -> Rendered:
        """Raises:
        TimeoutError: it takes longer than `seconds`.
        ConnectionError: the process has ended.
        """
        return _DECODER.decode(await self._ask(job, seconds))

    def kill(self) -> None:
        self._popen.kill()
        self._detach()
        self._socket.close()
        # In a thread: freeing its memory takes a moment.
        threading.Thread(target=self._popen.wait, daemon=True).start()

    async def _ask(self, message: bytes, seconds: float) -> bytes:
        """The reply to a message. Streams of asyncio, and a context for the time limit, would take
        four times the CPU time of this, for every conversation."""
        loop = self._loop
        assert loop is not None
        reply = self._reply = loop.create_future()
        timer = loop.call_later(seconds, _too_late, reply)
        try:
            self._socket.send(message)
            if self._socket.num_unsent:
                loop.add_writer(self._socket.fileno(), self._flush)
            if self._socket.closed:
                raise ConnectionError
            return await reply
        finally:
            timer.cancel()
            self._reply = None

    def _flush(self) -> None:
        self._socket.flush()
        if not self._socket.num_unsent and self._loop is not None:
            self._loop.remove_writer(self._socket.fileno())

    def _receive(self) -> None:
        messages = self._socket.receive()
        if self._socket.closed:
            self._detach()
        reply = self._reply
        if reply is None or reply.done():
            return
        if messages:
            reply.set_result(messages[0])
        elif self._socket.closed:
            reply.set_exception(ConnectionError())

    def _detach(self) -> None:
        """The loop looks at the socket no more."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())


def _too_late(reply: asyncio.Future[bytes]) -> None:
    if not reply.done():
        reply.set_exception(TimeoutError())


def _plain(value: Any) -> Any:
    """A special token as text, or the texts of several."""
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else str(value)


def _refused(reason: str) -> Exception:
    return wrong("messages", f"the chat template cannot be applied: {reason}")
