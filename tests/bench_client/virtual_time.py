"""An event loop whose time passes only in its own sleeps, and then at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual: where the loop would wait, it moves its clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._really_select = self._selector.select  # type: ignore[attr-defined]
        self._selector.select = self._select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now

    def _select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing is left to wait for"
        self._now += max(timeout, 0.0)
        return self._really_select(0)


def run_virtually(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Runs it to its end; returns its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)
