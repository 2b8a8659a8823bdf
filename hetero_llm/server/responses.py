"""Sending a response: whole or as server-sent events, with its errors, and an end when the client
hangs up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hetero_llm.core.errors import EngineDeadError
from hetero_llm.engine.inputs.input_processor import Prompt
from hetero_llm.server.context import Context, request_id_of
from hetero_llm.server.errors import INTERNAL, ApiError, ErrorForm, as_api_error
from hetero_llm.server.request_parsing import CheckedRequest, as_json
from hetero_llm.server.response_builder import ResponseBuilder, Written

logger = logging.getLogger(__name__)
T = TypeVar("T")
Handler = Callable[[Request], Coroutine[Any, Any, Response]]
"""Of a route."""

CLIENT_CLOSED_REQUEST = 499  # nginx's; for the log and the metrics, the client has left
_ENCODER = msgspec.json.Encoder()
_CHECKS_PER_INTERVAL = 15


@dataclass(frozen=True, slots=True)
class Framing:
    """How the payloads of a stream, which are JSON, stand on the wire.

    Attributes:
        before, after: what stands around each payload.
        done: the clean end; empty: the payloads themselves say which one is the last.
        comment: what clients skip; empty: the framing has nothing like that.
    """

    content_type: bytes
    before: bytes
    after: bytes
    done: bytes = b""
    comment: bytes = b""

    def frame(self, payload: Any) -> bytes:
        written = payload.json if type(payload) is Written else _ENCODER.encode(payload)
        return self.before + written + self.after


class NamedEvents(Framing):
    """Server-sent events that carry the name of their payload, which is its struct's tag."""

    def frame(self, payload: Any) -> bytes:
        if type(payload) is Written:
            return b"%b%b%b" % (_head_of(payload.kind, self.before), payload.json, self.after)
        kind: type[msgspec.Struct] = type(payload)
        return b"%b%b%b" % (_head_of(kind, self.before), _ENCODER.encode(payload), self.after)


@cache
def _head_of(kind: type[msgspec.Struct], before: bytes) -> bytes:
    """What stands before a payload of this kind."""
    return b"event: %b\n%b" % (str(kind.__struct_config__.tag).encode(), before)


# JSON has no raw line ends, so one data line is enough.
_EVENT_STREAM = b"text/event-stream; charset=utf-8"
SERVER_SENT_EVENTS = Framing(
    _EVENT_STREAM,
    b"data: ",
    b"\n\n",
    done=b"data: [DONE]\n\n",
    comment=b": keep-alive\n\n",
)
RESPONSE_EVENTS = NamedEvents(_EVENT_STREAM, b"data: ", b"\n\n", comment=b": keep-alive\n\n")
"""The stream of /v1/responses."""
MESSAGE_EVENTS = NamedEvents(
    _EVENT_STREAM, b"data: ", b"\n\n", comment=b'event: ping\ndata: {"type":"ping"}\n\n'
)
"""The stream of /v1/messages."""
ENDED_BY_NUL = Framing(b"text/plain; charset=utf-8", b"", b"\0")
"""One JSON object after the other, as /generate writes them."""


class ClientGone(Exception):
    """The client has closed the connection, or the stream was cancelled because it stalled."""


class Responses:
    """Sends the responses of all generation requests of one server."""

    def __init__(self, context: Context) -> None:
        settings = context.settings
        self._context = context
        self._watch = StreamWatch(
            keep_alive_seconds=settings.keep_alive_seconds,
            write_seconds=settings.limits.write_seconds,
        )

    async def send(
        self,
        request: Request,
        checked: CheckedRequest,
        builder: ResponseBuilder[Any],
        *,
        streamed: bool,
        framing: Framing = SERVER_SENT_EVENTS,
    ) -> Response:
        """Runs the request; returns the whole response, or one that streams while it is sent.

        Args:
            framing: of a stream.

        Raises:
            Exception: what the engine or a check raises before a whole response is complete.
        """
        context = self._context
        if streamed:
            return _StreamedResponse(context, self._watch, checked, builder, framing)

        async def run() -> msgspec.Struct:
            _log_soon(context, checked, stream=False)
            with context.answering(checked.engine_id):
                return await builder.whole()

        return await whole_response(context, request, run())


