"""The engine requests of one HTTP request, one for each prompt: outputs and deadline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from hetero_llm.core.outputs import RequestOutput
from hetero_llm.engine.engine_client import EngineClient
from hetero_llm.server.errors import ApiError, request_failed
from hetero_llm.server.metrics import Metrics
from hetero_llm.server.request_parsing import CheckedRequest

logger = logging.getLogger(__name__)

_ABORT_SECONDS = 5.0
"""How long after the deadline an engine may take to end a request."""
_MERGED_OUTPUTS = 64


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
        self._ids = [f"{request.id}-{index}" for index in range(len(request.prompts))]
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
        )  # fmt: skip
        named = self._request.constraint_names.in_errors()
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
