"""The step loop of a pooling model: what `Engine` is to a model that generates."""

from __future__ import annotations

import logging

import numpy as np

from hetero_llm.core.errors import EngineDeadError
from hetero_llm.core.histogram import Histogram
from hetero_llm.core.pooling import PoolingRequest, PoolingResult
from hetero_llm.engine.engine import StepClock
from hetero_llm.pooling.finish import finish
from hetero_llm.pooling.input_queue import InputQueue, RunningRequest
from hetero_llm.pooling.runner import PoolingRunner

logger = logging.getLogger(__name__)

_STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0,
                16384.0)  # fmt: skip
_NOT_FINITE = "the model returned a value that is no finite number"


class PoolingEngine:
    """Joins the queue of inputs and a runner.

    Not thread-safe: one caller at a time. After an exception inside a step every later call raises
    `EngineDeadError`.

    Attributes:
        queue: inputs that wait.
        runner: runs the model.
    """

    def __init__(self, runner: PoolingRunner) -> None:
        self.queue = InputQueue()
        self.runner = runner
        self._requests: dict[str, RunningRequest] = {}
        self._clock = StepClock()
        self._step_tokens = Histogram.empty(_STEP_TOKENS)
        self._failure: BaseException | None = None
        self._num_steps = self._num_finished = self._num_tokens = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def check_request(self, request: PoolingRequest) -> None:
        """Its inputs were checked when they were made: any number of them finds room."""
        assert isinstance(request, PoolingRequest), "the model pools"

    def add_request(self, request: PoolingRequest) -> None:
        """Queues a checked request, which has an input at least."""
        self.check_alive()
        assert request.inputs and request.key not in self._requests
        running = self._requests[request.key] = RunningRequest.of(request)
        self.queue.add(running)

    def abort(self, key: str) -> None:
        """Ends a request without a result; unknown keys are ignored."""
        if self._requests.pop(key, None) is not None:
            self.queue.remove(key)
            self.runner.drop(key)

    def step(self) -> list[PoolingResult]:
        """Computes one batch; returns the requests that are finished with it."""
        self.check_alive()
        if not self._requests:
            return []
        clock = self._clock
        clock.begin()
        try:
            step = self.runner.step(self.queue)
            clock.lap("wait")
            self._num_steps += 1
            self._num_tokens += step.num_tokens
            self._step_tokens.observe(step.num_tokens)
            results = []
            for queued, values in step.done:
                running = queued.owner
                running.values[queued.index] = finish(values, running.request.finish)
                running.left -= 1
                if not running.left:
                    results.append(self._result(running))
            clock.lap("output")
            clock.end()
            return results
        except BaseException as error:
            self._failure = error
            raise

    def check_alive(self) -> None:
        """Raises EngineDeadError if a step has failed."""
        if self._failure is not None:
            raise EngineDeadError(
                f"a step failed earlier: {type(self._failure).__name__}: {self._failure}"
            ) from self._failure

    def metrics(self) -> dict[str, float]:
        """Counters since start and gauges of the present state, by the names of `Engine`'s."""
        waiting = sum(not running.scheduled for running in self._requests.values())
        return {
            "num_requests_running": len(self._requests) - waiting,
            "num_requests_waiting": waiting,
            "num_requests_finished": self._num_finished,
            "num_inputs_waiting": len(self.queue),
            "num_steps": self._num_steps,
            "num_preemptions": 0,
            "prompt_tokens": self._num_tokens,
            "generation_tokens": 0,
            "kv_cache_usage_perc": 0.0,
            "last_step_timestamp_seconds": self._clock.last_step,
        }

    def histograms(self) -> dict[str, Histogram]:
        """Histograms over all steps: tokens of a step, and seconds of each of its phases."""
        return {"iteration_tokens_total": self._step_tokens, **self._clock.histograms()}

    def poll_host_memory(self) -> bool:
        """Nothing is copied to host memory."""
        return False

    def shut_down(self) -> None:
        """Nothing runs beside the engine."""

    def _result(self, running: RunningRequest) -> PoolingResult:
        key = running.request.key
        del self._requests[key]
        self._num_finished += 1
        values = [one for one in running.values if one is not None]
        assert len(values) == len(running.values)
        error = None if all(map(_is_finite, values)) else _NOT_FINITE
        return PoolingResult(key, values, running.scheduled, error)


def _is_finite(values: np.ndarray) -> bool:
    return bool(np.isfinite(values).all())
