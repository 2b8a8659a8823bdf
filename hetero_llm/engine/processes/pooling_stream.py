"""The result of one request to a pooling model, between the engine and its reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hetero_llm.core.errors import HeteroLLMError
from hetero_llm.engine.processes.messages import Pooled
from hetero_llm.engine.processes.replica_choice import Assignment


class PoolingStream:
    """A place for one result; attributes as of `OutputStream`."""

    def __init__(self, key: str, request_id: str, arrival: float) -> None:
        self.key = key
        self.request_id = request_id
        self.arrival = arrival
        self.sent = False
        self.ended = False
        self.abort_wanted = False
        self.assignment: Assignment | None = None
        self.answered = False
        self._result: Pooled | None = None
        self._make_error: Callable[[], HeteroLLMError] | None = None
        self._ready = asyncio.Event()

    def put(self, result: Pooled) -> None:
        self._result = result
        self.ended = True
        self._ready.set()

    def fail(self, make_error: Callable[[], HeteroLLMError]) -> None:
        """Ends the wait with this error unless there is a result. The first error counts."""
        self._make_error = self._make_error or make_error
        self.ended = True
        self._ready.set()

    async def get(self) -> Pooled:
        """The result.

        Raises:
            HeteroLLMError: that of `fail`.
        """
        await self._ready.wait()
        if self._result is not None:
            return self._result
        assert self._make_error is not None
        raise self._make_error()
