"""The last stage on a CPU, whose runner computes in `launch`."""

from __future__ import annotations

from typing import Any, Protocol

from hetero_llm.core.grammar import OpenMatcher
from hetero_llm.core.model_runner import ModelRunner
from hetero_llm.core.step import ModelRunnerOutput, SchedulerOutput


class StepResources(Protocol):
    """What holds the adapters that a step loads until the step is finished."""

    def begin(self, step: SchedulerOutput) -> None: ...

    def end(self) -> None: ...


class DeferredRunner:
    """`ModelRunner` that launches and finishes a step in `finish`.

    A step that was announced to the stages before is computed there meanwhile: were this stage to
    wait for it in `launch`, the engine could not announce the step behind it.

    Args:
        runner: whose `launch` waits for the stage before.
        resources: of the steps between the two calls.
    """

    def __init__(self, runner: ModelRunner[Any], resources: StepResources) -> None:
        self._runner = runner
        self._resources = resources

    def set_open_matcher(self, open_matcher: OpenMatcher) -> None:
        self._runner.set_open_matcher(open_matcher)

    def launch(self, step: SchedulerOutput) -> SchedulerOutput:
        self._resources.begin(step)
        return step

    def finish(self, pending: SchedulerOutput) -> ModelRunnerOutput:
        output = self._runner.finish(self._runner.launch(pending))
        self._resources.end()
        return output
