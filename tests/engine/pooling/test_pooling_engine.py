"""The step loop of pooling models over a runner that returns the first token of each input."""

from __future__ import annotations

import numpy as np
import pytest

from hetero_llm.core.errors import EngineDeadError
from hetero_llm.core.pooling import Finish, PoolingInput, PoolingRequest
from hetero_llm.engine.pooling.pooling_engine import PoolingEngine
from hetero_llm.pooling.input_queue import InputQueue
from hetero_llm.pooling.runner import PooledStep


class EchoRunner:
    """Returns [first token, length]; token 7 gives no number, token 9 fails the step."""

    num_running = 0

    def __init__(self) -> None:
        self.batches: list[int] = []

    def step(self, queue: InputQueue) -> PooledStep:
        taken = queue.take_alike(64, 4)
        self.batches.append(len(taken))
        first = [int(one.input.token_ids[0]) for one in taken]
        assert 9 not in first
        values = [np.array([np.nan if a == 7 else a, len(b)], np.float32)
                  for a, b in zip(first, taken, strict=True)]  # fmt: skip
        return PooledStep(list(zip(taken, values, strict=True)), sum(map(len, taken)))

    def drop(self, key: str) -> None:
        pass


def request(key: str, *inputs: tuple[int, int]) -> PoolingRequest:
    made = [PoolingInput(np.full(length, token, np.int32)) for token, length in inputs]
    return PoolingRequest(key, made, Finish())


def test_requests_are_batched_together_and_come_back_whole() -> None:
    runner = EchoRunner()
    engine = PoolingEngine(runner)
    engine.add_request(request("a", (1, 3), (2, 60)))
    engine.add_request(request("b", (3, 4)))
    engine.add_request(request("c", (4, 3), (5, 4)))
    assert engine.metrics()["num_requests_waiting"] == 3
    done = engine.step()  # the four short ones
    assert runner.batches == [4] and sorted(one.key for one in done) == ["b", "c"]
    by_key = {one.key: one for one in done}
    assert [one.tolist() for one in by_key["c"].values] == [[4.0, 3.0], [5.0, 4.0]]
    metrics = engine.metrics()
    assert (metrics["num_requests_running"], metrics["num_inputs_waiting"]) == (1, 1)
    (last,) = engine.step()
    assert [one.tolist() for one in last.values] == [[1.0, 3.0], [2.0, 60.0]]
    assert last.scheduled > 0 and last.error is None
    assert not engine.has_unfinished and engine.step() == []
    metrics = engine.metrics()
    assert (metrics["num_steps"], metrics["prompt_tokens"]) == (2, 74)
    assert metrics["num_requests_finished"] == 3
    assert engine.histograms()["iteration_tokens_total"].total == 74


def test_an_abort_leaves_the_others() -> None:
    engine = PoolingEngine(EchoRunner())
    engine.add_request(request("a", (1, 3), (2, 60)))
    engine.add_request(request("b", (3, 60)))
    engine.step()
    engine.abort("a")
    engine.abort("never there")
    (done,) = engine.step()
    assert done.key == "b" and not engine.has_unfinished and len(engine.queue) == 0


def test_values_that_are_no_numbers_fail_their_request_alone() -> None:
    engine = PoolingEngine(EchoRunner())
    engine.add_request(request("a", (7, 3)))
    engine.add_request(request("b", (1, 3)))
    by_key = {one.key: one.error for one in engine.step()}
    assert by_key == {"a": "the model returned a value that is no finite number", "b": None}


def test_a_step_that_fails_ends_the_engine() -> None:
    engine = PoolingEngine(EchoRunner())
    engine.add_request(request("a", (9, 1)))
    with pytest.raises(AssertionError):
        engine.step()
    for call in (engine.step, lambda: engine.add_request(request("b", (1, 1)))):
        with pytest.raises(EngineDeadError, match="a step failed earlier: AssertionError"):
            call()