class _StreamedResponse(Response):
    """A response as a stream of events."""

    def __init__(
        self,
        context: Context,
        watch: StreamWatch,
        checked: CheckedRequest,
        builder: ResponseBuilder[Any],
        framing: Framing,
    ) -> None:
        super().__init__()
        self._framing = framing
        self._context = context
        self._watch = watch
        self._checked = checked
        self._builder = builder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = EventStream(send, self._framing)
        self._watch.add(stream)
        try:
            await unless_gone(receive, self._run(stream))
        except ClientGone:
            cause = "stalled" if stream.stalled else "client_gone"
            self._context.metrics.aborted(cause)
            logger.info("request %s: aborted, cause: %s", self._checked.http_id, cause)
        except Exception as error:
            failure = report_error(self._context, error, self._checked.http_id)
            await failure.response(form_of(scope))(scope, receive, send)
        finally:
            self._watch.remove(stream)
            stream.has_ended()

    async def _run(self, stream: EventStream) -> None:
        """Writes all events. Errors before the first event are raised, later ones are written."""
        stream.runs_in_this_task()
        try:
            _log_soon(self._context, self._checked, stream=True)
            with self._context.answering(self._checked.engine_id):
                await self._builder.stream(stream.send)
            await stream.done()
        except Exception as error:
            if not stream.started:
                raise
            failure = report_error(self._context, error, self._checked.http_id)
            # After the engine's death not even a clean end can be trusted: cut the connection.
            dead = isinstance(error, EngineDeadError)
            if dead:
                self._context.metrics.aborted("engine")
            await stream.fail(self._builder.failure(failure), clean=not dead)


def json_response(value: Any, status: int = 200) -> Response:
    return Response(_ENCODER.encode(value), status_code=status, media_type="application/json")


