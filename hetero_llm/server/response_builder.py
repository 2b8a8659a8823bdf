"""What the writers of both endpoints' answers have in common, streams above all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from hetero_llm.core.outputs import CompletionOutput, RequestOutput
from hetero_llm.engine.output_stream import extend
from hetero_llm.server.context import Context
from hetero_llm.server.engine_requests import EngineRun
from hetero_llm.server.protocol import Generation, PromptTokensDetails, Usage
from hetero_llm.server.responses import Work
from hetero_llm.server.sse import EventStream

B = TypeVar("B", bound=Generation)
Delta = tuple[int, RequestOutput, CompletionOutput]
"""What is new of one sequence, with the position of its prompt and the output it came in."""


class AnswerWriter(ABC, Generic[B]):
    """Makes the answer of one request, whole or as a stream; one of both, once."""

    def __init__(self, context: Context, body: B, work: Work) -> None:
        settings = context.settings
        self._texts = context.texts
        self._settings = settings
        self._body: B = body
        self._work = work
        self._run = EngineRun(
            context.client,
            context.metrics,
            work.id,
            work.prompts,
            work.params,
            seconds=work.seconds,
        )
        as_ids = body.return_tokens_as_token_ids
        self._as_ids = settings.return_tokens_as_token_ids if as_ids is None else as_ids
        self._counter = UsageCounter(work.prompt_tokens)

    @abstractmethod
    async def whole(self) -> msgspec.Struct:
        """The answer in one piece."""

    async def stream(self, events: EventStream) -> None:
        """The answer as chunks: openings, then one for each delta that is worth it."""
        usage = usage_choice(self._body, forced=self._settings.force_include_usage)
        begun = False
        found = deltas(self._outputs(), self._settings.stream_interval)
        async with aclosing(found):
            async for index, output, one in found:
                if not begun:
                    begun = True
                    for chunk in self._openings(usage.of_chunk(self._counter)):
                        await events.send(chunk)
                self._counter.note(index, output, [one])
                choice = self._chunk_choice(index, output, one)
                await events.send(self._chunk([choice], usage.of_chunk(self._counter)))
        if usage.last:
            await events.send(self._chunk([], self._counter.usage()))

    def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """What the engine says; a writer may change it."""
        return self._run.outputs()

    def _openings(self, usage: Usage | UnsetType | None) -> Iterable[msgspec.Struct]:
        """Chunks before the first delta."""
        return ()

    @abstractmethod
    def _chunk_choice(self, index: int, output: RequestOutput, one: CompletionOutput) -> Any: ...

    @abstractmethod
    def _chunk(self, choices: Sequence[Any], usage: Usage | UnsetType | None) -> msgspec.Struct: ...


async def deltas(
    outputs: AsyncIterator[tuple[int, RequestOutput]], interval: int
) -> AsyncGenerator[Delta, None]:
    """What is new of each sequence, joined until it is `interval` tokens. The first and the last
    of a sequence wait for nothing, nor does anything wait when an error ends all."""
    held: dict[tuple[int, int], Delta] = {}
    begun: set[tuple[int, int]] = set()
    try:
        async for index, output in outputs:
            for one in filter(_is_news, output.outputs):
                sequence = (index, one.index)
                before = held.pop(sequence, None)
                if before is not None:
                    extend(before[2], one)
                    one = before[2]
                enough = len(one.token_ids) >= interval or one.finish_reason is not None
                if enough or sequence not in begun:
                    begun.add(sequence)
                    yield index, output, one
                else:
                    held[sequence] = index, output, one
    except Exception:
        for delta in held.values():
            yield delta
        raise


def _is_news(one: CompletionOutput) -> bool:
    """Whether a delta says anything."""
    return bool(one.token_ids or one.text or one.finish_reason)


# usage


class UsageCounter:
    """Tokens of a request so far."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt = prompt_tokens
        self._completion = 0
        self._cached: dict[int, int] = {}

    def note(
        self, index: int, output: RequestOutput, completions: Iterable[CompletionOutput]
    ) -> None:
        """These deltas of an output of the prompt at `index` are being sent."""
        self._cached[index] = output.num_cached_tokens
        for one in completions:
            self._completion += len(one.token_ids)

    def usage(self) -> Usage:
        return Usage(
            self._prompt,
            self._completion,
            self._prompt + self._completion,
            PromptTokensDetails(sum(self._cached.values())),
        )


@dataclass(frozen=True, slots=True)
class UsageChoice:
    """Which chunks of a stream carry usage: the last one, and each."""

    last: bool
    each: bool

    def of_chunk(self, counter: UsageCounter) -> Usage | UnsetType | None:
        if self.each:
            return counter.usage()
        return None if self.last else UNSET


def usage_choice(body: Generation, *, forced: bool) -> UsageChoice:
    options = body.stream_options
    last = forced or bool(options and options.include_usage)
    return UsageChoice(last, last and bool(options and options.continuous_usage_stats))
