"""The step loop: schedule, run, update, show.

Law of this file: one step is a few calls in a row, with the next step's schedule and launch put in
between when stepping is asynchronous. What a step does belongs to the part called.
"""

from __future__ import annotations

import logging
from typing import Any

from hetero_llm.core.drafter import BackgroundDrafter
from hetero_llm.core.errors import EngineDeadError
from hetero_llm.core.histogram import Histogram
from hetero_llm.core.model_runner import ModelRunner
from hetero_llm.core.outputs import RequestOutput
from hetero_llm.core.request import Request
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.engine.input_processor import InputProcessor, Prompt
from hetero_llm.engine.output_processor import OutputProcessor
from hetero_llm.engine.speculation_log import SpeculationLog, speculation_metrics
from hetero_llm.engine.step_clock import StepClock
from hetero_llm.kv_cache.hit_log import HitLog
from hetero_llm.scheduler.scheduler import Scheduler
from hetero_llm.utils.gc_control import collect_if_due

logger = logging.getLogger(__name__)


class Engine:
    """Joins scheduler, runner and text processing; knows no device and no model.

    Single-threaded: one caller at a time. An exception inside a step is our bug; it leaves device
    and bookkeeping in an unknown state, so the engine refuses everything afterwards.

    Args:
        asynchronous: launch the next step before the last one's tokens reach the host, wherever
            the requests and the scheduler's drafter allow it. Tokens are the same; a sequence that
            ends by a stop token or string costs one row more.
        attended: the drafter, if something of it runs beside this process.
        hit_log: told of every step, to log where blocks were found.
    """

    def __init__(
        self,
        input_processor: InputProcessor,
        scheduler: Scheduler,
        runner: ModelRunner,
        output_processor: OutputProcessor,
        *,
        asynchronous: bool = False,
        speculation_log: SpeculationLog | None = None,
        attended: BackgroundDrafter | None = None,
        hit_log: HitLog | None = None,
    ) -> None:
        self._input_processor = input_processor
        self._scheduler = scheduler
        self._runner = runner
        self._output_processor = output_processor
        self._asynchronous = asynchronous
        self._speculation_log = speculation_log
        self._attended = attended
        self._hit_log = hit_log
        self._pending: tuple[SchedulerOutput, Any, float] | None = None  # launched, not finished
        self._clock = StepClock()
        self._finished = 0.0  # when the last step was
        self._failure: BaseException | None = None

    @property
    def has_unfinished(self) -> bool:
        return self._scheduler.num_unfinished > 0

    def make_request(self, request_id: str, prompt: Prompt, params: SamplingParams) -> Request:
        """Checks everything about a request without starting it.

        Raises:
            RequestError: it could never be served here.
        """
        request = self._input_processor.make_request(request_id, prompt, params)
        self.check_request(request)
        return request

    def check_request(self, request: Request) -> None:
        """Checks what depends on the scheduler's limits: sequences at once and KV blocks.

        Raises:
            RequestError: the request could never run here.
        """
        self._scheduler.check_request(request)

    def add_request(self, request: Request) -> None:
        """Queues a request that passed `check_request`."""
        self._check_alive()
        self._scheduler.add_request(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request at any time; returns its last output, None if it is not running."""
        request = self._scheduler.abort(request_id)
        return None if request is None else self._output_processor.abort(request)

    def step(self) -> list[RequestOutput]:
        """Finishes one step; returns what became visible, empty if there is nothing to do.

        With asynchronous stepping the next one is launched before that and stays pending: before
        this one's tokens are known where the scheduler allows it, else as soon as they are. When
        the last request ends that step holds only rows nobody waits for: the next call finishes
        it, if there is one, and drops its results.
        """
        self._check_alive()
        clock = self._clock
        clock.begin()
        try:
            pending = self._pending or self._launch(self._scheduler.schedule())
            if pending is None:
                if self._scheduler.loads:  # they are all there is to wait for
                    self._scheduler.loads.nap()
                return []
            if self._asynchronous:
                self._pending = self._launch(self._scheduler.schedule_ahead())
                self._scheduler.run_deferred()
                waited_for = self._scheduler.num_waiting or pending[0].has_chunks
                collect_if_due(calm=not waited_for)
            step, launched, begun = pending
            output = self._runner.finish(launched)
            now = clock.lap("wait")
            self._scheduler.observe_step(step, now - max(begun, self._finished))
            self._finished = now
            touched = self._scheduler.update(step, output)
            clock.lap("update")
            if self._asynchronous and self._pending is None:
                self._pending = self._launch(self._scheduler.schedule())
            if not self._asynchronous:
                self._scheduler.run_deferred()  # what is drafted next may depend on it
            elif not self.has_unfinished:
                self._scheduler.observe_tokens()  # there may be no next step to do it in
            if self._speculation_log is not None:
                self._speculation_log.note(self._scheduler.stats)
            if self._hit_log is not None:
                self._hit_log.note()
            clock.lap("update")
            outputs = self._output_processor.process(touched)
            clock.lap("output")
            clock.end()
            return outputs
        except BaseException as error:
            self._failure = error
            raise

    def metrics(self) -> dict[str, float]:
        """Counters since start and the present state, flat."""
        stats = self._scheduler.stats
        return {
            "num_requests_running": self._scheduler.num_running,
            "num_requests_waiting": self._scheduler.num_waiting,
            "num_requests_finished": stats.num_requests_finished,
            "num_preemptions": stats.num_preemptions,
            "num_steps": stats.num_steps,
            "prefix_cache_queries": stats.prefix_cache_queries,
            "prefix_cache_hits": stats.prefix_cache_hits,
            "prompt_tokens": stats.prompt_tokens,
            "generation_tokens": stats.generation_tokens,
            "kv_cache_usage_perc": self._scheduler.kv_cache_usage,
            "spec_decode_num_drafts": stats.num_drafts,
            "spec_decode_num_draft_tokens": stats.num_draft_tokens,
            "spec_decode_num_accepted_tokens": stats.num_accepted_tokens,
            **{
                f"spec_decode_num_accepted_tokens_per_pos_{place}": count
                for place, count in enumerate(stats.accepted_at)
            },
            "last_step_timestamp_seconds": self._clock.last_step,
            **self._scheduler.loads.metrics(),
            **(speculation_metrics(stats) if stats.num_drafts else {}),
            **({} if self._attended is None else self._attended.metrics()),
        }

    def histograms(self) -> dict[str, Histogram]:
        """What is counted of every step: its tokens, and the seconds of its phases."""
        return {
            "iteration_tokens_total": self._scheduler.stats.step_tokens,
            **self._clock.histograms(),
        }

    def poll_host_memory(self) -> bool:
        """Lets copies to host memory go on while there is nothing to run; whether more is to come.
        To be called now and then when idle."""
        self._check_alive()
        return self._scheduler.poll_host_memory()

    def shut_down(self) -> None:
        """Ends what runs beside this process; the engine is not to be used afterwards."""
        if self._attended is not None:
            self._attended.shut_down()
        if self._hit_log is not None:
            self._hit_log.close()
        self._scheduler.loads.shut_down()

    def reset_prefix_cache(self) -> None:
        self._scheduler.reset_prefix_cache()

    def _launch(self, step: SchedulerOutput | None) -> tuple[SchedulerOutput, Any, float] | None:
        """The step, what its runner made of it, and when it began."""
        begun = self._clock.lap("schedule")
        if step is None:
            return None
        launched = self._runner.launch(step)
        self._scheduler.step_launched()
        self._clock.lap("launch")
        return step, launched, begun

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(
                f"a step failed earlier: {type(self._failure).__name__}: {self._failure}"
            ) from self._failure
