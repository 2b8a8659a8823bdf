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
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hetero_llm.core.config import SchedulerConfig
from hetero_llm.core.errors import PromptError, SamplingError
from hetero_llm.core.request import FinishReason, Request, Sequence
from hetero_llm.core.step import (
    ModelRunnerOutput,
    PromptRows,
    SampleLogprobs,
    SchedulerOutput,
    SlotState,
)
from hetero_llm.engine.beam import (
    BeamGroup,
    Continuation,
    Hypothesis,
    advance,
    candidates_needed,
)
from hetero_llm.engine.block_manager import BlockManager


@dataclass(slots=True)
class SchedulerStats:
    """Counters since start; tokens unless the name says otherwise."""

    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    num_requests_finished: int = 0


class Scheduler:
    """Owns every request from `add_request` until it is finished.

    Args:
        config: limits of a step.
        blocks: the KV pool; tables are named by slot.
        holds_stop: whether the text of some tokens, the last one new, holds one of a request's
            stop strings; asked by beam search alone, elsewhere the output processor looks.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        holds_stop: Callable[[Request, list[int]], bool] | None = None,
    ) -> None:
        self.stats = SchedulerStats()
        self._config = config
        self._blocks = blocks
        self._holds_stop = holds_stop
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._by_slot: list[Sequence | None] = [None] * config.max_num_seqs
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._requests: dict[str, Request] = {}
        self._arrival: dict[str, int] = {}
        self._num_arrived = 0
        self._reserved: dict[str, list[int]] = {}  # slots of forks that are still to come
        self._beams: dict[str, BeamGroup] = {}
        self._admitted: list[SlotState] = []

    # -- requests ---------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_cache_usage(self) -> float:
        """Share of KV blocks that running sequences hold, 0 to 1."""
        return 1.0 - self._blocks.num_free / self._blocks.num_blocks

    def reset_prefix_cache(self) -> None:
        self._blocks.reset_prefix_cache()

    def check_request(self, request: Request) -> None:
        """Raises a typed error if the request could never run here."""
        params = request.params
        if params.width > self._config.max_num_seqs:
            field = "n" if params.best_of is None else "best_of"
            raise SamplingError(
                field, params.width, f"exceeds max_num_seqs ({self._config.max_num_seqs})"
            )
        num_prompt = len(request.prompt_token_ids)
        needed = self._blocks.blocks_for(request.max_total_tokens)
        if params.use_beam_search:  # all beams are in memory at once, after preemption unshared
            needed *= params.width
        if needed > self._blocks.num_blocks:
            raise PromptError(
                "prompt",
                f"{num_prompt} tokens",
                f"needs {needed} KV blocks with its output, the cache has "
                f"{self._blocks.num_blocks}; lower max_tokens or best_of",
            )

    def add_request(self, request: Request) -> None:
        """Queues a request that `check_request` accepts."""
        assert request.request_id not in self._requests
        sequence = Sequence(
            request, 0, list(request.prompt_token_ids), len(request.prompt_token_ids)
        )
        if request.params.logprobs is not None:
            sequence.logprobs = []
        request.sequences = [sequence]
        request.live = 1
        if request.params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        if request.params.use_beam_search:
            self._beams[request.request_id] = BeamGroup(
                request.params.width,
                sequence.num_prompt,
                request.max_total_tokens,
                request.params.length_penalty,
                request.params.early_stopping,
            )
        self._requests[request.request_id] = request
        self._arrival[request.request_id] = self._num_arrived
        self._num_arrived += 1
        self._waiting.append(sequence)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request now; None if it is not (or no longer) here."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end_request(request, FinishReason.ABORT)
        return request

    def stop_sequence(self, sequence: Sequence, stop_reason: int | str | None) -> None:
        """Ends a sequence because its text holds a stop string, which comes before any other
        reason that the same token may have given."""
        if sequence.finished:
            sequence.finish_reason = FinishReason.STOP
            sequence.stop_reason = stop_reason
        else:
            self._finish(sequence, FinishReason.STOP, stop_reason)

    # -- one step ---------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Chooses the next step's rows and gives them KV blocks; None if nothing can run."""
        sequences: list[Sequence] = []
        counts: list[int] = []
        preemptions = self.stats.num_preemptions
        budget = self._schedule_running(sequences, counts)
        if preemptions == self.stats.num_preemptions:
            self._schedule_waiting(sequences, counts, budget)
        if not sequences:
            if not self._running:
                return None
            # Only beams that wait for siblings are left, and those do not fit: let the oldest
            # group have the whole pool.
            self._preempt(self._running[-1])
            return self.schedule()
        self.stats.num_steps += 1
        return self._pack(sequences, counts)

    def update(self, step: SchedulerOutput, output: ModelRunnerOutput) -> list[Sequence]:
        """Applies a step's result: appends tokens, ends sequences, publishes full blocks.

        Returns:
            Sequences that got a token or ended, in the order they were scheduled.
        """
        now = time.monotonic()
        by_slot = self._by_slot
        size = self._config.block_size
        touched: list[Sequence] = []
        groups: list[Request] = []
        first = 0
        for slot, start, count, samples in zip(
            step.slots.tolist(),
            step.starts.tolist(),
            step.counts.tolist(),
            step.num_samples.tolist(),
            strict=True,
        ):
            sequence = by_slot[slot]
            if sequence is None or sequence.num_computed != start:
                first += samples  # aborted while the step ran
                continue
            end = start + count
            sequence.num_computed = end
            if end // size > start // size:
                self._blocks.commit(slot, sequence.token_ids, end)
            request = sequence.request
            if output.prompt_logprobs and slot in output.prompt_logprobs:
                assert request.prompt_logprobs is not None
                request.prompt_logprobs.extend(output.prompt_logprobs[slot])
            if output.errors and slot in output.errors:
                request.error = output.errors[slot]
                self._end_request(request, FinishReason.ERROR)
                touched.extend(request.sequences)
            elif samples:
                request.metrics.last_token_time = now
                if request.metrics.first_token_time is None:
                    request.metrics.first_token_time = now
                group = self._beams.get(request.request_id) if self._beams else None
                if group is not None:
                    assert output.logprobs is not None
                    drawn = output.logprobs[first]
                    assert drawn is not None
                    group.pending[sequence.index] = drawn.top
                    if len(group.pending) == request.live:
                        groups.append(request)
                else:
                    members = self._fork_samples(sequence, samples) if samples > 1 else [sequence]
                    for offset, member in enumerate(members):
                        self._append(member, first + offset, output)
                    touched.extend(members)
            first += samples
        for request in groups:
            touched.extend(self._advance_beams(request))
        return touched

    # -- choosing rows ----------------------------------------------------------------------

    def _schedule_running(self, sequences: list[Sequence], counts: list[int]) -> int:
        budget = self._config.max_num_batched_tokens
        running = self._running
        index = 0
        while index < len(running) and budget > 0:
            sequence = running[index]
            computed = sequence.num_computed
            count = len(sequence.token_ids) - computed
            if count > budget:
                count = budget
            if count == 0:  # a beam whose siblings are not done yet
                index += 1
                continue
            if self._blocks.grow(sequence.slot, computed, computed + count):
                sequences.append(sequence)
                counts.append(count)
                budget -= count
                index += 1
                continue
            self._preempt(running[-1])
            # A preempted beam takes its whole group along, members already chosen included.
            kept = [(s, c) for s, c in zip(sequences, counts, strict=True) if s.slot >= 0]
            sequences[:] = [s for s, _ in kept]
            counts[:] = [c for _, c in kept]
            budget = self._config.max_num_batched_tokens - sum(counts)
            chosen = set(map(id, sequences))
            index = next((i for i, s in enumerate(running) if id(s) not in chosen), len(running))
        return budget

    def _schedule_waiting(self, sequences: list[Sequence], counts: list[int], budget: int) -> None:
        while self._waiting and budget > 0:
            sequence = self._waiting[0]
            request = sequence.request
            forks = 0 if len(request.sequences) > 1 else request.params.width - 1
            if len(self._free_slots) < 1 + forks:
                return
            slot = self._free_slots.pop()
            wants_prompt = request.prompt_logprobs is not None and (
                len(request.prompt_logprobs) < sequence.num_prompt
            )
            # A cached block has no logits, so wanted prompt log-probabilities are computed.
            cached = self._blocks.open(slot, sequence.token_ids, request.root, not wants_prompt)
            missing = len(sequence.token_ids) - cached
            count = min(missing, budget)
            whole = count == missing or self._config.enable_chunked_prefill
            if not whole or not self._blocks.grow(slot, cached, cached + count):
                self._blocks.close(slot)
                self._free_slots.append(slot)
                return
            self._waiting.popleft()
            if forks:
                self._reserved[request.request_id] = [self._free_slots.pop() for _ in range(forks)]
            self._admit(sequence, slot, cached)
            sequences.append(sequence)
            counts.append(count)
            budget -= count

    def _admit(self, sequence: Sequence, slot: int, cached: int) -> None:
        request = sequence.request
        self.stats.prefix_cache_queries += len(sequence.token_ids)
        self.stats.prefix_cache_hits += cached
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = cached
            request.metrics.first_scheduled_time = time.monotonic()
            self.stats.prompt_tokens += sequence.num_prompt
        sequence.num_computed = cached
        self._running.append(sequence)
        self._bind(sequence, slot)

    def _bind(self, sequence: Sequence, slot: int) -> None:
        sequence.slot = slot
        self._by_slot[slot] = sequence
        request = sequence.request
        self._admitted.append(
            SlotState(
                slot,
                tuple(sequence.token_ids),
                sequence.num_prompt,
                request.params,
                request.seed,
                sequence.index,
                request.num_logprobs,
                request.num_prompt_logprobs,
                tuple(request.end_ids) if request.params.min_tokens else (),
                request.bad_word_ids,
            )
        )

    def _preempt(self, victim: Sequence) -> None:
        """Takes KV and slot away; the sequence is computed anew later, in order of arrival."""
        request = victim.request
        members = [victim]
        if request.request_id in self._beams:
            members = [s for s in self._running if s.request is request]
            self._beams[request.request_id].pending.clear()
        for sequence in reversed(members):
            self._free_slots.append(self._release(sequence))
            sequence.num_computed = 0
            self.stats.num_preemptions += 1
            arrival = self._arrival[request.request_id]
            position = 0
            for other in self._waiting:
                if self._arrival[other.request.request_id] >= arrival:
                    break
                position += 1
            self._waiting.insert(position, sequence)
        self._return_reserved(request)

    def _pack(self, sequences: list[Sequence], counts: list[int]) -> SchedulerOutput:
        token_ids: list[int] = []
        starts: list[int] = []
        slots: list[int] = []
        samples: list[int] = []
        prompt_rows: list[PromptRows] = []
        for index, sequence in enumerate(sequences):
            start = sequence.num_computed
            end = start + counts[index]
            tokens = sequence.token_ids
            starts.append(start)
            slots.append(sequence.slot)
            if end - start == 1:
                token_ids.append(tokens[start])
            else:
                token_ids.extend(tokens[start:end])
            request = sequence.request
            if end < len(tokens):
                samples.append(0)
            elif len(request.sequences) == 1 and not request.params.use_beam_search:
                samples.append(request.params.width)
            else:
                samples.append(1)
            if request.prompt_logprobs is not None and start < sequence.num_prompt:
                first = max(start, len(request.prompt_logprobs) - 1)
                last = min(end, sequence.num_prompt - 1)
                if first < last:
                    prompt_rows.append(PromptRows(index, first - start, last - first))
        changes = self._blocks.take_changes()
        admitted = tuple(self._admitted)
        self._admitted.clear()
        return SchedulerOutput(
            slots=np.array(slots, np.int32),
            starts=np.array(starts, np.int32),
            counts=np.array(counts, np.int32),
            token_ids=np.array(token_ids, np.int32),
            num_samples=np.array(samples, np.int32),
            prompt_rows=tuple(prompt_rows),
            admitted=admitted,
            table_writes=np.array((changes.tables, changes.columns, changes.blocks), np.int32),
            block_copies=np.array((changes.copy_from, changes.copy_to), np.int32),
        )

    # -- applying results -------------------------------------------------------------------

    def _append(self, sequence: Sequence, drawn: int, output: ModelRunnerOutput) -> None:
        """Adds the `drawn`-th token of the step's output and ends the sequence if it must."""
        request = sequence.request
        token = output.token_ids[drawn]
        tokens = sequence.token_ids
        tokens.append(token)
        self.stats.generation_tokens += 1
        if output.logprobs is not None:
            entry = output.logprobs[drawn]
            if entry is not None:
                sequence.cumulative_logprob += entry.drawn
                if sequence.logprobs is not None:
                    sequence.logprobs.append(entry)
        if token in request.end_ids and self._may_end(sequence, len(tokens)):
            self._finish(sequence, FinishReason.STOP, None if token in request.eos_ids else token)
        elif len(tokens) >= request.max_total_tokens:
            self._finish(sequence, FinishReason.LENGTH, None)

    @staticmethod
    def _may_end(sequence: Sequence, length: int) -> bool:
        return length - sequence.num_prompt > sequence.request.params.min_tokens

    def _fork_samples(self, sequence: Sequence, samples: int) -> list[Sequence]:
        """Turns a prompt's one sequence into `samples` that share its KV."""
        request = sequence.request
        slots = self._reserved.pop(request.request_id)
        for index in range(1, samples):
            self._fork(sequence, index, slots.pop())
        assert not slots
        return list(request.sequences)

    def _fork(self, parent: Sequence, index: int, slot: int) -> Sequence:
        request = parent.request
        child = Sequence(
            request,
            index,
            list(parent.token_ids),
            parent.num_prompt,
            num_computed=parent.num_computed,
            cumulative_logprob=parent.cumulative_logprob,
            logprobs=None if parent.logprobs is None else list(parent.logprobs),
        )
        request.sequences.append(child)
        request.live += 1
        self._blocks.fork(parent.slot, slot)
        self._running.insert(self._running.index(parent) + 1, child)
        self._bind(child, slot)
        return child

    def _advance_beams(self, request: Request) -> list[Sequence]:
        group = self._beams[request.request_id]
        slots = self._reserved.pop(request.request_id, [])
        beams = [s for s in request.sequences if not s.finished]
        candidates = [group.pending[s.index] for s in beams]
        needed = candidates_needed(group.width, len(request.end_ids))
        wanted = request.params.logprobs

        def ends(item: Continuation) -> bool:
            beam = beams[item.parent]
            if not self._may_end(beam, len(beam.token_ids) + 1):
                return False
            if item.token in request.end_ids:
                return True
            if not request.params.stop:
                return False
            assert self._holds_stop is not None
            return self._holds_stop(request, [*beam.output_ids, item.token])

        def logprobs_of(item: Continuation) -> list[SampleLogprobs] | None:
            before = beams[item.parent].logprobs
            if before is None or wanted is None:
                return None
            top = candidates[item.parent][:wanted]
            return [*before, SampleLogprobs(item.logprob, item.rank, top)]

        chosen = advance(
            group,
            [(s.token_ids, s.cumulative_logprob) for s in beams],
            [c[:needed] for c in candidates],
            ends,
            logprobs_of,
        )
        group.pending = {}
        if not chosen:
            self._reserved[request.request_id] = slots
            return self._end_beams(request, group, beams)
        self.stats.generation_tokens += len(chosen)
        parents = {item.parent for item in chosen}
        for index, beam in enumerate(beams):
            if index not in parents:
                slots.append(self._release(beam))
                request.sequences.remove(beam)
                request.live -= 1
        used = {beams[parent].index for parent in parents}
        spare = [i for i in range(group.width) if i not in used]
        grown: list[tuple[Sequence, int, float, list[SampleLogprobs] | None]] = []
        seen: set[int] = set()
        for item in chosen:
            beam = beams[item.parent]
            if item.parent in seen:
                beam = self._fork(beam, spare.pop(0), slots.pop())
            seen.add(item.parent)
            grown.append((beam, item.token, item.score, logprobs_of(item)))
        for beam, token, score, logprobs in grown:  # after all forks, which copy the parent
            beam.token_ids.append(token)
            beam.cumulative_logprob = score
            beam.logprobs = logprobs
        if slots:
            self._reserved[request.request_id] = slots
        return [beam for beam, *_ in grown]

    def _end_beams(
        self, request: Request, group: BeamGroup, beams: list[Sequence]
    ) -> list[Sequence]:
        """Replaces the live beams by the best finished hypotheses."""
        hypotheses = list(group.hypotheses)
        if len(hypotheses) < request.params.n:  # the search stopped before enough had ended
            hypotheses += [
                Hypothesis(s.token_ids, s.cumulative_logprob, s.cumulative_logprob, s.logprobs)
                for s in sorted(beams, key=lambda s: -s.cumulative_logprob)
            ]
        finished: list[Sequence] = []
        for index, hypothesis in enumerate(hypotheses[: request.params.n]):
            last = hypothesis.token_ids[-1]
            ended = last in request.end_ids
            finished.append(
                Sequence(
                    request,
                    index,
                    hypothesis.token_ids,
                    beams[0].num_prompt,
                    cumulative_logprob=hypothesis.score,
                    logprobs=hypothesis.record,
                    finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
                    stop_reason=last if ended and last not in request.eos_ids else None,
                )
            )
        self._end_request(request, FinishReason.STOP)
        request.sequences = finished
        return finished

    # -- ending -----------------------------------------------------------------------------

    def _finish(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None
    ) -> None:
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        if sequence.slot >= 0:
            self._free_slots.append(self._release(sequence))
        request = sequence.request
        request.live -= 1
        if request.live == 0:
            self._forget(request)

    def _end_request(self, request: Request, reason: FinishReason) -> None:
        for sequence in list(request.sequences):
            if not sequence.finished:
                if sequence.slot < 0:
                    self._waiting.remove(sequence)
                self._finish(sequence, reason, None)

    def _forget(self, request: Request) -> None:
        self._return_reserved(request)
        self._beams.pop(request.request_id, None)
        del self._requests[request.request_id]
        del self._arrival[request.request_id]
        request.metrics.finished_time = time.monotonic()
        self.stats.num_requests_finished += 1

    def _return_reserved(self, request: Request) -> None:
        self._free_slots.extend(self._reserved.pop(request.request_id, ()))

    def _release(self, sequence: Sequence) -> int:
        """Gives the blocks back and leaves the running list; returns the slot, now unused."""
        slot = sequence.slot
        self._blocks.close(slot)
        self._by_slot[slot] = None
        sequence.slot = -1
        self._running.remove(sequence)
        return slot

    def check_integrity(self) -> None:
        """Asserts that slots, queues and requests agree; for tests and when idle."""
        self._blocks.check_integrity()
        held = [s.slot for s in self._running]
        reserved = [slot for slots in self._reserved.values() for slot in slots]
        everything = sorted(held + reserved + self._free_slots)
        assert everything == list(range(self._config.max_num_seqs)), "a slot was lost or doubled"
        assert all(self._by_slot[s.slot] is s for s in self._running)
        live = [s for r in self._requests.values() for s in r.sequences if not s.finished]
        assert {id(s) for s in live} == {id(s) for s in (*self._running, *self._waiting)}
        assert all(
            r.live == sum(not s.finished for s in r.sequences) for r in self._requests.values()
        )
