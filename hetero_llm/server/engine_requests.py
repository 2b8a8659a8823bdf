"""One HTTP request's way through the engine: outputs of its prompts, deadline, client gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from hetero_llm.core.outputs import RequestOutput
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.engine.engine_client import EngineClient
from hetero_llm.engine.input_processor import Prompt
from hetero_llm.server.errors import ApiError, invalid, request_failed
from hetero_llm.server.metrics import Metrics

logger = logging.getLogger(__name__)
T = TypeVar("T")

_ABORT_SECONDS = 5.0
"""An engine that does not end a request within this time after its deadline gets no more."""
_MERGED_OUTPUTS = 64
_MAX_TIMEOUT_MS = 7 * 24 * 3600 * 1000
_TIMEOUT_HEADER = "x-request-timeout-ms"


class ClientGone(Exception):
    """Nobody reads the answer any more."""


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
        if not task.done():  # we are being cancelled ourselves
            task.cancel()
            await asyncio.wait({task})


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Deadline:
    """When it passes, the engine ends the requests: what they have so far is their answer."""

    def __init__(self, client: EngineClient, seconds: float | None) -> None:
        self._client = client
        self._seconds = seconds
        self._aborting: asyncio.Task[None] | None = None
        self.passed = False

    @asynccontextmanager
    async def ends(self, request_ids: Sequence[str]) -> AsyncIterator[None]:
        """Raises:
        ApiError: 504, the engine did not even end the requests.
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
        """A sequence that the deadline ended was cut like one that became too long."""
        return "length" if self.passed and finish_reason == "abort" else finish_reason

    def cut(self, finish_reason: str | None) -> bool:
        """Whether the deadline ended this sequence."""
        return self.passed and finish_reason == "abort"

    def error(self, *, queued: bool) -> ApiError:
        """The answer if no token came in time."""
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


def deadline_seconds(request: Request, default: float | None) -> float | None:
    """The sooner of the client's deadline and the server's.

    Raises:
        ApiError: the header is not a number of milliseconds.
    """
    text = request.headers.get(_TIMEOUT_HEADER)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:20]) <= _MAX_TIMEOUT_MS):
        raise invalid(
            _TIMEOUT_HEADER,
            f"{_TIMEOUT_HEADER}={text[:32]!r}: must be 1 to {_MAX_TIMEOUT_MS} milliseconds",
        )
    seconds = int(text) / 1000
    return seconds if default is None else min(seconds, default)


class EngineRun:
    """The engine requests of one HTTP request, one per prompt."""

    def __init__(
        self,
        client: EngineClient,
        metrics: Metrics,
        request_id: str,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        *,
        seconds: float | None,
    ) -> None:
        self._client = client
        self._metrics = metrics
        self._request_id = request_id
        self._prompts = prompts
        self._params = params
        self._ids = [f"{request_id}-{index}" for index in range(len(prompts))]
        self._tokens = 0
        self._scheduled = False
        self.deadline = Deadline(client, seconds)

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Outputs with the position of their prompt, until all are finished. Closing it early
        aborts what still runs.

        Raises:
            RequestError, OverloadedError, DuplicateRequestError, EngineDeadError: of the engine.
            ApiError: a request failed, or the deadline passed before the first token.
        """
        held: list[tuple[int, RequestOutput]] = []
        async with self.deadline.ends(self._ids), aclosing(self._all()) as outputs:
            async for item in outputs:
                held.append(item)
                if self._tokens or not self.deadline.passed:
                    for ready in held:
                        yield ready
                    held.clear()
                # Else this may all be nothing, and the answer a status of its own.
        if self.deadline.passed:
            self._metrics.aborted("timeout")
            if not self._tokens:
                raise self.deadline.error(queued=not self._scheduled)

    def _all(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        return self._one(0) if len(self._ids) == 1 else self._merged()

    async def _one(self, index: int) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        prompt, params = self._prompts[index], self._params[index]
        assert prompt.token_ids is not None
        stream = self._client.generate(self._ids[index], prompt, params)
        with self._metrics.begin(self._ids[index], len(prompt.token_ids), params) as times:
            async with aclosing(stream):
                async for output in stream:
                    if output.error is not None:
                        logger.error("request %s failed: %s", self._request_id, output.error)
                        raise request_failed(self._request_id)
                    times.note(output)
                    self._note(output)
                    yield index, output

    def _note(self, output: RequestOutput) -> None:
        for one in output.outputs:
            self._tokens += len(one.token_ids)
        if output.metrics is not None and output.metrics.first_scheduled_time is not None:
            self._scheduled = True

    async def _merged(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """All prompts' outputs as they come. The first error ends all."""
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
            left = len(pumps)
            while left:
                item = await merged.get()
                if item is None:
                    left -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
