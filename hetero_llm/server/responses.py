"""What the two generation endpoints have in common: taking a request in, and sending its answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar
from uuid import uuid4

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hetero_llm.core.errors import EngineDeadError
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.engine.input_processor import Prompt
from hetero_llm.server.context import Context, request_id_of
from hetero_llm.server.engine_requests import ClientGone, deadline_seconds, unless_gone
from hetero_llm.server.errors import INTERNAL, ApiError, as_api_error
from hetero_llm.server.protocol import (
    ChatRequest,
    CompletionRequest,
    Generation,
    refuse_unsupported,
)
from hetero_llm.server.request_parsing import read_json
from hetero_llm.server.sampling import budget, check_limits, check_min_tokens, check_stream
from hetero_llm.server.sse import EventStream

logger = logging.getLogger(__name__)
G = TypeVar("G", CompletionRequest, ChatRequest)

CLIENT_CLOSED_REQUEST = 499  # nginx's; for the log and the metrics, the client has left


@dataclass(frozen=True, slots=True)
class Work:
    """A request that was found good, ready for the engine.

    Attributes:
        id: of the answer, and what the engine's request ids begin with.
        http_id: the HTTP request's id, which is in the log.
        created: Unix time in seconds.
        params: one per prompt; they differ in max_tokens at most.
        seconds: until the deadline, None without one.
    """

    id: str
    http_id: str
    created: int
    model: str
    prompts: Sequence[Prompt]
    params: Sequence[SamplingParams]
    seconds: float | None

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids or ()) for prompt in self.prompts)


async def take_in(context: Context, request: Request, kind: type[G]) -> G:
    """Reads and checks everything that needs no tokenizer.

    Raises:
        ApiError: the request is wrong, or the server cannot serve.
    """
    settings = context.settings
    body, unknown = await read_json(
        request, kind, settings.limits, strict_fields=settings.strict_fields
    )
    if unknown:
        context.metrics.unknown_fields(len(unknown))
        names = ", ".join(name[:64] for name in unknown[:8])
        logger.warning(
            "request %s: unknown fields ignored: %s", request_id_of(request), as_json(names)
        )
    context.check_open()
    context.model_name(body.model)
    refuse_unsupported(body)
    check_limits(body, settings.limits, vocab_size=context.client.info.vocab_size)
    check_stream(body)
    return body


def make_work(
    context: Context,
    request: Request,
    body: Generation,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    prefix: str,
    wanted: int | None,
    default: int | None,
    name: str,
) -> Work:
    """Adds what depends on the prompts' lengths.

    Args:
        params: those of all prompts.
        prefix: of the answer's id.
        wanted: tokens to generate as the request says, in its field `name`.
        default: see `budget`.

    Raises:
        ApiError: a prompt with what it is to generate does not fit.
    """
    limit = context.client.info.max_model_len
    each = []
    for prompt in prompts:
        length = len(prompt.token_ids or ())
        max_tokens = budget(wanted, default, prompt_tokens=length, max_model_len=limit, name=name)
        check_min_tokens(params, prompt_tokens=length, max_model_len=limit)
        same = max_tokens == params.max_tokens
        each.append(params if same else replace(params, max_tokens=max_tokens))
    salt = context.cache_salt(request, body.cache_salt)
    return Work(
        id=f"{prefix}-{body.request_id or uuid4().hex}",
        http_id=request_id_of(request),
        created=int(time.time()),
        model=context.model_name(body.model),
        prompts=[replace(prompt, cache_salt=salt) for prompt in prompts] if salt else prompts,
        params=each,
        seconds=deadline_seconds(request, context.settings.request_timeout),
    )


# sending


class Writer(Protocol):
    """Makes the answer, in one piece or as events."""

    async def whole(self) -> msgspec.Struct: ...

    async def stream(self, events: EventStream) -> None: ...


async def send_answer(
    context: Context, request: Request, work: Work, writer: Writer, *, streamed: bool
) -> Response:
    """The answer as it was asked for.

    Raises:
        Exception: what the engine or a check says before the answer begins.
    """
    if streamed:
        return _StreamAnswer(context, work, writer.stream)
    return await _send_whole(context, request, work, writer.whole)


async def _send_whole(
    context: Context,
    request: Request,
    work: Work,
    answer: Callable[[], Awaitable[msgspec.Struct]],
) -> Response:
    """The answer as one JSON object."""

    async def run() -> msgspec.Struct:
        _log_soon(context, work, stream=False)
        with context.running(work.id):
            return await answer()

    try:
        result = await unless_gone(request.receive, run())
    except ClientGone:
        context.metrics.aborted("client_gone")
        logger.info("request %s: the client has left, aborted", work.http_id)
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return Response(msgspec.json.encode(result), media_type="application/json")


class _StreamAnswer(Response):
    """The answer as server-sent events. `produce` writes them up to the end's `[DONE]`."""

    def __init__(
        self, context: Context, work: Work, produce: Callable[[EventStream], Awaitable[None]]
    ) -> None:
        super().__init__()
        self._context = context
        self._work = work
        self._produce = produce

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = EventStream(send)
        self._context.watch.add(stream)
        try:
            await unless_gone(receive, self._run(stream))
        except ClientGone:
            cause = "stalled" if stream.stalled else "client_gone"
            self._context.metrics.aborted(cause)
            logger.info("request %s: aborted, cause: %s", self._work.http_id, cause)
        except Exception as error:
            failure = reported(self._context, error, self._work.http_id)
            await failure.response()(scope, receive, send)
        finally:
            self._context.watch.remove(stream)
            stream.has_ended()

    async def _run(self, stream: EventStream) -> None:
        """Raises what happens before the first event; what happens later becomes one."""
        stream.runs_in_this_task()
        try:
            _log_soon(self._context, self._work, stream=True)
            with self._context.running(self._work.id):
                await self._produce(stream)
            await stream.done()
        except Exception as error:
            if not stream.started:
                raise
            failure = reported(self._context, error, self._work.http_id)
            # After an engine's death not even the end can be trusted: the connection is cut.
            dead = isinstance(error, EngineDeadError)
            if dead:
                self._context.metrics.aborted("engine")
            await stream.fail(failure, clean=not dead)


def reported(context: Context, error: Exception, http_id: str) -> ApiError:
    """The answer to an exception, which is logged and counted as it deserves."""
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


# the log


def as_json(value: Any) -> str:
    """For the log: one line whatever a user wrote."""
    return msgspec.json.encode(value).decode()


def _log_soon(context: Context, work: Work, *, stream: bool) -> None:
    """Logs a request when its task waits for the engine, which need not wait for the line."""
    if context.settings.log_requests:
        asyncio.get_running_loop().call_soon(_log, context, work, stream)


def _log(context: Context, work: Work, stream: bool) -> None:
    settings = context.settings
    params = work.params[0]
    logger.info(
        "request %s: %s, %d prompt(s) of %d tokens, n=%d, max_tokens=%s, temperature=%g%s",
        work.http_id,
        as_json(work.id),
        len(work.prompts),
        work.prompt_tokens,
        params.n,
        params.max_tokens,
        params.temperature,
        ", streamed" if stream else "",
    )
    if settings.log_prompts:
        for text in _cut_prompts(work.prompts, settings.max_log_len):
            logger.info("request %s: prompt %s", work.http_id, text)


def _cut_prompts(prompts: Iterable[Prompt], length: int | None) -> Iterable[str]:
    for prompt in prompts:
        shown: Any = prompt.token_ids if prompt.text is None else prompt.text
        yield as_json(shown[:length])
