"""Running a request in the engine and building its response from the outputs: what all APIs that
generate share."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from hetero_llm.core.outputs import CompletionOutput, RequestOutput
from hetero_llm.engine.engine_client import EngineClient
from hetero_llm.engine.processes.output_stream import extend
from hetero_llm.server.context import Context
from hetero_llm.server.errors import NO_NAMES, ApiError, busy, request_failed
from hetero_llm.server.message_events import MessageReader, Piece
from hetero_llm.server.metrics import Metrics
from hetero_llm.server.protocol import (
    ChatRequest,
    CompletionTokensDetails,
    Generation,
    PromptTokensDetails,
    Usage,
)
from hetero_llm.server.request_parsing import CheckedRequest

logger = logging.getLogger(__name__)

_ABORT_SECONDS = 5.0
"""How long after the deadline an engine may take to end a request."""
_MERGED_OUTPUTS = 64

B = TypeVar("B", bound=Generation)
Delta = tuple[int, RequestOutput, CompletionOutput]
"""New tokens of a sequence: the index of its prompt, the output they came in, and themselves."""


_ENCODER = msgspec.json.Encoder()
TEXT_MARK, NUMBER_MARK = "\0text\0", -(1 << 62)
"""What stands in the sample of an `Envelope` for a text and for a number. No string of a response
is the text alone: ids have prefixes."""


@dataclass(frozen=True, slots=True)
class Written:
    """A payload of this type that is JSON already."""

    kind: type[msgspec.Struct]
    json: bytes


class Envelope:
    """Writes the payloads of a stream that differ in a text, and maybe a number before it: all else
    is encoded once.

    Args:
        sample: a payload with `TEXT_MARK`, and `NUMBER_MARK` before all strings of requests.
        numbered: there is a number.
    """

    def __init__(self, sample: msgspec.Struct, *, numbered: bool = False) -> None:
        self._kind = type(sample)
        form = _ENCODER.encode(sample).replace(b"%", b"%%")
        if numbered:
            form = form.replace(_ENCODER.encode(NUMBER_MARK), b"%d", 1)
        self._form = form.replace(_ENCODER.encode(TEXT_MARK), b"%b", 1)

    def write(self, text: str) -> Written:
        return Written(self._kind, self._form % _ENCODER.encode(text))

    def write_numbered(self, number: int, text: str) -> Written:
        return Written(self._kind, self._form % (number, _ENCODER.encode(text)))


Payload = msgspec.Struct | Written


class Send(Protocol):
    """Sends events, those of one call in one write."""

    def __call__(self, *payloads: Payload) -> Awaitable[None]: ...


class ResponseBuilder(ABC, Generic[B]):
    """Runs one request and builds its response, by one call of either `whole` or `stream`."""

    def __init__(self, context: Context, body: B, request: CheckedRequest) -> None:
        settings = context.settings
        self._tokenizer = context.tokenizer
        self._settings = settings
        self._body: B = body
        self._request = request
        self._engine_requests = EngineRequests(context.client, context.metrics, request)
        as_ids = body.return_tokens_as_token_ids
        self._as_ids = settings.return_tokens_as_token_ids if as_ids is None else as_ids
        self._counter = UsageCounter(request.num_prompt_tokens)
        self._vocab_size = context.client.info.vocab_size
        self._stream_interval = max(settings.stream_interval, body.stream_interval or 1)

    @abstractmethod
    async def whole(self) -> msgspec.Struct:
        """The whole response."""

    @abstractmethod
    async def stream(self, send: Send) -> None:
        """Sends the response piece by piece."""

    def failure(self, error: ApiError) -> Any:
        """The payload of an error after the first event of a stream."""
        return msgspec.Raw(error.body())

    def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """The engine's outputs; a subclass may change them."""
        return self._engine_requests.outputs()

    def _timeout(self, one: CompletionOutput) -> bool | UnsetType:
        """The field `timeout` of a choice: True if the deadline ended it, else left out."""
        return self._engine_requests.deadline.cut(one.finish_reason) or UNSET

    def _alternatives(self, wanted: int) -> int:
        """Log-probabilities to show for each token; a request writes -1 for all."""
        return self._vocab_size if wanted == -1 else wanted


