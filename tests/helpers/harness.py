"""A scheduler without a device: a fake runner whose tokens depend only on the sequence so far."""

from __future__ import annotations

import time
from array import array
from collections import deque
from functools import reduce
from itertools import accumulate

import numpy as np

from hetero_llm.config.engine_config import SchedulerConfig
from hetero_llm.core.drafter import Drafter
from hetero_llm.core.lora import AdapterRef
from hetero_llm.core.outputs import RequestMetrics
from hetero_llm.core.request import Request, Sequence
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import (
    LAST_SAMPLED,
    AdmittedSequence,
    ModelRunnerOutput,
    SampleLogprobs,
    SchedulerOutput,
)
from hetero_llm.kv_cache.block_manager import BlockManager
from hetero_llm.kv_cache.prefix_cache import PrefixCache, hash_root, token_bytes
from hetero_llm.scheduler.adapter_slots import AdapterSlots
from hetero_llm.scheduler.beam_search import HoldsStop, candidates_needed
from hetero_llm.scheduler.scheduler import Scheduler

VOCAB = 50
EOS = 0


def begin(sample_index: int) -> int:
    """The state of the stand-in for a model before the first token."""
    return 17 + 31 * sample_index


def absorb(state: int, token: int) -> int:
    """The state after one token more: a hash of everything before."""
    return (state * 1103515245 + token + 12345) % (1 << 31)


def token_of(state: int) -> int:
    return (state >> 8) % VOCAB


def next_token(token_ids: list[int], sample_index: int = 0) -> int:
    """A deterministic stand-in for a model: it depends on everything before."""
    return token_of(reduce(absorb, token_ids, begin(sample_index)))


def tokens_of(step: SchedulerOutput) -> tuple[list[int], list[int]]:
    """[T] input tokens, draft nodes included, and [T] index of each one's parent among the
    sequence's tokens of the step: -1 for all but draft nodes."""
    drafts = step.drafts
    if drafts is None:
        assert len(step.token_ids) == int(step.num_scheduled_tokens.sum())
        return step.token_ids.tolist(), [-1] * len(step.token_ids)
    assert len(drafts.token_ids) == len(drafts.parents) == int(drafts.counts.sum()) > 0
    assert len(drafts.counts) == len(step.request_slots)
    known, nodes = iter(step.token_ids.tolist()), iter(drafts.token_ids.tolist())
    above = iter(drafts.parents.tolist())
    tokens: list[int] = []
    parents: list[int] = []
    for count, drafted in zip(step.num_scheduled_tokens.tolist(), drafts.counts.tolist()):
        assert not drafted or count == drafted + 1
        tokens += [next(known) for _ in range(count - drafted)]
        parents += [-1] * (count - drafted)
        tokens += [next(nodes) for _ in range(drafted)]
        parents += [next(above) + 1 for _ in range(drafted)]
    assert next(known, None) is None
    return tokens, parents


