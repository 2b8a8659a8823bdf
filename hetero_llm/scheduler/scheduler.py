"""What runs in the next step.

There is no prefill phase and no decode phase: every step lets each sequence's `num_computed`
catch up with its known tokens under one token budget. Chunked prefill, prefix hits, preemption
and forks all follow from that.

Law of this file: no torch, no text, no clock but the monotonic one. The scheduler alone writes
requests and sequences; KV bookkeeping goes through the block manager.
"""

from __future__ import annotations

import time
from collections import deque

from hetero_llm.config.engine_config import SchedulerConfig
from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.drafter import Drafter, PromptObserver
from hetero_llm.core.request import FinishReason, Request, Sequence
from hetero_llm.core.step import AdmittedSequence, ModelRunnerOutput, SchedulerOutput
from hetero_llm.kv_cache.block_manager import BlockManager
from hetero_llm.scheduler.admission import check_fits, first_sequence, forks_to_come
from hetero_llm.scheduler.beam_groups import (
    HoldsStop,
    best_sequences,
    continue_beams,
    grow_beams,
    open_group,
    unchosen,
)
from hetero_llm.scheduler.beam_search import BeamGroup
from hetero_llm.scheduler.deferred_work import MANY_BLOCKS, OffloadThrottle, Publisher, grow_ahead
from hetero_llm.scheduler.draft_admission import choose_drafts, num_before_end
from hetero_llm.scheduler.integrity import check_in_flight, check_members
from hetero_llm.scheduler.kv_loads import KVLoadQueue
from hetero_llm.scheduler.new_tokens import append_tokens, copy_of, drop_tokens, end_of
from hetero_llm.scheduler.request_slots import Slots
from hetero_llm.scheduler.scheduler_rows import running_rows
from hetero_llm.scheduler.stats import SchedulerStats
from hetero_llm.scheduler.step_builder import InFlight, pack, slot_state
from hetero_llm.scheduler.waiting_queue import WaitingQueue


