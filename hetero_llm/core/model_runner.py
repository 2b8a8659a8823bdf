"""The contract of a runner, on whatever device."""

from __future__ import annotations

from typing import Protocol, TypeVar

from hetero_llm.core.step import ModelRunnerOutput, SchedulerOutput

P = TypeVar("P")


class ModelRunner(Protocol[P]):
    """What the engine needs of a runner: `launch` must not wait for the device, `finish` may.

    With asynchronous stepping a step is launched before the one launched last is finished; the
    device runs them in order, and `finish` waits for its own step only.
    """

    def launch(self, step: SchedulerOutput) -> P: ...

    def finish(self, pending: P) -> ModelRunnerOutput: ...
