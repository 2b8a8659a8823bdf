"""A step is computed when it is finished, and its adapters are held until then."""

from __future__ import annotations

from typing import Any

from hetero_llm.core.step import ModelRunnerOutput, SchedulerOutput
from hetero_llm.distributed.deferred_runner import DeferredRunner
from tests.distributed.test_parallel_runner import OUTPUT, STEP


class Noted:
    """Runner and resources at once: notes the order of calls."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def launch(self, step: SchedulerOutput) -> int:
        self.made.append("launch")
        return 3

    def finish(self, pending: int) -> ModelRunnerOutput:
        self.made.append(f"finish {pending}")
        return OUTPUT

    def set_open_matcher(self, open_matcher: Any) -> None:
        self.made.append(open_matcher)

    def begin(self, step: SchedulerOutput) -> None:
        self.made.append("begin")

    def end(self) -> None:
        self.made.append("end")


def test_steps_are_launched_when_they_are_finished() -> None:
    noted = Noted()
    runner = DeferredRunner(noted, noted)
    pending = [runner.launch(STEP), runner.launch(STEP)]
    assert noted.made == ["begin", "begin"]
    assert [runner.finish(one) for one in pending] == [OUTPUT, OUTPUT]
    assert noted.made[2:] == ["launch", "finish 3", "end"] * 2
    runner.set_open_matcher(None)  # type: ignore[arg-type]
    assert noted.made[-1] is None
