"""The protocol of model runners, on any device."""

from __future__ import annotations

from typing import Protocol, TypeVar

from hetero_llm.core.grammar import OpenMatcher
from hetero_llm.core.step import ModelRunnerOutput, SchedulerOutput

P = TypeVar("P")


class ModelRunner(Protocol[P]):
    """Runs steps in the order of their launch.

    With asynchronous stepping the engine launches a step before it finishes the one launched last.
    """

    def launch(self, step: SchedulerOutput) -> P:
        """Starts a step without waiting for the device; the result is for `finish`."""

    def set_open_matcher(self, open_matcher: OpenMatcher) -> None:
        """Sets what opens the grammars of admitted sequences; call it before one has any."""

    def finish(self, pending: P) -> ModelRunnerOutput:
        """Waits for a launched step, and for no later one, and returns its output."""
