"""The scheduler: decides which tokens of which sequences run in the next step.

There is no prefill phase and no decode phase: every step lets each sequence's
`num_computed_tokens` catch up with its known tokens under one token budget. Chunked prefill, prefix
hits, preemption and forks all follow from that.

This file needs no torch, no text and no clock but the monotonic one. The scheduler alone writes
requests and sequences; it allocates KV blocks through the block manager.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from hetero_llm.config.engine_config import SchedulerConfig
from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.drafter import (
    ArrayDrafter,
    Drafter,
    PromptObserver,
    SleepingDrafter,
    StepReport,
)
from hetero_llm.core.errors import AdapterError, PromptError, SamplingError
from hetero_llm.core.request import FinishReason, Request, Sequence
from hetero_llm.core.step import (
    AdmittedSequence,
    ModelRunnerOutput,
    SampleLogprobs,
    SchedulerOutput,
)
from hetero_llm.kv_cache.block_manager import BlockManager
from hetero_llm.scheduler.adapter_slots import AdapterSlots, NoAdapterSlots
from hetero_llm.scheduler.beam_search import BeamGroup, HoldsStop, advance_group, best_sequences
from hetero_llm.scheduler.deferred_work import (
    IDLE_BLOCKS,
    DeferredCaching,
    OffloadThrottle,
    allocate_ahead,
)
from hetero_llm.scheduler.draft_admission import allocate_nodes, choose_drafts
from hetero_llm.scheduler.grammar_drafts import GrammarDrafts, NoGrammarDrafts
from hetero_llm.scheduler.kv_loads import KVLoadQueue, NoKVLoads
from hetero_llm.scheduler.request_slots import RequestSlots
from hetero_llm.scheduler.stage_moves import NO_MOVES, moves_of_accepted
from hetero_llm.scheduler.stats import SchedulerStats
from hetero_llm.scheduler.steady_batch import (
    SteadyBatch,
    build_steady_step,
    count_as_scheduled,
    steady_batch,
)
from hetero_llm.scheduler.step_builder import InFlight, admitted_sequence, build_step
from hetero_llm.scheduler.waiting_queue import WaitingQueue


# large: the one writer of requests and sequences, from their arrival to their end.
class Scheduler:
    """Owns every request from `add_request` until it is finished.

    A step is in flight from `schedule` to `update`; `schedule_ahead` makes more meanwhile: one, or
    where the layers are cut into stages one for each stage.
    Steps run in the order they were made, so blocks freed while a step in flight still writes to
    them can be allocated at once: their next owner writes later. Such a stray write goes to a
    position of its own sequence that no `update` will confirm. A block enters the prefix cache only
    up to confirmed tokens, and gets a second reader only through the prefix cache or by a fork, for
    which nothing is in flight: so a stray write hits neither a cached block nor one with another
    reader. The same holds for the KV of draft nodes, which lies behind all confirmed tokens.

    With stages a sequence that samples in a step in flight waits for that token, and the others run
    in the next step: so the stages work on different sequences, or on different chunks of a prompt,
    at the same time, and every step has its input tokens from the host. Of decoding sequences a
    step takes its share, those first that have waited longest. Where there may be drafts it takes
    all of them, and beside it run chunks alone: the drafter learns from a step before it proposes
    for the next one. What closes gaps in the KV of accepted nodes is computed by `update`.

    Args:
        config: limits of a step.
        blocks: the KV pool; its block tables are named by request slot.
        holds_stop: used by beam search alone; elsewhere the output processor looks for stop
            strings.
        drafter: proposes draft trees; the runner must be one that verifies them. While it is not
            idle no step is made ahead.
        loads: the sequences whose prefix is being copied from host memory.
        grammar_drafts: drafts what grammars force; None: nothing does.
        adapters: the slots of LoRA adapters; None: no request has one.

    Attributes:
        blocks, drafter, loads, adapters: see Args; `loads` is a null object without host memory,
            `adapters` one without adapters.
        stats: counters since start.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        holds_stop: HoldsStop | None = None,
        *,
        drafter: Drafter | None = None,
        loads: KVLoadQueue | None = None,
        grammar_drafts: GrammarDrafts | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.adapters: AdapterSlots | NoAdapterSlots = adapters or NoAdapterSlots()
        self.loads: KVLoadQueue | NoKVLoads = NoKVLoads() if loads is None else loads
        self.blocks = blocks
        self.drafter = drafter
        self.stats = SchedulerStats()
        self._config = config
        self._holds_stop = holds_stop
        # Asked once: a check against a protocol takes 20 us.
        self._array_drafter = drafter if isinstance(drafter, ArrayDrafter) else None
        self._sleeping_drafter = drafter if isinstance(drafter, SleepingDrafter) else None
        self._num_to_sleep = self._num_slept = 0  # steps of the drafter's pause
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []
        self._request_slots = RequestSlots(config.max_num_seqs)
        self._requests: dict[str, Request] = {}
        self._beams: dict[str, BeamGroup] = {}
        self._admitted: list[AdmittedSequence] = []
        self._in_flight: deque[InFlight] = deque()
        self._new_prompts: list[Sequence] = []  # admitted since the last launch, may be drafted
        self._caching = DeferredCaching(blocks)
        self._offload_throttle = OffloadThrottle()
        self._grammar_drafts: GrammarDrafts | NoGrammarDrafts = (
            NoGrammarDrafts() if grammar_drafts is None else grammar_drafts
        )
        self._num_guided = 0  # running sequences with a grammar that may have drafts
        self._num_synchronous = 0  # running sequences of requests that allow no step ahead
        self._steady: SteadyBatch | None = None  # from `prepare_next` to `schedule_next`
        self._kv_moves = NO_MOVES  # of the step updated last
        self._failed: list[Sequence] = []  # ended since the last `take_failed`

    @property
    def num_stages(self) -> int:
        """Parts of the layers that work on different steps at the same time."""
        return self._config.num_stages

    @property
    def num_in_flight(self) -> int:
        """Steps that `update` has not got yet."""
        return len(self._in_flight)

    @property
    def may_run_ahead(self) -> bool:
        """Whether one more step may be made before the oldest one is updated."""
        return len(self._in_flight) < self._config.num_in_flight

    # -- requests ---------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def _forces_tokens(self) -> bool:
        """Whether the next step may have forced tokens as drafts."""
        grammars = self._grammar_drafts
        return (
            self._num_guided > 0
            and not grammars.idle
            and (self.drafter is not None or len(self._running) < grammars.most_tokens)
        )

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences without a request slot, or with a prefix that is still loading."""
        return len(self._waiting) + len(self.loads)

    @property
    def kv_cache_usage(self) -> float:
        """Share of KV blocks that running sequences hold, 0 to 1."""
        return 1.0 - self.blocks.num_free / self.blocks.num_blocks

    def count_adapters(self) -> tuple[Counter[str], Counter[str]]:
        """Running and waiting sequences with an adapter, by its name."""
        running = Counter(_adapter_names(self._running))
        waiting = Counter(_adapter_names(self._waiting))
        waiting.update(_adapter_names(entry.sequence for entry in self.loads.all()))
        return running, waiting

    def reset_prefix_cache(self) -> None:
        self.blocks.reset_prefix_cache()

    def check_request(self, request: Request) -> None:
        """Checks that the request fits the configuration and the KV pool.

        Raises:
            SamplingError: it needs more request slots than there are.
            PromptError: it needs more KV blocks than there are.
        """
        params, config, blocks = request.params, self._config, self.blocks
        if params.width > config.max_num_seqs:
            field = "n" if params.best_of is None else "best_of"
            reason = f"exceeds max_num_seqs ({config.max_num_seqs})"
            raise SamplingError(field, params.width, reason)
        needed = blocks.blocks_for(request.max_total_tokens)
        if params.use_beam_search:  # all beams are in memory at once, after preemption unshared
            needed *= params.width
        if needed > blocks.num_blocks:
            raise PromptError(
                "prompt",
                f"{len(request.prompt_token_ids)} tokens",
                f"needs {needed} KV blocks with its output, the cache has {blocks.num_blocks}; "
                "lower max_tokens or best_of",
            )

    def add_request(self, request: Request) -> None:
        """Queues a request that `check_request` accepts."""
        assert request.request_id not in self._requests
        params = request.params
        tokens = array("i")
        if request.packed_prompt:
            tokens.frombytes(request.packed_prompt)
        else:
            tokens.extend(request.prompt_token_ids)
        sequence = Sequence(request, 0, tokens, len(tokens))
        if params.logprobs is not None:
            sequence.logprobs = []
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None] * (1 + request.num_virtual_tokens)
        if params.use_beam_search:
            self._beams[request.request_id] = BeamGroup.of(request)
        request.sequences = [sequence]
        request.num_unfinished = 1
        self._requests[request.request_id] = request
        self._waiting.add(sequence)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request now and returns it; None if it is unknown or has ended."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end_request(request, FinishReason.ABORT)
        return request

    def stop_sequence(
        self, sequence: Sequence, stop_reason: int | str | None, num_tokens: int
    ) -> None:
        """Ends a sequence whose text holds a stop string. That reason replaces any other which a
        token of the same step has given.

        Args:
            num_tokens: prompt and output up to the token that completed the stop string. Tokens
                of the same step behind it are dropped.
        """
        surplus = len(sequence.token_ids) - num_tokens
        if surplus and not sequence.request.params.use_beam_search:  # beams end by their own search
            sequence.drop_tokens(surplus)
            self._caching.truncate(sequence)
            self.stats.generation_tokens -= surplus
        if sequence.finished:
            sequence.finish_reason = FinishReason.STOP
            sequence.stop_reason = stop_reason
        else:
            self._finish(sequence, FinishReason.STOP, stop_reason)

    # -- one step ---------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Makes the next step and allocates KV blocks for its tokens; None if nothing can run.

        To be called with no step in flight; this one is in flight afterwards.
        """
        assert not self._in_flight, "with a step in flight only schedule_ahead may be called"
        sequences: list[Sequence] = []
        num_scheduled_tokens: list[int] = []
        self._collect_transfers()
        self.loads.begin_deferred(self._give_up)
        preemptions = self.stats.num_preemptions
        budget = self._schedule_running(sequences, num_scheduled_tokens)
        assert budget is not None
        drafts, proposed, looked = None, False, False
        if preemptions == self.stats.num_preemptions:
            budget = self._schedule_loading(sequences, num_scheduled_tokens, budget)
            budget = self._schedule_waiting(sequences, num_scheduled_tokens, budget)
            drafts, proposed, looked = self._choose_drafts(sequences, num_scheduled_tokens, budget)
        if not sequences:
            if not self._running or self.loads:
                return None
            # Only beams that wait for their siblings are running, and the siblings do not fit:
            # preempt the youngest group until the oldest has the whole pool.
            self._preempt(self._running[-1])
            return self.schedule()
        step = self._begin_step(sequences, num_scheduled_tokens, drafts)
        self._in_flight[-1].proposed, self._in_flight[-1].looked = proposed, looked
        return step

    def _choose_drafts(
        self, sequences: list[Sequence], num_scheduled_tokens: list[int], budget: int
    ) -> tuple[DraftBatch | None, bool, bool]:
        """Drafts of a step with these sequences, whether the drafter was asked, and whether
        forced tokens were looked for."""
        drafter, forces = self._active_drafter, self._forces_tokens
        if (drafter is None and not forces) or self.loads.any_joined:
            return None, False, False
        drafts = choose_drafts(
            drafter,
            self._grammar_drafts if self._num_guided else NoGrammarDrafts(),
            sequences,
            num_scheduled_tokens,
            self.blocks,
            budget,
        )
        return drafts, drafter is not None, forces

    @property
    def _active_drafter(self) -> Drafter | None:
        """The drafter, if it is awake and expects to propose something."""
        drafter = self.drafter
        return None if drafter is None or self._num_to_sleep or drafter.idle else drafter

    def schedule_ahead(self) -> SchedulerOutput | None:
        """Makes the step after those in flight, whose sampled tokens have not reached the host.

        `LAST_SAMPLED` stands for those tokens as inputs; with stages such sequences are not
        scheduled. Sequences that end by their length with the step in flight are not scheduled, nor
        those that it forks. One that ends by a stop token or a stop string may be scheduled and get
        a result that `update` drops.

        Returns:
            None if the step in flight has to be updated first: there is nothing to run without its
            tokens, a request needs every token on the host (`Request.synchronous`; with stages all
            have it), there are or may be drafts (without stages), or blocks ran out. No sequence is
            preempted on incomplete knowledge: the blocks of one that the step in flight ends may be
            enough, and the preempted sequence would lose the token that it is sampling.
        """
        assert self._in_flight and self.may_run_ahead, "too many steps, or none to be ahead of"
        staged = self.num_stages > 1
        if not staged and (
            self._in_flight[0].step.drafts is not None
            or self._forces_tokens
            or self._active_drafter is not None
        ):
            return None
        if self._may_move_in_free_blocks:
            return None
        if self._num_synchronous and self._has_unknown_inputs:
            return None
        first = self._waiting.first
        if (
            first is not None
            and first.request.synchronous
            and self._has_unknown_inputs
            and self._request_slots.has_room_for(first.request)
        ):
            return None
        self._collect_transfers()
        sequences: list[Sequence] = []
        num_scheduled_tokens: list[int] = []
        budget = self._schedule_running(sequences, num_scheduled_tokens)
        if budget is None:
            return None
        budget = self._schedule_loading(sequences, num_scheduled_tokens, budget)
        budget = self._schedule_waiting(sequences, num_scheduled_tokens, budget)
        if not sequences:
            return None
        drafts, proposed, looked = None, False, False
        if staged:
            drafts, proposed, looked = self._choose_drafts(sequences, num_scheduled_tokens, budget)
        self.stats.num_steps_ahead += 1
        step = self._begin_step(sequences, num_scheduled_tokens, drafts)
        self._in_flight[-1].proposed, self._in_flight[-1].looked = proposed, looked
        return step

    @property
    def _may_move_in_free_blocks(self) -> bool:
        """Whether a step in flight has drafts of a sequence that has left its blocks: where drafts
        are verified when the step finishes, their KV is moved then."""
        return any(
            sequence.epoch != epoch
            for flight in self._in_flight
            if flight.step.drafts is not None
            for sequence, epoch in zip(flight.sequences, flight.epochs, strict=True)
        )

    @property
    def _has_unknown_inputs(self) -> bool:
        """Whether a step that is made now may have inputs that only the device knows."""
        return bool(self._in_flight) and self.num_stages == 1

    def schedule_next(self, output: ModelRunnerOutput) -> SchedulerOutput | None:
        """Makes the step after the one in flight from that one's results, which `update` has not
        got yet: in a steady batch nothing else is needed.

        Returns:
            None if the step has to be made by `schedule`, after `update`.
        """
        batch, self._steady = self._steady, None
        drafter = self._array_drafter
        if batch is None or drafter is None or output.errors or output.kv_loads_timed_out:
            return None
        arrays = output.arrays
        if arrays is None:
            sizes = output.num_tokens or [1] * len(batch.epochs)
            arrays = np.array(output.token_ids, np.int64), np.array(sizes, np.int64)
        following = drafter.propose_next(batch.sequences, batch.numbers, *arrays, batch.most_nodes)
        if following is None:
            return None
        drafts: DraftBatch | None = following.drafts
        num_nodes, count = len(following.drafts.token_ids), len(following.token_ids)
        budget = self._config.max_num_batched_tokens - count
        if num_nodes > budget or not following.has_blocks:
            if following.going_on is not None:
                return None  # the blocks of the ended sequences come first
            slots, starts = batch.request_slots.tolist(), following.num_computed_tokens.tolist()
            drafts = allocate_nodes(
                following.drafts, slots, starts, self.blocks, budget, reserve=count
            )
        elif not num_nodes:
            drafts = None
        flight = build_steady_step(batch, following, self.blocks.take_changes(), drafts)
        self._in_flight.append(flight)
        self.stats.num_steps += 1
        return flight.step

    def update(self, step: SchedulerOutput, output: ModelRunnerOutput) -> list[Sequence]:
        """Applies a step's result: appends tokens, ends sequences, notes full blocks for caching.

        Steps are updated in the order they were scheduled. Results of sequences that have ended
        or left their request slot since are dropped. A step that `schedule_next` has made from the
        same result is counted as scheduled afterwards.

        Returns:
            Sequences that got a token or ended, in the order they were scheduled.
        """
        now = time.monotonic()
        block_size = self._config.block_size
        flight = self._in_flight.popleft()
        assert flight.step is step, "steps are updated in the order they were scheduled"
        if step.kv_loads:
            self._collect_transfers(step.kv_loads, timed_out=output.kv_loads_timed_out)
        if self.num_stages > 1 and step.drafts is not None:
            self._kv_moves = moves_of_accepted(flight, step.drafts, output, self.blocks)
        touched = self.take_failed()
        complete_groups: list[Request] = []
        generated_before, end = self.stats.generation_tokens, 0
        for sequence, epoch, num_computed, num_scheduled, num_samples, num_nodes, num_tokens in zip(
            flight.sequences,
            flight.epochs,
            flight.num_computed_tokens,
            flight.num_scheduled_tokens,
            flight.num_samples,
            flight.num_nodes,
            flight.num_samples if output.num_tokens is None else output.num_tokens,
            strict=True,
        ):
            first, end = end, end + num_tokens  # of its tokens in the output
            if sequence.epoch != epoch:
                continue  # ended or lost its request slot while the step was in flight
            sequence.num_pending_tokens -= num_samples
            request = sequence.request
            failed = bool(output.errors) and sequence.request_slot in output.errors
            if num_nodes and not failed:
                self.stats.count_sampled(request, now, num_samples)
                part = slice(first, end)
                self._accept(sequence, output, part, num_nodes=num_nodes, num_computed=num_computed)
                touched.append(sequence)
                continue
            # All inputs of the step up to `num_confirmed` are in token_ids by now.
            num_confirmed = num_computed + num_scheduled
            if num_confirmed // block_size > num_computed // block_size:
                self._caching.defer(sequence, num_confirmed)
            if output.prompt_logprobs and sequence.request_slot in output.prompt_logprobs:
                assert request.prompt_logprobs is not None
                request.prompt_logprobs.extend(output.prompt_logprobs[sequence.request_slot])
            if failed:
                request.error = output.errors[sequence.request_slot]
                self._end_request(request, FinishReason.ERROR)
                touched.extend(request.sequences)
            elif num_samples:
                self.stats.count_sampled(request, now, num_samples)
                group = self._beams.get(request.request_id) if self._beams else None
                if group is not None:
                    assert output.logprobs is not None
                    candidates = output.logprobs[first]
                    assert candidates is not None
                    group.pending[sequence.index] = candidates.top
                    if len(group.pending) == request.num_unfinished:
                        complete_groups.append(request)
                else:
                    samples = [sequence]
                    if num_samples > 1:
                        samples = self._fork_samples(sequence, num_samples)
                    for index, sample in enumerate(samples, first):
                        self._append(sample, index, output)
                    touched.extend(samples)
        for request in complete_groups:
            touched.extend(self._advance_beams(request))
        if self._in_flight and self._in_flight[0].is_steady:
            count_as_scheduled(self._in_flight[0])
        num_generated = self.stats.generation_tokens - generated_before
        self.stats.step_tokens.observe(flight.num_prompt_tokens + num_generated)
        return touched

    def take_kv_moves(self) -> NDArray[np.int64]:
        """What the stages before the last one have to move in their KV since the last `update`,
        before anything else uses its blocks: see `moves_of_accepted`. Empty without stages."""
        moves, self._kv_moves = self._kv_moves, NO_MOVES
        return moves

    def take_failed(self) -> list[Sequence]:
        """Sequences that ended because their adapter could not be loaded any more; each once, here
        or in the result of `update`."""
        failed, self._failed = self._failed, []
        return failed

    def observe_step(
        self, step: SchedulerOutput, seconds: float, idle_seconds: float, *, num_sampled: int
    ) -> None:
        """Reports a finished step's duration to the load queue, and to what chooses drafts if the
        step had no prompt chunks: each that was drafted for, and some of the others, since a pause
        is to cost nothing, among them the last one that the drafter sleeps through.

        Args:
            idle_seconds: how long the device had waited for its launch.
            num_sampled: tokens that it yielded.
        """
        self.loads.observe(step, seconds)
        flight = self._in_flight[0]
        assert flight.step is step, "a step is reported before its update"
        drafter = self.drafter
        if step.has_chunks or self._num_slept + 1 < self._num_to_sleep:
            return
        last_slept = self._num_to_sleep > 0
        wanted = flight.proposed or last_slept or not self.stats.num_steps % _STEPS_A_REPORT
        if drafter is None:
            if wanted or self._num_guided:
                self._grammar_drafts.observe_step(
                    len(flight.sequences), seconds + idle_seconds, num_sampled, looked=flight.looked
                )
        elif wanted:
            count, num_tokens = len(flight.sequences), len(step.token_ids)
            if step.drafts is not None:
                num_tokens += len(step.drafts.token_ids)
            drafter.observe_step(
                StepReport(count, num_tokens, seconds, idle_seconds, flight.proposed, num_sampled)
            )

    def step_launched(self) -> None:
        """Called after each launch: notifies the block manager, and the drafter of newly admitted
        prompts."""
        self.blocks.launched()
        if self._num_guided:
            self._grammar_drafts.launched(len(self._running))
        new_prompts, self._new_prompts = self._new_prompts, []
        if new_prompts and isinstance(self.drafter, PromptObserver):
            self._wake_drafter()
            self.drafter.prompts_started(new_prompts)

    def run_deferred(self) -> None:
        """Does the work that no step waits for; to be called while the device works."""
        self._caching.cache_blocks()
        begun = 0
        if not (self.loads and self._may_move_in_free_blocks):
            begun = self.loads.begin_deferred(self._give_up)
        if self._in_flight:
            allocate_ahead(self._in_flight[-1], self.blocks)
        self.observe_tokens()
        num_prompt_tokens = self._in_flight[0].num_prompt_tokens if self._in_flight else 0
        most = self._offload_throttle.num_blocks(num_prompt_tokens, loads_began=bool(begun))
        if most:
            self.blocks.offload(most)

    def prepare_next(self) -> None:
        """Collects the batch in flight for `schedule_next`, if the next step will most likely run
        the same sequences, each with one token and a draft. To be called while the device works,
        as the last call before its results; `schedule_next` then has to follow."""
        self._steady = None
        drafter = self._array_drafter
        if len(self._in_flight) != 1 or drafter is None or self.num_stages > 1:
            return
        if self._active_drafter is None:
            return
        if self._waiting or self.loads or self._admitted or self._num_synchronous:
            return
        if self._forces_tokens:
            return
        self._collect_transfers()  # as `schedule` does, which is not called between such steps
        flight = self._in_flight[0]
        if flight.sequences != self._running or flight.num_samples != [1] * len(flight.sequences):
            return
        rows = drafter.rows_of(flight.sequences)
        if rows is not None:
            budget = self._config.max_num_batched_tokens
            self._steady = steady_batch(flight, rows, self.blocks, budget)
            self.blocks.pack_changes()

    def observe_tokens(self) -> None:
        """Lets the drafter learn from the tokens that the last steps sampled; called once a
        step."""
        if self._num_to_sleep:
            self._num_slept += 1
            if self._num_slept == self._num_to_sleep:
                self._wake_drafter()
            return
        if self.drafter is not None:
            self.drafter.run_deferred()
            if self._sleeping_drafter is not None:
                self._num_to_sleep = self._sleeping_drafter.num_to_sleep

    def _wake_drafter(self) -> None:
        """Ends a sleep of the drafter, at its end or before."""
        if self._num_to_sleep:
            assert self._sleeping_drafter is not None
            self._sleeping_drafter.wake(self._num_slept)
            self._num_to_sleep = self._num_slept = 0

    def poll_host_memory(self) -> bool:
        """Offloads blocks and collects finished transfers while nothing runs; returns whether there
        is more to do."""
        self._collect_transfers()
        self.blocks.offload(IDLE_BLOCKS)
        return self.blocks.transfers.has_work

    # -- choosing tokens --------------------------------------------------------------------
    #
    # The methods `_schedule_...` append to `sequences` and `num_scheduled_tokens`, in parallel, and
    # return the token budget that is left.

    def _schedule_running(
        self, sequences: list[Sequence], num_scheduled_tokens: list[int]
    ) -> int | None:
        """Schedules running sequences, oldest first, as the first of a step; preempts the youngest
        where blocks run out.

        Returns:
            None if blocks ran out with a step in flight, when no sequence may be preempted. Blocks
            allocated so far stay with their sequences, which need them next.
        """
        budget = self._config.max_num_batched_tokens
        running, blocks = self._running, self.blocks
        staged = self.num_stages > 1
        most_single = len(running)  # sequences with one token
        if staged:
            running = sorted(running, key=_last_step)
            if self._active_drafter is None:
                most_single = -(-most_single // self.num_stages)
            elif any(flight.proposed for flight in self._in_flight):
                most_single = 0
        num_single = 0
        num_writable = blocks.num_writable
        index = 0
        kept: set[Sequence] = set()  # scheduled before the last preemption, which starts over
        while index < len(running) and budget > 0:
            sequence = running[index]
            num_computed = sequence.num_computed_tokens
            num_known = len(sequence.token_ids)
            num_pending = sequence.num_pending_tokens
            num_new = num_known + num_pending - num_computed
            if num_new > budget:
                num_new = budget
            forks_or_ends = num_pending and (
                num_pending > 1 or num_known + num_pending >= sequence.request.max_total_tokens
            )
            # A beam has nothing to compute while it waits for its siblings' candidates; a sequence
            # that the step in flight forks or ends is left alone.
            if num_new == 0 or forks_or_ends or sequence in kept or (staged and num_pending):
                index += 1
                continue
            if num_new == 1:
                if num_single == most_single:
                    index += 1
                    continue
                num_single += 1
            slot, end = sequence.request_slot, num_computed + num_new
            if num_writable[slot] >= end or blocks.allocate(slot, num_computed, end):
                sequences.append(sequence)
                num_scheduled_tokens.append(num_new)
                budget -= num_new
                index += 1
                continue
            if self._in_flight:
                return None
            self._preempt(self._running[-1])
            if staged:
                running = [one for one in running if one.request_slot >= 0]
            # A preempted beam takes its whole group along, scheduled siblings included.
            pairs = zip(sequences, num_scheduled_tokens, strict=True)
            scheduled = [(s, n) for s, n in pairs if s.request_slot >= 0]
            sequences[:] = [s for s, _ in scheduled]
            num_scheduled_tokens[:] = [n for _, n in scheduled]
            budget = self._config.max_num_batched_tokens - sum(num_scheduled_tokens)
            kept = set(sequences)
            num_single = num_scheduled_tokens.count(1)
            index = 0
        return budget

    def _schedule_waiting(
        self, sequences: list[Sequence], num_scheduled_tokens: list[int], budget: int
    ) -> int:
        """Admits waiting sequences while request slots, blocks and budget last: those with a prefix
        to load into the load queue, the others into the step. Those whose adapter has no slot are
        passed over."""
        if self._waiting:
            self._caching.cache_blocks()
        index, begun = 0, False
        adapters = self.adapters
        adapters.begin_pass()
        while budget > 0:
            sequence = self._waiting.at(index)
            if sequence is None:
                break
            request = sequence.request
            if not self._request_slots.has_room_for(request):
                break
            if self._has_unknown_inputs and request.synchronous:
                break
            if request.adapter is not None and not self._take_adapter(sequence):
                index += not sequence.finished
                continue
            slot = self._request_slots.take()
            wants_prompt = request.prompt_logprobs is not None and (
                len(request.prompt_logprobs) < sequence.num_prompt_tokens
            )
            # A cached block has no logits, so wanted prompt log-probabilities are computed.
            cached = self.blocks.match_prefix(
                slot, sequence.token_ids, request.root_hash, not wants_prompt, request.packed_prompt
            )
            if not wants_prompt:
                loading = self.loads.begin(sequence, slot, cached, alone=not self._running)
                if loading is None:
                    self._leave_waiting(request, slot)
                    break
                if loading.under_way:
                    self._waiting.pop(index)
                    self._request_slots.reserve_for_forks(request)
                    begun = True
                    continue
                cached = loading.cached
            num_missing = len(sequence.token_ids) - cached
            num_new = min(num_missing, budget)
            whole = num_new == num_missing or self._config.enable_chunked_prefill
            if not whole or not self.blocks.allocate(slot, cached, cached + num_new):
                self._leave_waiting(request, slot)
                break
            self._waiting.pop(index)
            self._request_slots.reserve_for_forks(request)
            self._admit(sequence, slot, cached)
            sequences.append(sequence)
            num_scheduled_tokens.append(num_new)
            budget -= num_new
        adapters.end_pass(complete=index >= len(self._waiting))
        return self._schedule_loading(sequences, num_scheduled_tokens, budget) if begun else budget

    def _leave_waiting(self, request: Request, slot: int) -> None:
        """Gives back what was taken for the first sequence that does not fit into this step."""
        self.blocks.free(slot)
        self._request_slots.give_back(slot)
        self.adapters.release(request.adapter)

    def _take_adapter(self, sequence: Sequence) -> bool:
        """Takes the slot of a waiting sequence's adapter; False: it is passed over, or it has ended
        because the adapter cannot be loaded any more."""
        request = sequence.request
        if any(other.request_slot >= 0 for other in request.sequences):
            self.adapters.share(request.adapter)  # its siblings may be waiting for it
            return True
        try:
            return self.adapters.acquire(request.adapter) is not None
        except AdapterError as error:
            request.error, request.failed_field = str(error), "lora_request"
            self._end_request(request, FinishReason.ERROR)
            self._failed.extend(request.sequences)
            return False

    def _schedule_loading(
        self, sequences: list[Sequence], num_scheduled_tokens: list[int], budget: int
    ) -> int:
        """Admits sequences whose prefix has been loaded from host memory, or will be in time."""
        if not self.loads:
            return budget
        others, most = sum(num_scheduled_tokens), budget
        alone = not self._running and not self._in_flight
        for loading, together in self.loads.candidates():
            sequence = loading.sequence
            if budget <= 0 or (self._has_unknown_inputs and sequence.request.synchronous):
                continue
            num_tokens = others + min(together, most)
            num_new = self.loads.join(loading, num_tokens, budget, alone=alone)
            if num_new:
                budget -= num_new
                self._admit(sequence, sequence.request_slot, loading.cached)
                sequences.append(sequence)
                num_scheduled_tokens.append(num_new)
        if not self._running and (starved := self.loads.take_starved()):
            self._give_up(starved)
        return budget

    def _collect_transfers(
        self, finished: tuple[int, ...] = (), *, timed_out: bool = False
    ) -> None:
        """Applies the transfers that have ended. Sequences with a block that a failed load was to
        fill are queued again.

        Args:
            finished: transfer ids that a finished step waited for.
            timed_out: the step ran without them.
        """
        for sequence in self.loads.collect(self._running, finished, timed_out=timed_out):
            if sequence in self.loads:
                self._give_up(sequence)
            elif sequence.request_slot >= 0:  # else it was preempted with a sibling
                self._preempt(sequence)

    def _give_up(self, sequence: Sequence) -> None:
        """Takes blocks and request slot from a loading sequence and queues it again."""
        self._request_slots.give_back(self._release(sequence))
        self._waiting.put_back(sequence)
        self._request_slots.give_back_reserved(sequence.request)

    def _admit(self, sequence: Sequence, slot: int, cached: int) -> None:
        """Makes a sequence run whose block table holds the KV of its first `cached` tokens."""
        request = sequence.request
        self.stats.prefix_cache_queries += len(sequence.token_ids)
        self.stats.prefix_cache_hits += cached
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = cached
            if request.may_draft:
                self._new_prompts.append(sequence)
            request.metrics.first_scheduled_time = time.monotonic()
            self.stats.prompt_tokens += sequence.num_prompt_tokens
        sequence.num_computed_tokens = cached
        self.loads.admit(sequence, slot)
        self._running.append(sequence)
        self._bind(sequence, slot)

    def _bind(self, sequence: Sequence, slot: int) -> None:
        sequence.request_slot = slot
        self._num_synchronous += sequence.request.synchronous
        self._num_guided += _is_guided(sequence)
        adapter_slot = self.adapters.slot_of(sequence.request.adapter)
        self._admitted.append(admitted_sequence(sequence, adapter_slot))

    def _preempt(self, sequence: Sequence) -> None:
        """Takes blocks and request slot from a running sequence, and from all its siblings if it is
        a beam, and queues them again; their KV is computed anew."""
        request = sequence.request
        members = [sequence]
        if request.request_id in self._beams:
            members = [s for s in self._running if s.request is request]
            for loading in self.loads.all():
                if loading.sequence.request is request:
                    self._give_up(loading.sequence)
            self._beams[request.request_id].pending.clear()
        for sequence in reversed(members):
            self._request_slots.give_back(self._release(sequence))
            sequence.num_computed_tokens = 0
            self.stats.num_preemptions += 1
            self._waiting.put_back(sequence)
        self._request_slots.give_back_reserved(request)

    def _begin_step(
        self,
        sequences: list[Sequence],
        num_scheduled_tokens: list[int],
        drafts: DraftBatch | None = None,
    ) -> SchedulerOutput:
        """Builds the step and puts it in flight."""
        changes = self.blocks.take_changes()
        loads = self.loads.take_joined(num_scheduled_tokens)
        admitted = tuple(self._admitted)
        flight = build_step(
            sequences, num_scheduled_tokens, admitted, changes, drafts, loads,
            self.adapters.take_loads(),
        )  # fmt: skip
        self._admitted.clear()
        self._in_flight.append(flight)
        self.stats.num_steps += 1
        if self.num_stages > 1:
            for sequence in sequences:
                sequence.last_step = self.stats.num_steps
        return flight.step

    # -- applying results -------------------------------------------------------------------

    def _accept(
        self,
        sequence: Sequence,
        output: ModelRunnerOutput,
        part: slice,
        *,
        num_nodes: int,
        num_computed: int,
    ) -> None:
        """Appends what a verified draft yields, up to the first token that ends the sequence.

        Args:
            part: the sequence's tokens in the output.
            num_nodes: of its draft.
            num_computed: tokens computed before the step.
        """
        new = output.token_ids[part]
        assert 0 < len(new) <= num_nodes + 1, "a tree of n nodes yields 1 to n + 1 tokens"
        num_accepted = sequence.num_before_end(new)
        num_kept = num_accepted + 1
        # Tokens behind an end do not count; the end itself was drafted unless it is the last token.
        self.stats.count_draft(num_nodes, min(num_kept, len(new) - 1))
        logprobs = None if output.logprobs is None else output.logprobs[part][:num_kept]
        sequence.token_ids.extend(new[:num_kept])
        if logprobs is not None:
            _append_logprobs(sequence, logprobs)
        self.stats.generation_tokens += num_kept
        sequence.num_computed_tokens = num_confirmed = num_computed + num_kept
        block_size = self._config.block_size
        if num_confirmed // block_size > num_computed // block_size:
            self._caching.defer(sequence, num_confirmed)
        self._finish_if_ended(sequence, new[num_accepted])

    def _append(self, sequence: Sequence, index: int, output: ModelRunnerOutput) -> None:
        """Appends token `index` of the output to a sequence, and ends it if that is due."""
        token = output.token_ids[index]
        sequence.token_ids.append(token)
        if output.logprobs is not None:
            _append_logprobs(sequence, (output.logprobs[index],))
        self.stats.generation_tokens += 1
        self._finish_if_ended(sequence, token)

    def _finish_if_ended(self, sequence: Sequence, token: int) -> None:
        """Ends a sequence if its last token, `token`, or its length is an end."""
        request = sequence.request
        length = len(sequence.token_ids)
        if token in request.end_ids and sequence.ends_with(token, length):
            named = None if token in request.eos_ids else token
            self._finish(sequence, FinishReason.STOP, named)
        elif length >= request.max_total_tokens:
            self._finish(sequence, FinishReason.LENGTH, None)

    def _fork_samples(self, sequence: Sequence, num_samples: int) -> list[Sequence]:
        """Turns a prompt's one sequence into `num_samples` that share its KV."""
        slots = self._request_slots.take_reserved(sequence.request)
        for index, slot in enumerate(reversed(slots), 1):
            self._fork(sequence, index, slot)
        assert len(sequence.request.sequences) == num_samples
        return list(sequence.request.sequences)

    def _fork(self, parent: Sequence, index: int, slot: int) -> Sequence:
        """Starts sequence `index` of a request as a copy of `parent` in request slot `slot`."""
        self._caching.cache_blocks()
        request = parent.request
        child = Sequence(
            request,
            index,
            parent.token_ids[:],
            parent.num_prompt_tokens,
            num_computed_tokens=parent.num_computed_tokens,
            cumulative_logprob=parent.cumulative_logprob,
            logprobs=None if parent.logprobs is None else list(parent.logprobs),
        )
        request.sequences.append(child)
        request.num_unfinished += 1
        self.blocks.fork(parent.request_slot, slot)
        self._running.insert(self._running.index(parent) + 1, child)
        self.adapters.share(request.adapter)
        self._bind(child, slot)
        return child

    def _advance_beams(self, request: Request) -> list[Sequence]:
        """Advances a beam search whose beams all have candidates; returns its sequences that got a
        token, or the finished ones if the search has ended."""
        group = self._beams[request.request_id]
        beams = [s for s in request.sequences if not s.finished]
        chosen = advance_group(request, group, beams, self._holds_stop)
        if not chosen:
            finished = best_sequences(request, group, beams)
            self._end_request(request, FinishReason.STOP)
            request.sequences = finished
            return finished
        self.stats.generation_tokens += len(chosen)
        slots = self._request_slots.take_reserved(request)
        parents = {item.parent for item, _ in chosen}
        for index, beam in enumerate(beams):
            if index not in parents:
                slots.append(self._release(beam))
                request.sequences.remove(beam)
                request.num_unfinished -= 1
        # A beam's first continuation stays in its sequence, each further one gets a fork.
        used = {beams[parent].index for parent in parents}
        unused = [index for index in range(group.width) if index not in used]
        advanced: list[Sequence] = []
        for item, _ in chosen:
            beam = beams[item.parent]
            if beam in advanced:
                beam = self._fork(beam, unused.pop(0), slots.pop())
            advanced.append(beam)
        for beam, (item, logprobs) in zip(advanced, chosen, strict=True):  # after all forks
            beam.token_ids.append(item.token)
            beam.cumulative_logprob = item.score
            beam.logprobs = logprobs
        self._request_slots.reserve(request, slots)
        return advanced

    # -- ending -----------------------------------------------------------------------------

    def _finish(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None
    ) -> None:
        """Ends a sequence, be it running, loading or waiting."""
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        if sequence.request_slot >= 0:
            self._request_slots.give_back(self._release(sequence))
        else:  # preempted, perhaps after the token that ends it, whose text is checked later
            self._waiting.remove(sequence)
        request = sequence.request
        request.num_unfinished -= 1
        if request.num_unfinished == 0:
            self._forget(request)

    def _end_request(self, request: Request, reason: FinishReason) -> None:
        for sequence in list(request.sequences):
            if not sequence.finished:
                self._finish(sequence, reason, None)

    def _forget(self, request: Request) -> None:
        """Drops all state of a request whose sequences have ended."""
        if self.drafter is not None:
            self._wake_drafter()
            self.drafter.close(request)
        self._grammar_drafts.close(request)
        self._request_slots.give_back_reserved(request)
        self._beams.pop(request.request_id, None)
        del self._requests[request.request_id]
        self._waiting.forget(request)
        request.metrics.finished_time = time.monotonic()
        self.stats.num_requests_finished += 1

    def _release(self, sequence: Sequence) -> int:
        """Frees the blocks of a running or loading sequence; returns its request slot, which it
        leaves."""
        self._caching.cache_blocks()
        slot = sequence.request_slot
        self.loads.keep_counts(sequence)
        self.blocks.free(slot)
        self.adapters.release(sequence.request.adapter)
        if sequence in self.loads:
            self.loads.end(sequence)
        else:
            self._num_synchronous -= sequence.request.synchronous
            self._num_guided -= _is_guided(sequence)
            self._running.remove(sequence)
        sequence.request_slot = -1
        sequence.epoch += 1
        sequence.num_pending_tokens = 0
        return slot

    def check_integrity(self) -> None:
        """Asserts that request slots, queues, requests and steps in flight agree; for tests and
        when idle."""
        self.blocks.check_integrity()
        loading = [entry.sequence for entry in self.loads.all()]
        self._request_slots.check_integrity([s.request_slot for s in (*self._running, *loading)])
        self.adapters.check_integrity([s.request.adapter for s in (*self._running, *loading)])
        assert self._num_synchronous == sum(s.request.synchronous for s in self._running)
        assert self._num_guided == sum(map(_is_guided, self._running))
        placed = [*self._running, *self._waiting, *loading]
        pending = dict.fromkeys(placed, 0)
        for flight in self._in_flight:
            entries = zip(flight.sequences, flight.epochs, flight.num_samples, strict=True)
            for sequence, epoch, num_samples in entries:
                if sequence.epoch == epoch:
                    pending[sequence] += num_samples
        assert all(s.num_pending_tokens == num_tokens for s, num_tokens in pending.items())
        unfinished: list[Sequence] = []
        for request in self._requests.values():
            members = [s for s in request.sequences if not s.finished]
            assert request.num_unfinished == len(members)
            unfinished += members
        assert sorted(map(id, unfinished)) == sorted(map(id, placed)), "one was lost or doubled"


_STEPS_A_REPORT = 4  # for which nothing was proposed
_last_step = attrgetter("last_step")


def _is_guided(sequence: Sequence) -> bool:
    """Whether a grammar may force tokens of the sequence as drafts."""
    return sequence.request.grammar is not None and sequence.request.may_draft


def _adapter_names(sequences: Iterable[Sequence]) -> Iterator[str]:
    adapters = (sequence.request.adapter for sequence in sequences)
    return (adapter.name for adapter in adapters if adapter is not None)


def _append_logprobs(sequence: Sequence, entries: Iterable[SampleLogprobs | None]) -> None:
    """Adds the log-probabilities of the tokens just appended, where the request needs them."""
    sequence.earlier_sums.clear()
    for entry in entries:
        if entry is not None:
            sequence.earlier_sums.append(sequence.cumulative_logprob)
            sequence.cumulative_logprob += entry.sampled
            if sequence.logprobs is not None:
                sequence.logprobs.append(entry)
