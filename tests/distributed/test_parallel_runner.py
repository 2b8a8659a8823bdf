"""Rank 0 announces what it does, and explains its failures by those of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hetero_llm.core.errors import RankDeadError
from hetero_llm.core.step import ModelRunnerOutput, SchedulerOutput
from hetero_llm.distributed.parallel_runner import ParallelRunner

NONE = np.zeros(0, np.int32)
STEP = SchedulerOutput(
    NONE, NONE, NONE, NONE, NONE, (), (), np.zeros((3, 0), np.int32), np.zeros((2, 0), np.int32)
)
OUTPUT = ModelRunnerOutput([], None, {}, {})


class Calls:
    """Runner and ranks at once: notes the order of calls."""

    def __init__(self, error: Exception | None = None, why: Exception | None = None) -> None:
        self.made: list[Any] = []
        self.error, self.reason = error, why

    # the ranks
    def announce(self, name: str) -> None:
        self.made.append(f"announce {name}")

    def why(self, error: BaseException) -> BaseException:
        return self.reason or error


class Ranks(Calls):
    def launch(self, step: SchedulerOutput) -> None:
        self.announce("launch")

    def finish(self) -> None:
        self.announce("finish")

    def check(self) -> None:
        if self.error is None and self.reason is not None:
            raise self.reason


class Runner:
    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def launch(self, step: SchedulerOutput) -> int:
        self.calls.made.append("launch")
        if self.calls.error is not None:
            raise self.calls.error
        return 7

    def set_open_matcher(self, open_matcher: Any) -> None:
        self.calls.made.append(open_matcher)

    def finish(self, pending: int) -> ModelRunnerOutput:
        self.calls.made.append(f"finish {pending}")
        if self.calls.error is not None:
            raise self.calls.error
        return OUTPUT


def parallel(
    ranks: Ranks, gave_up: bool = False, timed_out: Callable[[], bool] = lambda: False
) -> ParallelRunner[int]:
    return ParallelRunner(Runner(ranks), ranks, lambda: gave_up, timed_out)  # type: ignore[arg-type]


def test_each_call_is_announced_first() -> None:
    ranks = Ranks()
    runner = parallel(ranks)
    assert runner.finish(runner.launch(STEP)) is OUTPUT
    runner.set_open_matcher(None)  # type: ignore[arg-type]
    assert ranks.made == ["announce launch", "launch", "announce finish", "finish 7", None]


def test_a_failure_that_a_rank_has_caused_is_that_of_the_rank() -> None:
    dead = RankDeadError("rank 1 was ended by signal 9")
    ranks = Ranks(RuntimeError("connection closed"), dead)
    runner = parallel(ranks)
    for call in (lambda: runner.launch(STEP), lambda: runner.finish(7)):
        with pytest.raises(RankDeadError) as caught:
            call()
        assert caught.value is dead and caught.value.__cause__ is ranks.error


def test_a_failure_of_its_own_stays() -> None:
    ranks = Ranks(RuntimeError("broken"))
    runner = parallel(ranks)
    with pytest.raises(RuntimeError, match="broken"):
        runner.launch(STEP)
    with pytest.raises(RuntimeError, match="broken"):
        runner.finish(7)


def test_results_of_a_step_that_was_aborted_are_not_returned() -> None:
    dead = RankDeadError("rank 1 was ended by signal 9")
    ranks = Ranks(None, dead)
    runner = parallel(ranks)
    with pytest.raises(RankDeadError):
        runner.finish(runner.launch(STEP))


def test_a_collective_that_gave_up_ends_the_engine() -> None:
    runner = parallel(Ranks(), gave_up=True)
    with pytest.raises(RankDeadError, match="did not come to it in time"):
        runner.finish(runner.launch(STEP))


def test_a_load_that_another_rank_has_given_up() -> None:
    """Asked only of steps that wait for loads, in their order."""
    said = iter([False, True])
    runner = parallel(Ranks(), timed_out=lambda: next(said))
    waiting = replace(STEP, kv_loads=(3, 4))
    found = []
    for step in (waiting, STEP, waiting):
        runner.launch(step)
    for _ in range(3):
        found.append(runner.finish(7).kv_loads_timed_out)
    assert found == [False, False, True] and next(said, None) is None