class ChunkBuilder(ResponseBuilder[B]):
    """A builder of OpenAI's responses, whose streams are chunks with a delta each."""

    async def stream(self, send: Send) -> None:
        """Sends the response in chunks: opening chunks, one for each delta, usage if wanted."""
        usage = usage_choice(self._body, forced=self._settings.force_include_usage)
        opened = False
        envelopes: dict[int, Envelope] = {}
        shows_text_only = self._shows_text_only() and not usage.each
        found = deltas(self._outputs(), self._stream_interval)
        async with aclosing(found):
            async for index, output, one in found:
                chunks: list[msgspec.Struct] = []
                if not opened:
                    opened = True
                    chunks += self._opening_chunks(usage.of_chunk(self._counter))
                self._counter.note(index, output, [one])
                if shows_text_only and one.finish_reason is None and not chunks:  # most deltas
                    number = self._number(index, one)
                    envelope = envelopes.get(number)
                    if envelope is None:
                        choice = self._text_choice(number, TEXT_MARK)
                        sample = self._chunk([choice], usage.of_chunk(self._counter))
                        envelope = envelopes[number] = Envelope(sample)
                    await send(envelope.write(one.text))
                    continue
                choice = self._chunk_choice(index, output, one)
                if choice is not None:
                    chunks.append(self._chunk([choice], usage.of_chunk(self._counter)))
                if chunks:
                    await send(*chunks)
        if usage.last:
            await send(self._chunk([], self._counter.usage()))

    def _opening_chunks(self, usage: Usage | UnsetType | None) -> Iterable[msgspec.Struct]:
        """Chunks before the first delta."""
        return ()

    @abstractmethod
    def _shows_text_only(self) -> bool:
        """Whether a delta before the last one shows its text and nothing else."""

    @abstractmethod
    def _number(self, index: int, one: CompletionOutput) -> int:
        """The number of the choice of a delta for the prompt at `index`."""

    @abstractmethod
    def _text_choice(self, number: int, text: str) -> Any:
        """The choice of a delta that shows its text only."""

    @abstractmethod
    def _chunk_choice(self, index: int, output: RequestOutput, one: CompletionOutput) -> Any:
        """The choice of a delta; None: it has nothing to show yet."""

    @abstractmethod
    def _chunk(self, choices: Sequence[Any], usage: Usage | UnsetType | None) -> msgspec.Struct: ...


class EventBuilder(ResponseBuilder[ChatRequest]):
    """Builds one message from the pieces that a `MessageReader` yields; a stream of it consists of
    events.

    Args:
        reader: of the message.

    Attributes:
        opened: events were sent.
    """

    def __init__(
        self, context: Context, body: ChatRequest, request: CheckedRequest, reader: MessageReader
    ) -> None:
        super().__init__(context, body, request)
        self._reader = reader
        self.opened = False

    async def whole(self) -> msgspec.Struct:
        with self._naming_errors():
            async with aclosing(self._outputs()) as outputs:
                async for index, output in outputs:
                    self._counter.note(index, output, output.outputs)
                    for one in output.outputs:
                        for piece in self._reader.read(one):
                            self._events_of(piece)
                        if one.finish_reason is not None:
                            self._last_events(one)
        return self._response()

    async def stream(self, send: Send) -> None:
        with self._naming_errors():
            async with aclosing(self._events()) as events:
                async for several in events:
                    self.opened = True
                    await send(*several)

    async def _events(self) -> AsyncGenerator[Sequence[Payload], None]:
        """The events of a stream, those of one moment together. The first ones show the response as
        it is before its end: they are to be sent before the next are asked for."""
        begun = ended = False
        found = deltas(self._outputs(), self._stream_interval)
        async with aclosing(found):
            async for index, output, one in found:
                text = self._reader.text_of(one)
                if text is not None:  # most deltas
                    self._counter.note(index, output, [one])
                    yield [self._text_event(text)]
                    continue
                several: list[Payload] = []
                if not begun:
                    begun = True
                    self._counter.note(index, output, [])
                    several += self._first_events()
                self._counter.note(index, output, [one])
                for piece in self._reader.read(one):
                    several += self._events_of(piece)
                if several:
                    yield several
                if one.finish_reason is not None:
                    ended = True
                    yield self._last_events(one)
        assert ended, "the outputs of a sequence end with its finish reason"

    @abstractmethod
    def _naming_errors(self) -> AbstractContextManager[None]:
        """Errors that are raised inside name the client's fields."""

    @abstractmethod
    def _first_events(self) -> Sequence[msgspec.Struct]:
        """The events before the first of the message."""

    @abstractmethod
    def _events_of(self, piece: Piece) -> Sequence[msgspec.Struct]: ...

    @abstractmethod
    def _text_event(self, text: str) -> Written:
        """The event of more text of the content that is open."""

    @abstractmethod
    def _last_events(self, one: CompletionOutput) -> Sequence[msgspec.Struct]:
        """The events of the end, with the last delta of the message.

        Raises:
            ApiError: the server itself has ended the message.
        """

    @abstractmethod
    def _response(self) -> msgspec.Struct:
        """The whole response, after the last events."""


