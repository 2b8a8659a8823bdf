"""The outputs of one request between the engine and their reader; plain asyncio, no engine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hetero_llm.core.errors import HeteroLLMError
from hetero_llm.core.outputs import CompletionOutput, RequestOutput
from hetero_llm.core.request import Request
from hetero_llm.core.sampling_params import RequestOutputKind
from hetero_llm.engine.processes.messages import Output
from hetero_llm.engine.processes.replica_choice import Assignment

MOST_KEPT = 256
"""Outputs kept for a slow reader; later ones are merged into the last of them."""


class OutputStream:
    """The unread outputs of one request: `messages.Output`s, or the one `PoolingResult` of a model
    that pools. The engine never waits for the reader.

    Attributes:
        key: see `messages.AddRequest`.
        arrival: seconds of the monotonic clock.
        sent: the request was sent to the engine.
        ended: the last output or an error has come.
        abort_wanted: the user aborted the request, maybe before it was sent.
        assignment: the replica that serves it; None: none yet.
        answered: the first output has come.
    """

    def __init__(self, key: str, request_id: str, arrival: float) -> None:
        self.key = key
        self.request_id = request_id
        self.arrival = arrival
        self.sent = False
        self.ended = False
        self.abort_wanted = False
        self.assignment: Assignment | None = None
        self.answered = False
        self._outputs: deque[Any] = deque()
        self._make_error: Callable[[], HeteroLLMError] | None = None
        self._waiting: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._outputs)

    def put(self, output: Any, *, last: bool) -> None:
        if len(self._outputs) < MOST_KEPT:
            self._outputs.append(output)
        else:
            merge(self._outputs[-1], output)
        self.ended |= last
        self._wake()

    def fail(self, make_error: Callable[[], HeteroLLMError]) -> None:
        """Ends the stream with this error after its unread outputs. The first error counts."""
        self._make_error = self._make_error or make_error
        self.ended = True
        self._wake()

    async def get(self) -> Any:
        """The next output.

        Raises:
            HeteroLLMError: that of `fail`.
        """
        while not self._outputs:
            if self._make_error is not None:
                raise self._make_error()
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        return self._outputs.popleft()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def merge(total: Output, new: Output) -> None:
    """Appends a later output to `total`, which becomes one delta; it takes over `new`'s objects."""
    known = {one.index: one for one in total.outputs}
    for one in new.outputs:
        old = known.get(one.index)
        if old is None:
            total.outputs.append(one)
            continue
        extend(old, one)
    total.finished = new.finished
    total.num_cached_tokens = new.num_cached_tokens
    total.prompt_logprobs = total.prompt_logprobs or new.prompt_logprobs
    total.metrics = new.metrics or total.metrics
    total.error = new.error


def extend(total: CompletionOutput, new: CompletionOutput) -> None:
    """Appends the next delta of the same sequence."""
    total.text += new.text
    total.token_ids += new.token_ids
    total.cumulative_logprob = new.cumulative_logprob
    if new.logprobs is not None:
        total.logprobs = new.logprobs if total.logprobs is None else total.logprobs + new.logprobs
    total.finish_reason = new.finish_reason
    total.stop_reason = new.stop_reason


class Assembler:
    """Makes a user's outputs of those that the engine process sends, which are deltas unless only
    the final one was wanted."""

    def __init__(self, request: Request, request_id: str, arrival: float) -> None:
        self._request = request
        self._request_id = request_id
        self._arrival = arrival
        self._cumulative = request.params.output_kind is RequestOutputKind.CUMULATIVE
        self._total: Output | None = None
        self._known = Output("", False, [], 0)

    def add(self, output: Output) -> RequestOutput:
        """The next output for the user, who may keep and change it."""
        known = self._known
        known.prompt_logprobs = known.prompt_logprobs or output.prompt_logprobs
        if output.metrics is not None:
            output.metrics.arrival_time = self._arrival
            known.metrics = output.metrics
        completions = output.outputs
        if self._cumulative:
            if self._total is None:
                self._total = output
            else:
                merge(self._total, output)
            completions = [_copy(one) for one in self._total.outputs]
        adapter = self._request.adapter
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._request.prompt,
            prompt_token_ids=self._request.shown_prompt_ids,
            prompt_logprobs=known.prompt_logprobs,
            outputs=completions,
            finished=output.finished,
            metrics=known.metrics,
            lora_request=None if adapter is None else adapter.request,
            num_cached_tokens=output.num_cached_tokens,
            error=output.error,
        )


def _copy(one: CompletionOutput) -> CompletionOutput:
    logprobs = None if one.logprobs is None else list(one.logprobs)
    return replace(one, token_ids=list(one.token_ids), logprobs=logprobs)
