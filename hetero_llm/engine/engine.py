"""The step loop: schedule, launch, finish, update, output.

A step is a few calls one after another. With asynchronous stepping the next step is scheduled and
launched between the launch and the finish of this one. The loop only calls; the work is done by the
scheduler, the runner and the output processor.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, Any

from hetero_llm.core.drafter import BackgroundDrafter
from hetero_llm.core.errors import EngineDeadError, HeteroLLMError
from hetero_llm.core.histogram import Histogram
from hetero_llm.core.lora import LoRARequest, check_lora_request
from hetero_llm.core.model_runner import ModelRunner
from hetero_llm.core.outputs import RequestOutput
from hetero_llm.core.prompt_adapter import PromptAdapterRequest
from hetero_llm.core.request import Request
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.distributed.rank_processes import NoRanks, RankProcesses
from hetero_llm.engine.inputs.input_processor import InputProcessor, Prompt
from hetero_llm.engine.kv_events import KvEventPublisher, NoKvEventPublisher
from hetero_llm.engine.output_processor import OutputProcessor
from hetero_llm.engine.speculation_log import SpeculationLog, speculation_metrics
from hetero_llm.kv_cache.hit_log import HitLog
from hetero_llm.lora.no_adapters import NoAdapters
from hetero_llm.scheduler.scheduler import Scheduler
from hetero_llm.structured_output.compile_queue import CompileQueue
from hetero_llm.structured_output.compiler import GrammarCompiler
from hetero_llm.utils.gc_control import collect_if_due

if TYPE_CHECKING:
    from hetero_llm.lora.store import AdapterStore

logger = logging.getLogger(__name__)

PHASES = ("schedule", "launch", "wait", "update", "output")
"""Phases of a step: choosing tokens, launching them on the device, waiting for the device, updating
the scheduler, producing text."""

_BOUNDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1,
           0.25, 0.5, 1.0, 2.5, 10.0)  # fmt: skip


_Launched = tuple[SchedulerOutput, Any, float]
"""A step, the runner's handle for `finish`, and the time when its launch began."""


class StepClock:
    """Measures how long each phase of a step takes, in seconds, and keeps a histogram a phase.

    A phase may run several times in a step; its durations are added up.

    Attributes:
        last_step: Unix time in seconds of the last step's end, 0 before the first.
    """

    def __init__(self) -> None:
        self.last_step = 0.0
        self._sums = dict.fromkeys(PHASES, 0.0)
        self._histograms = {phase: Histogram.empty(_BOUNDS) for phase in PHASES}
        self._last_lap = 0.0

    def begin(self) -> None:
        """Starts a step. A step without `end` before is dropped."""
        for phase in PHASES:
            self._sums[phase] = 0.0
        self._last_lap = perf_counter()

    def lap(self, phase: str) -> float:
        """Adds the time since the last lap to `phase`. Returns the present `perf_counter` time."""
        now = perf_counter()
        self._sums[phase] += now - self._last_lap
        self._last_lap = now
        return now

    def end(self) -> None:
        """Ends the step: adds the sums of its phases to the histograms."""
        self.last_step = time.time()
        for phase, seconds in self._sums.items():
            self._histograms[phase].observe(seconds)

    def histograms(self) -> dict[str, Histogram]:
        """Histograms of the phases in seconds, by name: "step_seconds/<phase>"."""
        return {f"step_seconds/{phase}": kept for phase, kept in self._histograms.items()}