async def deltas(
    outputs: AsyncIterator[tuple[int, RequestOutput]], interval: int
) -> AsyncGenerator[Delta, None]:
    """Yields the deltas of each sequence, joined until they have `interval` tokens. The first and
    the last delta of a sequence are yielded at once, and when an error ends the outputs, so are
    all that were held."""
    held: dict[tuple[int, int], Delta] = {}
    started: set[tuple[int, int]] = set()
    try:
        async for index, output in outputs:
            for one in filter(_is_news, output.outputs):
                sequence = (index, one.index)
                before = held.pop(sequence, None)
                if before is not None:
                    extend(before[2], one)
                    one = before[2]
                enough = len(one.token_ids) >= interval or one.finish_reason is not None
                if enough or sequence not in started:
                    started.add(sequence)
                    yield index, output, one
                else:
                    held[sequence] = index, output, one
    except Exception:
        for delta in held.values():
            yield delta
        raise


def aborted() -> ApiError:
    """The error of a response whose sequence the server itself ended."""
    return busy("aborted", "the request was ended before its response was complete", 1.0)


def _is_news(one: CompletionOutput) -> bool:
    """Whether a delta has anything to show."""
    return bool(one.token_ids or one.text or one.finish_reason)


# -- the engine ------------------------------------------------------------------------------


class Deadline:
    """Aborts engine requests after some seconds; the tokens generated until then are the response.

    Args:
        seconds: None for no deadline.

    Attributes:
        passed: the requests were aborted.
    """

    def __init__(self, client: EngineClient, seconds: float | None) -> None:
        self._client = client
        self._seconds = seconds
        self._aborting: asyncio.Task[None] | None = None
        self.passed = False

    @asynccontextmanager
    async def limits(self, request_ids: Sequence[str]) -> AsyncIterator[None]:
        """Applies to these requests until the context is left.

        Raises:
            ApiError: 504, the engine did not end the requests after the deadline either.
        """
        if self._seconds is None:
            yield
            return
        handle = asyncio.get_running_loop().call_later(self._seconds, self._pass, request_ids)
        try:
            async with asyncio.timeout(self._seconds + _ABORT_SECONDS):
                yield
        except TimeoutError:
            raise self.error(queued=False) from None
        finally:
            handle.cancel()
            if self._aborting is not None:
                self._aborting.cancel()

    def reason(self, finish_reason: str | None) -> str | None:
        """The finish reason to show: a sequence that the deadline ended counts as too long."""
        return "length" if self.cut(finish_reason) else finish_reason

    def cut(self, finish_reason: str | None) -> bool:
        """Whether the deadline ended this sequence."""
        return self.passed and finish_reason == "abort"

    def error(self, *, queued: bool) -> ApiError:
        """The error if no token came in time. `queued`: the requests were never scheduled."""
        seconds = f"{self._seconds:g} s" if self._seconds is not None else ""
        if queued:
            return ApiError(
                408, "request_timeout", f"the request waited in the queue for all of its {seconds}"
            )
        return ApiError(504, "request_timeout", f"no token was generated within {seconds}")

    def _pass(self, request_ids: Sequence[str]) -> None:
        self.passed = True
        self._aborting = asyncio.get_running_loop().create_task(self._abort(request_ids))

    async def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            await self._client.abort(request_id)