async def whole_response(
    context: Context, request: Request, work: Coroutine[Any, Any, msgspec.Struct]
) -> Response:
    """The response that `work` makes; it is cancelled when the client hangs up."""
    try:
        return json_response(await unless_gone(request.receive, work))
    except ClientGone:
        context.metrics.aborted("client_gone")
        logger.info("request %s: the client has left, aborted", request_id_of(request))
        return Response(status_code=CLIENT_CLOSED_REQUEST)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work`, and cancels it when the client hangs up.

    Raises:
        ClientGone: it did, or `work` was cancelled from elsewhere.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if task.cancelled():
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        if not task.done():  # this task itself is being cancelled
            task.cancel()
            await asyncio.wait({task})


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def form_of(scope: Scope) -> ErrorForm:
    """The form of the errors of this request, which the middleware has noted."""
    form: ErrorForm = scope.get("state", {}).get("error_form", ErrorForm.OPENAI)
    return form


def report_error(context: Context, error: Exception, http_id: str) -> ApiError:
    """Logs and counts an exception; returns the error for the client."""
    failure = as_api_error(error, http_id)
    if failure.status >= 500:
        context.note_error(failure, http_id)
    if failure.status in (429, 503):
        context.metrics.rejected(failure.code)
    if isinstance(error, EngineDeadError):
        logger.error("request %s: %s", http_id, error)
    elif failure.code == INTERNAL:
        logger.error("request %s failed", http_id, exc_info=error)
    return failure


# -- streams --------------------------------------------------------------------------------


class EventStream:
    """Writes the events of one response.

    An event is written whole or not at all. A stream ends with the framing's clean end (`[DONE]`,
    or the API's last event), after an error frame if something went wrong; where even that cannot
    be trusted the connection is cut. A clean end without a finish reason would be a silent
    truncation. The status line goes out with the first frame, so errors before it have a status of
    their own.

    Attributes:
        started: the status line was sent.
        stalled: the client took no byte for too long; the stream's task was cancelled.
    """

    def __init__(self, send: Send, framing: Framing = SERVER_SENT_EVENTS) -> None:
        self._send = send
        self._framing = framing
        self._task: asyncio.Task[Any] | None = None
        self._lock = asyncio.Lock()
        self._closed = False
        self._writing_since: float | None = None
        self._last = time.monotonic()
        self.started = False
        self.stalled = False

    def runs_in_this_task(self) -> None:
        """Makes the current task the one that is cancelled when the client stalls."""
        self._task = asyncio.current_task()

    def has_ended(self) -> None:
        """Drops the reference to the task. A cancelled task refers to this object through its
        traceback; such a circle would keep the whole request until a garbage collection."""
        self._task = None

    async def send(self, *payloads: Any) -> None:
        """Writes each payload as an event, all of them at once; waits while the client's buffers
        are full."""
        frame = self._framing.frame
        data = frame(*payloads) if len(payloads) == 1 else b"".join(map(frame, payloads))
        await self._write(data)

    async def done(self) -> None:
        """The stream's clean end."""
        await self._write(self._framing.done, last=True)

    async def fail(self, error: Any, *, clean: bool) -> None:
        """Writes an error's payload; then the end if `clean`, else the server cuts the
        connection."""
        await self._write(self._framing.frame(error))
        if clean:
            await self.done()

    async def keep_alive(self) -> None:
        """Writes a comment, which clients skip."""
        with contextlib.suppress(OSError):  # the client has left; the stream's task will notice
            await self._write(self._framing.comment)

    def is_silent(self, now: float, seconds: float) -> bool:
        """Whether a comment is due."""
        if not self._framing.comment:
            return False
        return self._writing_since is None and now - self._last >= seconds

    def drop_if_stalled(self, now: float, seconds: float) -> None:
        """Cancels the stream's task if one write has waited for at least `seconds`."""
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
                    headers = [
                        (b"content-type", self._framing.content_type),
                        (b"cache-control", b"no-cache"),
                        (b"x-accel-buffering", b"no"),
                    ]
                    await self._send(
                        {"type": "http.response.start", "status": 200, "headers": headers}
                    )
                await self._send(
                    {"type": "http.response.body", "body": data, "more_body": not last}
                )
            finally:
                self._last = time.monotonic()
                self._writing_since = None
            self._closed = last


class StreamWatch:
    """One task for all open streams: it writes comments into silent ones and ends stalled ones.

    It looks at the streams a few times per interval, so events themselves cost nothing.

    Args:
        keep_alive_seconds: silence before a comment; 0 is never.
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
                    # A task each: one client's full buffers must not block the others.
                    task = asyncio.get_running_loop().create_task(stream.keep_alive())
                    self._comments.add(task)
                    task.add_done_callback(self._comments.discard)


# -- the log --------------------------------------------------------------------------------


def _log_soon(context: Context, checked: CheckedRequest, *, stream: bool) -> None:
    """Logs a request once its task waits for the engine: the engine should not wait for the log."""
    if context.settings.log_requests:
        asyncio.get_running_loop().call_soon(_log, context, checked, stream)


def _log(context: Context, checked: CheckedRequest, stream: bool) -> None:
    settings = context.settings
    params = checked.params[0]
    logger.info(
        "request %s: %s, %d prompt(s) of %d tokens, n=%d, max_tokens=%s, temperature=%g%s",
        checked.http_id,
        as_json(checked.id),
        len(checked.prompts),
        checked.num_prompt_tokens,
        params.n,
        params.max_tokens,
        params.temperature,
        ", streamed" if stream else "",
    )
    if settings.log_prompts and settings.max_log_len != 0:
        for text in _cut_prompts(checked.prompts, settings.max_log_len):
            logger.info("request %s: prompt %s", checked.http_id, text)


def _cut_prompts(prompts: Iterable[Prompt], length: int | None) -> Iterable[str]:
    for prompt in prompts:
        shown: Any = prompt.token_ids if prompt.text is None else prompt.text
        yield as_json(shown[:length])
