"""Building responses from the engine's outputs: what chats and completions share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from hetero_llm.core.outputs import CompletionOutput, RequestOutput
from hetero_llm.engine.processes.output_stream import extend
from hetero_llm.server.context import Context
from hetero_llm.server.engine_requests import EngineRequests
from hetero_llm.server.errors import ApiError, busy
from hetero_llm.server.protocol import (
    CompletionTokensDetails,
    Generation,
    PromptTokensDetails,
    Usage,
)
from hetero_llm.server.request_parsing import CheckedRequest

B = TypeVar("B", bound=Generation)
Delta = tuple[int, RequestOutput, CompletionOutput]
"""New tokens of a sequence: the index of its prompt, the output they came in, and themselves."""


class Send(Protocol):
    """Sends events, those of one call in one write."""

    def __call__(self, *payloads: msgspec.Struct) -> Awaitable[None]: ...


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

    def _alternatives(self, wanted: int) -> int:
        """Log-probabilities to show for each token; a request writes -1 for all."""
        return self._vocab_size if wanted == -1 else wanted


class ChunkBuilder(ResponseBuilder[B]):
    """A builder of OpenAI's responses, whose streams are chunks with a delta each."""

    async def stream(self, send: Send) -> None:
        """Sends the response in chunks: opening chunks, one for each delta, usage if wanted."""
        usage = usage_choice(self._body, forced=self._settings.force_include_usage)
        opened = False
        found = deltas(self._outputs(), self._settings.stream_interval)
        async with aclosing(found):
            async for index, output, one in found:
                chunks: list[msgspec.Struct] = []
                if not opened:
                    opened = True
                    chunks += self._opening_chunks(usage.of_chunk(self._counter))
                self._counter.note(index, output, [one])
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
    def _chunk_choice(self, index: int, output: RequestOutput, one: CompletionOutput) -> Any:
        """The choice of a delta; None: it has nothing to show yet."""

    @abstractmethod
    def _chunk(self, choices: Sequence[Any], usage: Usage | UnsetType | None) -> msgspec.Struct: ...


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

    def usage(self) -> Usage:
        usage = Usage(
            self._prompt,
            self._completion,
            self._prompt + self._completion,
            PromptTokensDetails(sum(self._cached.values())),
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