class Scheduler:
    """Owns every request from `add_request` until it is finished.

    A step is in flight from `schedule` to `update`; `schedule_ahead` makes one more meanwhile.
    Steps run in the order they were made, so blocks that come back while a step in flight still
    writes to them can be handed out at once: whoever gets them writes later. Such a stray row
    writes at a position of its own sequence that no `update` will confirm. A block is published
    only up to confirmed tokens, and shared either when published or by a fork, for which nothing
    is in flight: so a stray row meets neither a published block nor one with another reader. The
    same holds for the rows of draft nodes, which lie behind all confirmed tokens.

    Args:
        config: limits of a step.
        blocks: the KV pool; tables are named by slot.
        holds_stop: asked by beam search alone; elsewhere the output processor looks for stop
            strings.
        drafter: asked for draft trees, which only the runners that verify them understand. While
            it is not idle no step is made ahead.
        loads: keeps the sequences whose prefix comes from host memory, if `blocks` has any.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        holds_stop: HoldsStop | None = None,
        *,
        drafter: Drafter | None = None,
        loads: KVLoadQueue | None = None,
    ) -> None:
        self.loads = loads
        self.stats = SchedulerStats()
        self._config = config
        self._blocks = blocks
        self._holds_stop = holds_stop
        self._drafter = drafter
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []
        self._slots = Slots(config.max_num_seqs)
        self._requests: dict[str, Request] = {}
        self._beams: dict[str, BeamGroup] = {}
        self._admitted: list[AdmittedSequence] = []
        self._in_flight: deque[InFlight] = deque()
        self._newcomers: list[Sequence] = []  # admitted; the drafter does not know of them
        self._publisher, self._pace = Publisher(blocks), OffloadThrottle()
        self._num_synchronous = 0  # running sequences of requests that allow no step ahead

    # -- requests ---------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Without a slot, or with a prefix that is still on its way."""
        return len(self._waiting) + len(self.loads or ())

    @property
    def kv_cache_usage(self) -> float:
        """Share of KV blocks that running sequences hold, 0 to 1."""
        return 1.0 - self._blocks.num_free / self._blocks.num_blocks

    def reset_prefix_cache(self) -> None:
        self._blocks.reset_prefix_cache()

    def check_request(self, request: Request) -> None:
        """Raises a typed error if the request could never run here."""
        check_fits(request, self._config, self._blocks)

    def add_request(self, request: Request) -> None:
        """Queues a request that `check_request` accepts."""
        assert request.request_id not in self._requests
        sequence = first_sequence(request)
        if request.params.use_beam_search:
            self._beams[request.request_id] = open_group(request)
        self._requests[request.request_id] = request
        self._waiting.arrive(sequence)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request now; None if it is not (or no longer) here."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end_request(request, FinishReason.ABORT)
        return request

    def stop_sequence(
        self, sequence: Sequence, stop_reason: int | str | None, num_tokens: int
    ) -> None:
        """Ends a sequence because its text holds a stop string, which comes before any other
        reason that the same token may have given.

        Args:
            num_tokens: prompt and output up to the token that completed the stop string. Tokens
                of the same step behind it are dropped.
        """
        surplus = len(sequence.token_ids) - num_tokens
        if surplus and not sequence.request.params.use_beam_search:  # beams end by their own search
            drop_tokens(sequence, surplus)
            self._publisher.cap(sequence)
            self.stats.generation_tokens -= surplus
        if sequence.finished:
            sequence.finish_reason = FinishReason.STOP
            sequence.stop_reason = stop_reason
        else:
            self._finish(sequence, FinishReason.STOP, stop_reason)

    # -- one step ---------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Chooses the next step's rows and gives them KV blocks; None if nothing can run.

        For callers without a step in flight; the step is in flight afterwards.
        """
        assert not self._in_flight, "with a step in flight only schedule_ahead may be called"
        sequences: list[Sequence] = []
        counts: list[int] = []
        self._collect_moves()
        if self.loads is not None:
            self.loads.begin_put_off(self._give_up)
        preemptions = self.stats.num_preemptions
        budget = self._schedule_running(sequences, counts)
        assert budget is not None
        drafts = None
        if preemptions == self.stats.num_preemptions:
            budget = self._schedule_loading(sequences, counts, budget)
            budget = self._schedule_waiting(sequences, counts, budget)
            waits = self.loads is not None and self.loads.any_joined
            if self._drafter is not None and not self._drafter.idle and not waits:
                drafts = choose_drafts(self._drafter, sequences, counts, self._blocks, budget)
        if not sequences:
            if not self._running or self.loads:
                return None
            # Only beams that wait for siblings are left, and those do not fit: let the oldest
            # group have the whole pool.
            self._preempt(self._running[-1])
            return self.schedule()
        return self._take_off(sequences, counts, drafts)

    def schedule_ahead(self) -> SchedulerOutput | None:
        """Chooses the step after the one in flight, whose tokens are not known here yet.

        Those tokens are inputs by the name `LAST_SAMPLED`. Sequences that end by their length with
        the step in flight get no row, nor do those that it forks. One that ends by a stop token or
        a stop string may get a stray row, whose result `update` drops.

        Returns:
            None if the step in flight has to be updated first: there is nothing to run without its
            tokens, a request needs every token on the host (`Request.synchronous`), there are or
            may be drafts, or blocks ran out. Nobody is preempted on incomplete knowledge: the
            blocks of a sequence that the step in flight ends may be enough, and the victim would
            lose the token it is drawing.
        """
        assert len(self._in_flight) == 1, "one step ahead of the one in flight, no more"
        if self._num_synchronous or self._in_flight[0].step.drafts is not None:
            return None
        if self._drafter is not None and not self._drafter.idle:
            return None
        first = self._waiting.first
        if (
            first is not None
            and first.request.synchronous
            and self._slots.has_room_for(first.request)
        ):
            return None
        self._collect_moves()
        sequences: list[Sequence] = []
        counts: list[int] = []
        budget = self._schedule_running(sequences, counts)
        if budget is None:
            return None
        budget = self._schedule_loading(sequences, counts, budget)
        self._schedule_waiting(sequences, counts, budget)
        return self._take_off(sequences, counts) if sequences else None

    def update(self, step: SchedulerOutput, output: ModelRunnerOutput) -> list[Sequence]:
        """Applies a step's result: appends tokens, ends sequences, publishes full blocks.

        Steps are updated in the order they were scheduled. Results of sequences that have ended
        or left their slot since are dropped.

        Returns:
            Sequences that got a token or ended, in the order they were scheduled.
        """
        now = time.monotonic()
        size = self._config.block_size
        flight = self._in_flight.popleft()
        assert flight.step is step, "steps are updated in the order they were scheduled"
        if step.kv_loads:
            self._collect_moves(step.kv_loads, in_vain=output.kv_loads_timed_out)
        touched: list[Sequence] = []
        groups: list[Request] = []
        before, first = self.stats.generation_tokens, 0
        for sequence, epoch, start, count, samples, nodes, produced in zip(
            flight.sequences,
            flight.epochs,
            flight.starts,
            flight.counts,
            flight.samples,
            flight.nodes,
            flight.samples if output.num_tokens is None else output.num_tokens,
            strict=True,
        ):
            place, first = first, first + produced
            if sequence.epoch != epoch:
                continue  # ended or lost its slot while the step was in flight
            sequence.num_pending_tokens -= samples
            request = sequence.request
            failed = bool(output.errors) and sequence.request_slot in output.errors
            if nodes and not failed:
                self.stats.note_time(request, now, samples)
                self._accept(sequence, output, slice(place, first), nodes=nodes, start=start)
                touched.append(sequence)
                continue
            # All inputs before the end of these rows are in token_ids by now.
            if (start + count) // size > start // size:
                self._publisher.note(sequence, start + count)
            if output.prompt_logprobs and sequence.request_slot in output.prompt_logprobs:
                assert request.prompt_logprobs is not None
                request.prompt_logprobs.extend(output.prompt_logprobs[sequence.request_slot])
            if failed:
                request.error = output.errors[sequence.request_slot]
                self._end_request(request, FinishReason.ERROR)
                touched.extend(request.sequences)
            elif samples:
                self.stats.note_time(request, now, samples)
                group = self._beams.get(request.request_id) if self._beams else None
                if group is not None:
                    assert output.logprobs is not None
                    candidates = output.logprobs[place]
                    assert candidates is not None
                    group.pending[sequence.index] = candidates.top
                    if len(group.pending) == request.num_unfinished:
                        groups.append(request)
                else:
                    members = self._fork_samples(sequence, samples) if samples > 1 else [sequence]
                    for offset, member in enumerate(members):
                        self._append(member, place + offset, output)
                    touched.extend(members)
        for request in groups:
            touched.extend(self._advance_beams(request))
        self.stats.step_tokens.observe(flight.prompt_tokens + self.stats.generation_tokens - before)
        return touched

    def observe_step(self, step: SchedulerOutput, seconds: float) -> None:
        """Tells whoever predicts times how long a step took; those who draft, without prompts."""
        if self.loads is not None:
            self.loads.observe(step, seconds)
        if self._drafter is not None and not step.has_chunks:
            self._drafter.observe_step(int(step.num_scheduled_tokens.sum()), seconds)

    def step_launched(self) -> None:
        """What follows a launch: whoever drafts is told of prompts that have begun."""
        self._blocks.launched()
        newcomers, self._newcomers = self._newcomers, []
        if newcomers and isinstance(self._drafter, PromptObserver):
            self._drafter.prompts_started(newcomers)

    def run_deferred(self) -> None:
        """Upkeep that no step waits for: to be called while the device works."""
        self._publisher.publish()
        begun = 0 if self.loads is None else self.loads.begin_put_off(self._give_up)
        if self._in_flight:
            grow_ahead(self._in_flight[-1], self._blocks)
        self.observe_tokens()
        rows = self._in_flight[0].prompt_tokens if self._in_flight else 0
        if most := self._pace.most(rows, begun=bool(begun)):
            self._blocks.offload(most)

    def observe_tokens(self) -> None:
        """Whoever drafts takes note of what the last steps drew."""
        if self._drafter is not None:
            self._drafter.run_deferred()

    def poll_host_memory(self) -> bool:
        """Upkeep of host memory while nothing runs: whether there is more to come."""
        self._collect_moves()
        self._blocks.offload(MANY_BLOCKS)
        return self._blocks.is_moving

    # -- choosing rows ----------------------------------------------------------------------

    def _schedule_running(self, sequences: list[Sequence], counts: list[int]) -> int | None:
        """Returns the budget that is left; None if blocks ran out with a step in flight."""
        budget = self._config.max_num_batched_tokens
        preempt = None if self._in_flight else self._preempt
        return running_rows(self._running, self._blocks, budget, sequences, counts, preempt)

    def _schedule_waiting(self, sequences: list[Sequence], counts: list[int], budget: int) -> int:
        """Returns the budget that is left."""
        if self._waiting:
            self._publisher.publish()
        begun = False
        while budget > 0:
            sequence = self._waiting.first
            if sequence is None:
                break
            request = sequence.request
            if not self._slots.has_room_for(request) or (self._in_flight and request.synchronous):
                break
            forks = forks_to_come(request)
            slot = self._slots.take()
            wants_prompt = request.prompt_logprobs is not None and (
                len(request.prompt_logprobs) < sequence.num_prompt_tokens
            )
            # A cached block has no logits, so wanted prompt log-probabilities are computed.
            cached = self._blocks.match_prefix(
                slot, sequence.token_ids, request.root_hash, not wants_prompt, request.packed_prompt
            )
            if self.loads is not None and not wants_prompt:
                loading = self.loads.begin(sequence, slot, cached, alone=not self._running)
                if loading is None:
                    self._blocks.free(slot)
                    self._slots.give(slot)
                    break
                if loading.under_way:
                    self._waiting.take_first()
                    self._slots.reserve(request, forks)
                    begun = True
                    continue
                cached = loading.cached
            missing = len(sequence.token_ids) - cached
            count = min(missing, budget)
            whole = count == missing or self._config.enable_chunked_prefill
            if not whole or not self._blocks.allocate(slot, cached, cached + count):
                self._blocks.free(slot)
                self._slots.give(slot)
                break
            self._waiting.take_first()
            self._slots.reserve(request, forks)
            self._admit(sequence, slot, cached)
            sequences.append(sequence)
            counts.append(count)
            budget -= count
        return self._schedule_loading(sequences, counts, budget) if begun else budget

    def _schedule_loading(self, sequences: list[Sequence], counts: list[int], budget: int) -> int:
        """Lets sequences run whose prefix has come, or comes in time. Returns the budget left."""
        if not self.loads:
            return budget
        others, most = sum(counts), budget
        alone = not self._running and not self._in_flight
        for loading, together in self.loads.candidates():
            sequence = loading.sequence
            if budget <= 0 or (self._in_flight and sequence.request.synchronous):
                continue
            rows = others + min(together, most)
            count = self.loads.join(loading, rows, budget, alone=alone)
            if count:
                budget -= count
                self._admit(sequence, sequence.request_slot, loading.cached)
                sequences.append(sequence)
                counts.append(count)
        if not self._running and (starved := self.loads.starved):
            self._give_up(starved)
        return budget

    def _collect_moves(self, over: tuple[int, ...] = (), *, in_vain: bool = False) -> None:
        """Takes note of copies that ended. Sequences that wait for one that failed start anew."""
        if self.loads is None:
            return
        for sequence in self.loads.collect(self._running, over, in_vain=in_vain):
            if sequence in self.loads:
                self._give_up(sequence)
            elif sequence.request_slot >= 0:  # else a sibling took it along
                self._preempt(sequence)

    def _give_up(self, sequence: Sequence) -> None:
        """A loading sequence waits again."""
        self._slots.give(self._release(sequence))
        self._waiting.come_back(sequence)
        self._slots.give_reserved(sequence.request)

    def _admit(self, sequence: Sequence, slot: int, cached: int) -> None:
        request = sequence.request
        self.stats.prefix_cache_queries += len(sequence.token_ids)
        self.stats.prefix_cache_hits += cached
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = cached
            if request.may_draft:
                self._newcomers.append(sequence)
            request.metrics.first_scheduled_time = time.monotonic()
            self.stats.prompt_tokens += sequence.num_prompt_tokens
        sequence.num_computed_tokens = cached
        if self.loads is not None:
            self._blocks.admit(slot, sequence.kv_counted)
            sequence.skips_host = False
        self._running.append(sequence)
        self._bind(sequence, slot)

    def _bind(self, sequence: Sequence, slot: int) -> None:
        sequence.request_slot = slot
        self._num_synchronous += sequence.request.synchronous
        self._admitted.append(slot_state(sequence))

    def _preempt(self, victim: Sequence) -> None:
        """Takes KV and slot away; the sequence is computed anew later, in order of arrival."""
        request = victim.request
        members = [victim]
        if request.request_id in self._beams:
            members = [s for s in self._running if s.request is request]
            for loading in () if self.loads is None else self.loads.all():
                if loading.sequence.request is request:
                    self._give_up(loading.sequence)
            self._beams[request.request_id].pending.clear()
        for sequence in reversed(members):
            self._slots.give(self._release(sequence))
            sequence.num_computed_tokens = 0
            self.stats.num_preemptions += 1
            self._waiting.come_back(sequence)
        self._slots.give_reserved(request)

    def _take_off(
        self, sequences: list[Sequence], counts: list[int], drafts: DraftBatch | None = None
    ) -> SchedulerOutput:
        """Makes the step and notes it as in flight."""
        changes = self._blocks.take_changes()
        loads = () if self.loads is None else self.loads.take_joined(sum(counts))
        flight = pack(sequences, counts, tuple(self._admitted), changes, drafts, loads)
        self._admitted.clear()
        self._in_flight.append(flight)
        self.stats.num_steps += 1
        return flight.step

    # -- applying results -------------------------------------------------------------------

    def _accept(
        self, sequence: Sequence, output: ModelRunnerOutput, drawn: slice, *, nodes: int, start: int
    ) -> None:
        """Appends a verified draft's part of the output, up to the first token that is an end."""
        new = output.token_ids[drawn]
        assert 0 < len(new) <= nodes + 1, "a tree of n nodes yields 1 to n + 1 tokens"
        accepted = num_before_end(sequence, new)
        # Behind an end nothing counts: the end itself was drafted unless it is the last token.
        self.stats.count_draft(nodes, min(accepted + 1, len(new) - 1))
        logprobs = None if output.logprobs is None else output.logprobs[drawn][: accepted + 1]
        append_tokens(sequence, new[: accepted + 1], logprobs)
        self.stats.generation_tokens += accepted + 1
        sequence.num_computed_tokens = computed = start + 1 + accepted
        size = self._config.block_size
        if computed // size > start // size:
            self._publisher.note(sequence, computed)
        self._end_if_over(sequence, new[accepted])

    def _append(self, sequence: Sequence, drawn: int, output: ModelRunnerOutput) -> None:
        """Adds the `drawn`-th token of the step's output and ends the sequence if it must."""
        token = output.token_ids[drawn]
        if output.logprobs is None:
            sequence.token_ids.append(token)
        else:
            append_tokens(sequence, [token], (output.logprobs[drawn],))
        self.stats.generation_tokens += 1
        self._end_if_over(sequence, token)

    def _end_if_over(self, sequence: Sequence, token: int) -> None:
        """Ends a sequence whose last token, `token`, or whose length says so."""
        if (end := end_of(sequence, token)) is not None:
            self._finish(sequence, *end)

    def _fork_samples(self, sequence: Sequence, samples: int) -> list[Sequence]:
        """Turns a prompt's one sequence into `samples` that share its KV."""
        for index, slot in enumerate(reversed(self._slots.take_reserved(sequence.request)), 1):
            self._fork(sequence, index, slot)
        assert len(sequence.request.sequences) == samples
        return list(sequence.request.sequences)

    def _fork(self, parent: Sequence, index: int, slot: int) -> Sequence:
        self._publisher.publish()
        request = parent.request
        child = copy_of(parent, index)
        request.sequences.append(child)
        request.num_unfinished += 1
        self._blocks.fork(parent.request_slot, slot)
        self._running.insert(self._running.index(parent) + 1, child)
        self._bind(child, slot)
        return child

    def _advance_beams(self, request: Request) -> list[Sequence]:
        group = self._beams[request.request_id]
        beams = [s for s in request.sequences if not s.finished]
        chosen = grow_beams(request, group, beams, self._holds_stop)
        if not chosen:
            finished = best_sequences(request, group, beams)
            self._end_request(request, FinishReason.STOP)
            request.sequences = finished
            return finished
        self.stats.generation_tokens += len(chosen)
        slots = self._slots.take_reserved(request)
        for beam in unchosen(beams, chosen):
            slots.append(self._release(beam))
            request.sequences.remove(beam)
            request.num_unfinished -= 1
        grown = continue_beams(
            beams, chosen, group.width, lambda beam, index: self._fork(beam, index, slots.pop())
        )
        self._slots.reserve_these(request, slots)
        return grown

    # -- ending -----------------------------------------------------------------------------

    def _finish(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None
    ) -> None:
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        if sequence.request_slot >= 0:
            self._slots.give(self._release(sequence))
        else:  # preempted: perhaps after the token that ends it, whose text was looked at later
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
        if self._drafter is not None:
            self._drafter.close(request)
        self._slots.give_reserved(request)
        self._beams.pop(request.request_id, None)
        del self._requests[request.request_id]
        self._waiting.forget(request)
        request.metrics.finished_time = time.monotonic()
        self.stats.num_requests_finished += 1

    def _release(self, sequence: Sequence) -> int:
        """Gives the blocks back and leaves the running list; returns the slot, now unused."""
        self._publisher.publish()
        slot = sequence.request_slot
        if self.loads is not None:
            sequence.kv_counted = self._blocks.counted(slot)
        self._blocks.free(slot)
        if self.loads is not None and sequence in self.loads:
            self.loads.end(sequence)
        else:
            self._num_synchronous -= sequence.request.synchronous
            self._running.remove(sequence)
        sequence.request_slot = -1
        sequence.epoch += 1
        sequence.num_pending_tokens = 0
        return slot

    def check_integrity(self) -> None:
        """Asserts that slots, queues and requests agree; for tests and when idle."""
        self._blocks.check_integrity()
        loading = [] if self.loads is None else [entry.sequence for entry in self.loads.all()]
        self._slots.check_integrity([s.request_slot for s in (*self._running, *loading)])
        assert self._num_synchronous == sum(s.request.synchronous for s in self._running)
        check_in_flight(self._in_flight, self._running, (*self._waiting, *loading))
        check_members(self._requests.values(), (*self._running, *self._waiting, *loading))
