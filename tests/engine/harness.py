"""A scheduler without a device: a fake runner whose tokens depend only on the sequence so far."""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from hetero_llm.core.config import SchedulerConfig
from hetero_llm.core.outputs import RequestMetrics
from hetero_llm.core.request import Request
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import LAST_DRAWN, ModelRunnerOutput, SampleLogprobs, SchedulerOutput
from hetero_llm.engine.beam import candidates_needed
from hetero_llm.engine.block_manager import BlockManager
from hetero_llm.engine.prefix_cache import PrefixCache, root_key
from hetero_llm.engine.scheduler import Scheduler
from hetero_llm.engine.scheduler_beams import HoldsStop

VOCAB = 50
EOS = 0


def next_token(token_ids: list[int], sample_index: int = 0) -> int:
    """A deterministic stand-in for a model: a hash of everything before."""
    value = 17 + 31 * sample_index
    for token in token_ids:
        value = (value * 1103515245 + token + 12345) % (1 << 31)
    return (value >> 8) % VOCAB


class FakeRunner:
    """Keeps what a runner keeps per slot, in block-addressed memory, and checks the contract.

    Every token is written into `memory[block][offset]` and the context is read back through the
    block table, so a block shared or freed wrongly shows up as a wrong token; it must also be what
    the slot was fed. Nothing of a step happens before it is finished, and steps are finished in
    the order of their launch, as on a device that is slow.
    """

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, columns: int) -> None:
        self.memory = np.full((num_blocks, block_size), -1, np.int64)
        self.tables = np.full((max_num_seqs, columns), -1, np.int64)
        self.states = {}
        self.block_size = block_size
        self.max_rows = 0
        self.num_rows = 0
        self.events: list[str] = []  # "launch 0", "finish 0", ...
        self._queue: deque[tuple[int, SchedulerOutput]] = deque()
        self._num_launched = 0
        self._fed: dict[int, list[int]] = {}  # slot to its tokens, as admitted and then fed
        self._drawn: dict[int, int] = {}  # slot to its one token drawn by the last step

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
            self.states[state.slot] = state
            self._fed[state.slot] = list(state.token_ids)
        slots, columns, blocks = step.table_writes
        self.tables[slots, columns] = blocks
        for source, destination in step.block_copies.T:
            self.memory[destination] = self.memory[source]
        self.max_rows = max(self.max_rows, int(step.counts.sum()))
        self.num_rows += int(step.counts.sum())
        tokens: list[int] = []
        logprobs: list[SampleLogprobs | None] = []
        drawn: dict[int, int] = {}
        row = 0
        for slot, start, count, samples in zip(
            step.slots.tolist(), step.starts.tolist(), step.counts.tolist(), step.num_samples
        ):
            for position in range(start, start + count):
                self._feed(slot, position, int(step.token_ids[row]))
                row += 1
            context = self._context(slot, start + count)
            assert context == self._fed[slot][: start + count], (
                "KV is not that of the slot's tokens"
            )
            state = self.states[slot]
            for sample in range(samples):
                index = sample if samples > 1 else state.sample_index
                token = next_token(context, index)
                if len(context) - state.num_prompt_tokens < state.params.min_tokens:
                    token = max(token, 1)
                tokens.append(token)
                logprobs.append(self._logprobs(context, token, state.num_logprobs))
            if samples == 1:
                drawn[slot] = tokens[-1]
        assert row == len(step.token_ids)
        self._drawn = drawn
        return ModelRunnerOutput(tokens, logprobs, {}, {})

    def _feed(self, slot: int, position: int, token: int) -> None:
        if token == LAST_DRAWN:
            assert slot in self._drawn, "the step before drew no single token for this slot"
            token = self._drawn[slot]
        fed = self._fed[slot]
        if position == len(fed):
            fed.append(token)
        assert fed[position] == token, "another token than before at this position"
        block = self.tables[slot, position // self.block_size]
        self.memory[block, position % self.block_size] = token

    def _context(self, slot: int, length: int) -> list[int]:
        blocks = self.tables[slot, : -(-length // self.block_size)]
        return self.memory[blocks].flatten()[:length].tolist()

    @staticmethod
    def _logprobs(context: list[int], token: int, count: int | None) -> SampleLogprobs:
        scores = [(t, -0.1 - ((t * 7 + sum(context)) % 23) / 5) for t in range(VOCAB)]
        best = tuple(sorted(scores, key=lambda item: -item[1])[: count or 0])
        return SampleLogprobs(-1.0 - token / 100, 1, best)


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
) -> tuple[Scheduler, BlockManager, FakeRunner]:
    config = SchedulerConfig(
        max_num_seqs, max_num_batched_tokens, max_model_len, chunked, block_size
    )
    blocks = BlockManager(num_blocks, block_size, PrefixCache() if prefix_caching else None)
    columns = -(-max_model_len // block_size)
    return (
        Scheduler(config, blocks, holds_stop),
        blocks,
        FakeRunner(num_blocks, block_size, max_num_seqs, columns),
    )


def make_request(
    request_id: str, prompt: list[int], params: SamplingParams, max_model_len: int = 128
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
        root=root_key(),
        metrics=RequestMetrics(time.monotonic()),
        num_logprobs=count,
    )


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


def run_to_end(scheduler: Scheduler, runner: FakeRunner, max_steps: int = 5000) -> None:
    for _ in range(max_steps):
        step = scheduler.schedule()
        if step is None:
            assert scheduler.num_unfinished == 0, "requests are left but nothing can run"
            return
        scheduler.update(step, runner.run(step))
        scheduler.check_integrity()
    raise AssertionError("no end in sight")