class FakeRunner:
    """Keeps what a runner keeps per request slot, in block-addressed memory, and checks the
    contract of `core.step`.

    `memory[block][offset]` holds what KV depends on: the token and all tokens before it, as a
    hash. The context is read back through the block table, so a block shared or freed wrongly
    shows up as a wrong token; it must also be what the slot was fed. A draft tree is verified as
    on a device: the KV of its nodes is written behind the root's, the context of a node is its own
    path, then the KV of the accepted path is made contiguous. A step takes effect when it is
    finished, and steps are finished in the order of their launch, as on a slow device.

    Attributes:
        max_step_tokens: most tokens in a step so far.
        num_tokens_run: tokens of all steps so far.
        num_moved: accepted nodes so far whose KV did not lie in place.
        events: "launch 0", "finish 0", ...
    """

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, columns: int) -> None:
        self.memory = np.full((num_blocks, block_size, 2), -1, np.int64)  # token, hash of the path
        self.tables = np.full((max_num_seqs, columns), -1, np.int64)
        self.states = {}
        self.block_size = block_size
        self.max_step_tokens = 0
        self.num_tokens_run = 0
        self.num_moved = 0
        self.events: list[str] = []
        self._queue: deque[tuple[int, SchedulerOutput]] = deque()
        self._num_launched = 0
        self._fed: dict[int, list[int]] = {}  # slot to its tokens, as admitted and then fed
        self._sampled: dict[int, int] = {}  # slot to the one token that the last step sampled

    def launch(self, step: SchedulerOutput) -> int:
        number = self._num_launched
        self._num_launched += 1
        self._queue.append((number, step))
        self.events.append(f"launch {number}")
        return number

    def finish(self, pending: int) -> ModelRunnerOutput:
        number, step = self._queue.popleft()
        assert number == pending, "steps are finished in the order of their launch"
        self.events.append(f"finish {number}")
        return self._run(step)

    def run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self.finish(self.launch(step))

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for state in step.admitted:
            self.states[state.request_slot] = state
            self._fed[state.request_slot] = list(state.token_ids)
        slots, columns, blocks = step.block_table_writes
        self.tables[slots, columns] = blocks
        for source, destination in step.block_copies.T:
            self.memory[destination] = self.memory[source]
        self.max_step_tokens = max(self.max_step_tokens, int(step.num_scheduled_tokens.sum()))
        self.num_tokens_run += int(step.num_scheduled_tokens.sum())
        tokens: list[int] = []
        logprobs: list[SampleLogprobs | None] = []
        sampled: dict[int, int] = {}
        produced: list[int] = []
        inputs, parents = tokens_of(step)
        first = 0
        for slot, start, count, samples in zip(
            step.request_slots.tolist(),
            step.num_computed_tokens.tolist(),
            step.num_scheduled_tokens.tolist(),
            step.num_samples,
        ):
            before = len(tokens)
            last = first + count
            if max(parents[first:last]) >= 0:
                assert samples == 1
                tokens += self._verify(slot, start, inputs[first:last], parents[first:last])
                for index, token in enumerate(tokens[before:], start + 1):
                    context, wanted = self._fed[slot][:index], self.states[slot].num_logprobs
                    logprobs.append(self._logprobs(context, token, wanted))
            else:
                for position, token in enumerate(inputs[first:last], start):
                    self._feed(slot, position, token)
                context = self._context(slot, start + count)
                for sample in range(samples):
                    token = self._sample(slot, context, sample if samples > 1 else None)
                    tokens.append(token)
                    logprobs.append(self._logprobs(context, token, self.states[slot].num_logprobs))
            if samples == 1:
                sampled[slot] = tokens[-1]
            produced.append(len(tokens) - before)
            first = last
        self._sampled = sampled
        if step.drafts is None:
            return ModelRunnerOutput(tokens, logprobs, {}, {})
        return ModelRunnerOutput(tokens, logprobs, {}, {}, produced)

    def _verify(self, slot: int, start: int, inputs: list[int], parents: list[int]) -> list[int]:
        """The tokens that a draft tree yields; afterwards the accepted nodes' KV is in place."""
        assert parents[0] == -1 and all(0 <= p < i for i, p in enumerate(parents) if i)
        self._feed(slot, start, inputs[0])
        fed = self._fed[slot]
        assert start + 1 == len(fed), "a tree's root is the last token"
        paths = [[0]]
        for index in range(1, len(inputs)):
            paths.append([*paths[parents[index]], index])
            _, before = self.memory[self._place(slot, start + parents[index])]
            state = absorb(int(before), inputs[index])
            self.memory[self._place(slot, start + index)] = inputs[index], state
        tokens: list[int] = []
        at = 0
        while True:
            path = [start + index for index in paths[at]]
            tokens.append(self._sample(slot, self._read(slot, [*range(start), *path])))
            fits = [i for i, p in enumerate(parents) if p == at and inputs[i] == tokens[-1]]
            if not fits:
                break
            at = fits[0]
        for target, index in enumerate(paths[at]):  # in ascending order: no source is overwritten
            source = self.memory[self._place(slot, start + index)]
            self.memory[self._place(slot, start + target)] = source
            self.num_moved += index != target
        fed += tokens[:-1]
        self._context(slot, len(fed))
        return tokens

    def _sample(self, slot: int, context: list[int], sample: int | None = None) -> int:
        state = self.states[slot]
        token = next_token(context, state.sample_index if sample is None else sample)
        if len(context) - state.num_prompt_tokens < state.params.min_tokens:
            token = max(token, 1)
        return token

    def _feed(self, slot: int, position: int, token: int) -> None:
        if token == LAST_SAMPLED:
            assert slot in self._sampled, "the step before did not sample one token for this slot"
            token = self._sampled[slot]
        fed = self._fed[slot]
        if position == len(fed):
            fed.append(token)
        assert fed[position] == token, "another token than before at this position"
        before = begin(0)
        if position:
            _, before = self.memory[self._place(slot, position - 1)].tolist()
        self.memory[self._place(slot, position)] = token, absorb(before, token)

    def _place(self, slot: int, index: int) -> tuple[int, int]:
        return self.tables[slot, index // self.block_size], index % self.block_size

    def _context(self, slot: int, length: int) -> list[int]:
        """The first tokens of the slot, as its blocks hold them."""
        context = self._read(slot, list(range(length)))
        assert context == self._fed[slot][:length], "KV is not that of the slot's tokens"
        return context

    def _read(self, slot: int, indices: list[int]) -> list[int]:
        """The tokens at the cache indices of one path from the first token on."""
        blocks, offsets = self._place(slot, np.array(indices))
        tokens, hashes = self.memory[blocks, offsets].T.tolist()
        assert hashes == list(accumulate(tokens, absorb, initial=begin(0)))[1:], (
            "KV is not that of the slot's tokens"
        )
        return tokens

    @staticmethod
    def _logprobs(context: list[int], token: int, count: int | None) -> SampleLogprobs:
        scores = [(t, -0.1 - ((t * 7 + sum(context)) % 23) / 5) for t in range(VOCAB)]
        best = tuple(sorted(scores, key=lambda item: -item[1])[: count or 0])
        return SampleLogprobs(-1.0 - token / 100, 1, best)


class FirstStage:
    """The memory of a stage before the last one, as that of a `FakeRunner`: a step takes effect at
    its launch, and which draft nodes are accepted is only known from moves.

    Attributes:
        num_moved: tokens moved so far.
    """

    def __init__(self, like: FakeRunner) -> None:
        self._memory = np.full_like(like.memory, -1)
        self._tables = np.full_like(like.tables, -1)
        self._size = like.block_size
        self._states: dict[int, AdmittedSequence] = {}
        self.num_moved = 0

    def launch(self, step: SchedulerOutput) -> None:
        """Checks that the KV of each sequence is that of its tokens, and writes the step's."""
        for state in step.admitted:
            self._states[state.request_slot] = state
        slots, columns, blocks = step.block_table_writes
        self._tables[slots, columns] = blocks
        for source, destination in step.block_copies.T:
            self._memory[destination] = self._memory[source]
        inputs, parents = tokens_of(step)
        first = 0
        for slot, start, count in zip(
            step.request_slots.tolist(),
            step.num_computed_tokens.tolist(),
            step.num_scheduled_tokens.tolist(),
        ):
            known = list(self._states[slot].token_ids[:start])
            hashes = list(accumulate(known, absorb, initial=begin(0)))
            found = [self._memory[self._place(slot, index)].tolist() for index in range(start)]
            assert found == [list(pair) for pair in zip(known, hashes[1:])], "KV of other tokens"
            own: list[int] = []  # hashes behind the step's tokens
            for index, token in enumerate(inputs[first : first + count]):
                parent = parents[first + index]
                if parent >= 0:
                    before = own[parent]
                else:
                    before = own[-1] if own else hashes[-1]
                own.append(absorb(before, token))
                self._memory[self._place(slot, start + index)] = token, own[-1]
            first += count

    def move(self, moves: np.ndarray) -> None:
        memory = self._memory.reshape(-1, 2)
        memory[moves[1]] = memory[moves[0]]
        self.num_moved += moves.shape[1]

    def _place(self, slot: int, index: int) -> tuple[int, int]:
        return self._tables[slot, index // self._size], index % self._size


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 8,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_model_len: int = 128,
    prefix_caching: bool = True,
    chunked: bool = True,
    holds_stop: HoldsStop | None = None,
    drafter: Drafter | None = None,
    adapters: AdapterSlots | None = None,
    num_stages: int = 1,
) -> tuple[Scheduler, BlockManager, FakeRunner]:
    config = SchedulerConfig(
        max_num_seqs, max_num_batched_tokens, max_model_len, chunked, block_size, num_stages
    )
    blocks = BlockManager(num_blocks, block_size, PrefixCache() if prefix_caching else None)
    columns = -(-max_model_len // block_size)
    return (
        Scheduler(config, blocks, holds_stop, drafter=drafter, adapters=adapters),
        blocks,
        FakeRunner(num_blocks, block_size, max_num_seqs, columns),
    )


def make_request(
    request_id: str,
    prompt: list[int],
    params: SamplingParams,
    max_model_len: int = 128,
    adapter: AdapterRef | None = None,
) -> Request:
    limit = max_model_len
    if params.max_tokens is not None:
        limit = min(limit, len(prompt) + params.max_tokens)
    end_ids = frozenset() if params.ignore_eos else frozenset({EOS})
    end_ids |= frozenset(params.stop_token_ids)
    count = params.logprobs
    if params.use_beam_search:
        count = candidates_needed(params.width, len(end_ids))
    elif count is None and params.ranks_by_logprob:
        count = 0
    return Request(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=prompt,
        params=params,
        seed=0,
        end_ids=end_ids,
        eos_ids=frozenset({EOS}),
        max_total_tokens=limit,
        root_hash=hash_root(() if adapter is None else ("adapter", adapter.content_hash)),
        metrics=RequestMetrics(time.monotonic()),
        num_logprobs=count,
        packed_prompt=token_bytes(prompt),
        adapter=adapter,
    )


def make_sequence(request: Request) -> Sequence:
    """A request's first sequence, without a scheduler."""
    prompt = request.prompt_token_ids
    return Sequence(request, 0, array("i", prompt), len(prompt))


def expected_output(prompt: list[int], params: SamplingParams, index: int = 0) -> list[int]:
    """What the fake model generates, computed without any engine."""
    tokens = list(prompt)
    while True:
        token = next_token(tokens, index)
        if len(tokens) - len(prompt) < params.min_tokens:
            token = max(token, 1)
        tokens.append(token)
        generated = len(tokens) - len(prompt)
        ends = (token == EOS and not params.ignore_eos) or token in params.stop_token_ids
        if (ends and generated > params.min_tokens) or generated == params.max_tokens:
            return tokens[len(prompt) :]


class AsyncStepper:
    """Steps a scheduler as an asynchronous engine does, without an engine."""

    def __init__(self, scheduler: Scheduler, runner: FakeRunner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._pending: tuple[SchedulerOutput, int] | None = None

    def step(self) -> bool:
        """Finishes a step, another one launched behind it if that can be; False if there is
        none."""
        if self._pending is None:
            self._launch(self._scheduler.schedule())
        if self._pending is None:
            return False
        step, number = self._pending
        self._launch(self._scheduler.schedule_ahead())
        self._scheduler.check_integrity()
        self._scheduler.update(step, self._runner.finish(number))
        return True

    def _launch(self, step: SchedulerOutput | None) -> None:
        self._pending = None if step is None else (step, self._runner.launch(step))


class StagesStepper:
    """Steps a scheduler as an engine does whose layers are cut into stages, without an engine.

    Attributes:
        first: another stage; `runner` is the last one.
        steps: in flight, oldest first.
        most: of them at any time so far.
    """

    def __init__(self, scheduler: Scheduler, runner: FakeRunner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self.first = FirstStage(runner)
        self.steps: deque[tuple[SchedulerOutput, int]] = deque()
        self.most = 0

    def step(self) -> bool:
        """Finishes a step, further ones launched behind it; False if there is none."""
        if not self.steps:
            self._launch(self._scheduler.schedule())
        if not self.steps:
            return False
        while self._scheduler.may_run_ahead and self._launch(self._scheduler.schedule_ahead()):
            pass
        self.most = max(self.most, len(self.steps))
        self._scheduler.check_integrity()
        self._scheduler.run_deferred()
        step, number = self.steps.popleft()
        self._scheduler.update(step, self._runner.finish(number))
        self.first.move(self._scheduler.take_kv_moves())
        return True

    def _launch(self, step: SchedulerOutput | None) -> bool:
        if step is not None:
            self.first.launch(step)
            self.steps.append((step, self._runner.launch(step)))
            self._scheduler.step_launched()
        return step is not None


def run_to_end(scheduler: Scheduler, runner: FakeRunner, max_steps: int = 5000) -> None:
    for _ in range(max_steps):
        step = scheduler.schedule()
        if step is None:
            assert scheduler.num_unfinished == 0, "requests are left but nothing can run"
            return
        scheduler.update(step, runner.run(step))
        scheduler.check_integrity()
    raise AssertionError("no end in sight")