class EngineRequests:
    """Sends the prompts of a request to the engine and reads the outputs."""

    def __init__(self, client: EngineClient, metrics: Metrics, request: CheckedRequest) -> None:
        self._client = client
        self._metrics = metrics
        self._request = request
        self._ids = [f"{request.engine_id}-{index}" for index in range(len(request.prompts))]
        self._num_tokens = 0
        self._scheduled = False
        self.deadline = Deadline(client, request.seconds)

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yields outputs with the index of their prompt until all prompts are finished. Closing the
        generator early aborts the unfinished ones.

        Raises:
            OverloadedError, DuplicateRequestError, EngineDeadError: of the engine.
            ApiError: a request was refused or failed, or the deadline passed before the first
                token.
        """
        held: list[tuple[int, RequestOutput]] = []
        async with self.deadline.limits(self._ids), aclosing(self._all()) as outputs:
            async for item in outputs:
                held.append(item)
                # After the deadline outputs without any token are held: if none comes at all,
                # the response is an error.
                if self._num_tokens or not self.deadline.passed:
                    for ready in held:
                        yield ready
                    held.clear()
        if self.deadline.passed:
            self._metrics.aborted("timeout")
            if not self._num_tokens:
                raise self.deadline.error(queued=not self._scheduled)

    def _all(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        return self._one(0) if len(self._ids) == 1 else self._merged()

    async def _one(self, index: int) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        request_id, prompt = self._ids[index], self._request.prompts[index]
        params = self._request.params[index]
        assert prompt.token_ids is not None
        stream = self._client.generate(
            prompt, params, request_id,
            lora_request=self._request.adapter,
            prompt_adapter_request=self._request.prompt_adapter,
            data_parallel_rank=self._request.data_parallel_rank,
        )  # fmt: skip
        names = self._request.constraint_names
        named = nullcontext() if names is NO_NAMES else names.in_errors()
        with named, self._metrics.begin(request_id, len(prompt.token_ids), params) as times:
            async with aclosing(stream):
                async for output in stream:
                    if output.error is not None:
                        logger.error("request %s failed: %s", self._request.id, output.error)
                        raise request_failed(self._request.id)
                    times.note(output)
                    self._note(output)
                    yield index, output

    def _note(self, output: RequestOutput) -> None:
        for one in output.outputs:
            self._num_tokens += len(one.token_ids)
        if output.metrics is not None and output.metrics.first_scheduled_time is not None:
            self._scheduled = True

    async def _merged(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yields the outputs of all prompts as they come. The first error ends all prompts."""
        merged: asyncio.Queue[tuple[int, RequestOutput] | Exception | None]
        merged = asyncio.Queue(_MERGED_OUTPUTS)

        async def pump(index: int) -> None:
            try:
                async with aclosing(self._one(index)) as outputs:
                    async for item in outputs:
                        await merged.put(item)
            except Exception as error:
                await merged.put(error)
            else:
                await merged.put(None)

        pumps = [asyncio.ensure_future(pump(index)) for index in range(len(self._ids))]
        try:
            num_running = len(pumps)
            while num_running:
                item = await merged.get()
                if item is None:
                    num_running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)


# -- usage ----------------------------------------------------------------------------------


class UsageCounter:
    """Counts the tokens of a request as they are sent."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt = prompt_tokens
        self._completion = 0
        self._cached: dict[int, int] = {}
        self._reasoning: dict[int, int] = {}

    def note(
        self, index: int, output: RequestOutput, completions: Iterable[CompletionOutput]
    ) -> None:
        """Counts deltas of an output of the prompt at `index`."""
        self._cached[index] = output.num_cached_tokens
        for one in completions:
            self._completion += len(one.token_ids)

    def note_reasoning(self, sequence: int, tokens: int) -> None:
        """Sets the number of tokens of a sequence's reasoning up to now."""
        self._reasoning[sequence] = tokens

    @property
    def cached(self) -> int:
        """Prompt tokens that the prefix cache had."""
        return sum(self._cached.values())

    def usage(self) -> Usage:
        usage = Usage(
            self._prompt,
            self._completion,
            self._prompt + self._completion,
            PromptTokensDetails(self.cached),
        )
        if self._reasoning:
            usage.completion_tokens_details = CompletionTokensDetails(sum(self._reasoning.values()))
        return usage


@dataclass(frozen=True, slots=True)
class UsageChoice:
    """Which chunks of a stream carry usage: a last one of its own, or each."""

    last: bool
    each: bool

    def of_chunk(self, counter: UsageCounter) -> Usage | UnsetType | None:
        if self.each:
            return counter.usage()
        return None if self.last else UNSET


def usage_choice(body: Generation, *, forced: bool) -> UsageChoice:
    """`forced`: --enable-force-include-usage, which asks for usage in each chunk, as in vLLM."""
    options = body.stream_options
    last = forced or bool(options and options.include_usage)
    each = forced or bool(options and options.continuous_usage_stats)
    return UsageChoice(last, last and each)