# large: all that a step passes through, of which several are optional.
class Engine:
    """Joins scheduler, runner and text processing; knows no device and no model.

    Not thread-safe: one caller at a time. An exception inside a step is a bug of ours and leaves
    device and scheduler in an unknown state, so every later call raises `EngineDeadError`.

    Args:
        asynchronous: launch the next step before the last one's tokens reach the host, wherever
            the requests and the scheduler's drafter allow it. Tokens are the same; a sequence that
            ends by a stop token or string has one more token computed, which is dropped.
        background_drafter: the drafter, if part of it runs in another process; the engine reports
            its metrics and shuts it down.
        hit_log: notified after each step; logs where blocks were found.
        grammars: compiles the grammars of requests; None if none has any.
        adapters: reads LoRA adapters and keeps them in host memory; None: none are served.
        ranks: the processes that run the model with this one; None: there are none.
        kv_events: where changes of the prefix cache are published; None: nowhere.

    The four parts, `asynchronous`, `adapters` and `background_drafter` are attributes: benches and
    tests read the parts' counters and call their `check_integrity`.
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
        background_drafter: BackgroundDrafter | None = None,
        hit_log: HitLog | None = None,
        grammars: GrammarCompiler | None = None,
        adapters: AdapterStore | None = None,
        ranks: RankProcesses | NoRanks | None = None,
        kv_events: KvEventPublisher | None = None,
    ) -> None:
        self.input_processor = input_processor
        self.scheduler = scheduler
        self.runner = runner
        self.output_processor = output_processor
        self.asynchronous = asynchronous
        self.adapters: AdapterStore | NoAdapters = adapters or NoAdapters()
        self._ranks = ranks or NoRanks()
        self._speculation_log = speculation_log
        self.background_drafter = background_drafter
        self._hit_log = hit_log
        self._kv_events: KvEventPublisher = kv_events or NoKvEventPublisher()
        self._compiling = CompileQueue(grammars)
        self._pending: deque[_Launched] = deque()  # not finished, oldest first
        self._clock = StepClock()
        self._last_finish = 0.0  # when the last step finished, `perf_counter` time
        self._failure: BaseException | None = None

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.num_unfinished > 0 or len(self._compiling) > 0

    def make_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
    ) -> Request:
        """Builds and checks a request without starting it. Its adapters are read if they are new.

        Raises:
            RequestError: the engine could never serve it.
        """
        adapter = None
        if lora_request is not None:
            adapter = self.adapters.open(check_lora_request(lora_request))
        request = self.input_processor.make_request(
            request_id, prompt, params, adapter, prompt_adapter_request
        )
        self.check_request(request)
        return request

    def check_request(self, request: Request) -> None:
        """Checks a request against the scheduler's limits: concurrent sequences and KV blocks; and
        that its adapter is known.

        Raises:
            RequestError: the engine could never run it.
        """
        if request.adapter is not None:
            self.adapters.check(request.adapter)
        self.scheduler.check_request(request)

    def add_request(self, request: Request) -> None:
        """Queues a request that passed `check_request`."""
        self.check_alive()
        if request.grammar is not None:
            self._ranks.compile_grammar(request.grammar)
        self._kv_events.note_request(request)
        if not self._compiling.add(request):
            self.scheduler.add_request(request)
        if not self.asynchronous:  # a launch may compute the step, which needs the grammar
            self._compiling.start()

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request. Returns its last output, None if it is not running."""
        held = self._compiling.take(request_id)
        if held is not None:
            self.scheduler.add_request(held)
        request = self.scheduler.abort(request_id)
        return None if request is None else self.output_processor.abort(request)

    def step(self) -> list[RequestOutput]:
        """Finishes one step and returns its outputs; none if there is nothing to do.

        With asynchronous stepping the next step is launched, too, and stays pending until the next
        call: before this step's tokens are known where the scheduler allows it, else right after.
        Where the layers are cut into stages, several are. When the last request ends, pending steps
        compute only tokens of ended requests; the next calls of `step`, if there are any, finish
        them and drop their results.
        """
        self.check_alive()
        clock = self._clock
        clock.begin()
        for request in self._compiling.take_ready():
            self.scheduler.add_request(request)
        try:
            if not self._pending:
                self._launch(self.scheduler.schedule())
            if not self._pending:
                self._compiling.start()
                if self.scheduler.loads:  # all requests wait for KV loads
                    self.scheduler.loads.nap()
                elif self._compiling:
                    self._compiling.nap()
                self._kv_events.flush()
                return self.output_processor.process(self.scheduler.take_failed())
            if self.asynchronous:
                self._launch_ahead()
                self._compiling.start()
            step, launched, begun = self._pending.popleft()
            if self.asynchronous:
                self.scheduler.run_deferred()
                if not self._pending:
                    self.scheduler.prepare_next()
                prompt_pending = self.scheduler.num_waiting or step.has_chunks
                collect_if_due(calm=not prompt_pending)
            output = self.runner.finish(launched)
            now = clock.lap("wait")
            idle = begun - self._last_finish
            self._last_finish = now
            if self.asynchronous and not self._pending:
                self._launch(self.scheduler.schedule_next(output))
            seconds, num_sampled = now - begun + min(idle, 0.0), len(output.token_ids)
            self.scheduler.observe_step(step, seconds, max(idle, 0.0), num_sampled=num_sampled)
            touched = self.scheduler.update(step, output)
            moves = self.scheduler.take_kv_moves()
            if moves.size:
                self._ranks.move_kv(moves)
            clock.lap("update")
            if self.asynchronous and not self._pending:
                self._launch(self.scheduler.schedule())
            if self.scheduler.num_stages > 1 and self._pending:
                self._launch_ahead()  # the first stage would wait for the outputs to be made
            if not self.asynchronous:
                self.scheduler.run_deferred()  # the next drafts may depend on these tokens
            elif not self.has_unfinished:
                self.scheduler.observe_tokens()  # there may be no next step that does it
            if self._speculation_log is not None:
                self._speculation_log.note(self.scheduler.stats)
            if self._hit_log is not None:
                self._hit_log.note()
            clock.lap("update")
            self._kv_events.flush()
            outputs = self.output_processor.process(touched)
            clock.lap("output")
            clock.end()
            return outputs
        except BaseException as error:
            self._failure = error
            raise

    def check_alive(self) -> None:
        """Raises EngineDeadError if a step has failed, or a process of another rank."""
        if self._failure is None:
            try:
                self._ranks.check()
            except HeteroLLMError as error:
                self._failure = error
                raise
        if self._failure is not None:
            raise EngineDeadError(
                f"a step failed earlier: {type(self._failure).__name__}: {self._failure}"
            ) from self._failure

    def metrics(self) -> dict[str, float]:
        """Counters since start and gauges of the present state, by name."""
        stats = self.scheduler.stats
        return {
            "num_requests_running": self.scheduler.num_running,
            "num_requests_waiting": self.scheduler.num_waiting + len(self._compiling),
            "num_requests_finished": stats.num_requests_finished,
            "num_preemptions": stats.num_preemptions,
            "num_steps": stats.num_steps,
            "num_steps_ahead": stats.num_steps_ahead,
            "prefix_cache_queries": stats.prefix_cache_queries,
            "prefix_cache_hits": stats.prefix_cache_hits,
            "prompt_tokens": stats.prompt_tokens,
            "generation_tokens": stats.generation_tokens,
            "kv_cache_usage_perc": self.scheduler.kv_cache_usage,
            "spec_decode_num_drafts": stats.num_drafts,
            "spec_decode_num_draft_tokens": stats.num_draft_tokens,
            "spec_decode_num_accepted_tokens": stats.num_accepted_tokens,
            **{
                f"spec_decode_num_accepted_tokens_per_pos_{position}": count
                for position, count in enumerate(stats.accepted_at)
            },
            "last_step_timestamp_seconds": self._clock.last_step,
            **self.scheduler.loads.metrics(),
            **(speculation_metrics(stats) if stats.num_drafts else {}),
            **({} if self.background_drafter is None else self.background_drafter.metrics()),
            **self._adapter_metrics(),
        }

    def _adapter_metrics(self) -> dict[str, float]:
        """Requests by the names of their adapters: "lora_running/<name>" and "lora_waiting/<name>";
        nothing without slots."""
        slots = self.scheduler.adapters
        if not slots.num_slots:
            return {}
        running, waiting = self.scheduler.count_adapters()
        return {
            "max_loras": slots.num_slots,
            "lora_loads": slots.num_loads,
            **{f"lora_running/{name}": count for name, count in running.items()},
            **{f"lora_waiting/{name}": count for name, count in waiting.items()},
        }

    def histograms(self) -> dict[str, Histogram]:
        """Histograms over all steps: tokens of a step, and seconds of each of its phases."""
        return {
            "iteration_tokens_total": self.scheduler.stats.step_tokens,
            **self._clock.histograms(),
        }

    def poll_host_memory(self) -> bool:
        """Continues copies of KV to host memory while no request runs: the caller calls it
        repeatedly when idle. Returns whether there is more to copy."""
        self.check_alive()
        more = self.scheduler.poll_host_memory()
        self._kv_events.flush()
        return more

    def shut_down(self) -> None:
        """Ends the draft worker, the KV copies and the other ranks. The engine must not be used
        afterwards."""
        if self.background_drafter is not None:
            self.background_drafter.shut_down()
        if self._hit_log is not None:
            self._hit_log.close()
        self.scheduler.loads.shut_down()
        self._compiling.close()
        self._ranks.shut_down()
        self._kv_events.close()

    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()
        self._kv_events.flush()

    def _launch_ahead(self) -> None:
        """Launches further steps behind those in flight, as many as the scheduler makes."""
        while self.scheduler.may_run_ahead:
            count = len(self._pending)
            self._launch(self.scheduler.schedule_ahead())
            if len(self._pending) == count:
                return

    def _launch(self, step: SchedulerOutput | None) -> None:
        """Launches a step, if there is one."""
        begun = self._clock.lap("schedule")
        if step is None:
            return
        launched = self.runner.launch(step)
        self.scheduler.step_launched()
        self._clock.lap("launch")
        self._pending.append((step, launched, begun))
