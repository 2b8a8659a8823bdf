"""Runners that share the tokens of steps, as threads, against one that has all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import (
    AdmittedSequence,
    ModelRunnerOutput,
    PromptLogprobSpan,
    SchedulerOutput,
)
from hetero_llm.runner.sequence_parallel import SequenceParallel
from tests.helpers.rank_threads import ThreadCollectives, ThreadRanks

BLOCKS, SLOTS, MAX_LEN, MAX_TOKENS, BLOCK_SIZE = 24, 4, 64, 96, 16
LEAST_TOKENS = 24
"""Of chunks, for ranks to share a step; so all but the decoding steps are shared."""

Work = tuple[int, int, list[int], int]
"""Request slot, computed tokens, tokens, samples."""


def step_of(work: Sequence[Work], **changes: Any) -> SchedulerOutput:
    step = SchedulerOutput(
        request_slots=np.array([w[0] for w in work], np.int32),
        num_computed_tokens=np.array([w[1] for w in work], np.int32),
        num_scheduled_tokens=np.array([len(w[2]) for w in work], np.int32),
        token_ids=np.array([t for w in work for t in w[2]], np.int32),
        num_samples=np.array([w[3] for w in work], np.int32),
        prompt_logprob_spans=(),
        admitted=(),
        block_table_writes=np.zeros((3, 0), np.int32),
        block_copies=np.zeros((2, 0), np.int32),
    )
    return replace(step, **changes)


def steps(*, drafts: bool = False) -> list[SchedulerOutput]:
    """Prompts in chunks, alone and beside sequences that decode; with `drafts` a tree besides and
    no token that only the device knows."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 90, n).tolist() for n in (40, 5, 44, 33)]
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, top_k=9, top_p=0.9, seed=3),
        SamplingParams(temperature=1.3, n=2, seed=4),
        SamplingParams(temperature=0.0, prompt_logprobs=1, repetition_penalty=1.3),
    ]
    states = [
        AdmittedSequence(i, tuple(p), len(p), q, q.seed or 0, 0, 2, 1)
        for i, (p, q) in enumerate(zip(prompts, params, strict=True))
    ]
    blocks = rng.permutation(BLOCKS)
    writes = np.array(
        [(slot, column, int(blocks[slot * 4 + column])) for slot in range(4) for column in range(4)]
    ).T.astype(np.int32)
    known = 7 if drafts else -1
    first: list[Work] = [(0, 0, prompts[0], 1), (1, 0, prompts[1], 1), (2, 0, prompts[2][:10], 0)]
    beside: list[Work] = [(0, 40, [known], 1), (1, 5, [known], 1), (2, 10, prompts[2][10:], 2)]
    made = [
        step_of(first, admitted=tuple(states[:3]), block_table_writes=writes),
        step_of(beside),
        step_of([(0, 41, [known], 1), (1, 6, [known], 1)]),
        step_of([(3, 0, prompts[3][:29], 0)], admitted=(states[3],),
                prompt_logprob_spans=(PromptLogprobSpan(0, 0, 29),)),
        step_of([(1, 7, [known], 1), (3, 29, prompts[3][29:], 1), (0, 42, [known], 1)]),
        step_of([(0, 43, [known], 1), (3, 33, [known], 1)]),
    ]  # fmt: skip
    if drafts:
        nodes = [3, 0, 0]
        ids, parents = [11, 12, 13], [-1, -1, 0]
        batch = DraftBatch(*(np.array(values, np.int32) for values in (nodes, ids, parents)))
        step = made[1]
        counts = step.num_scheduled_tokens + np.array(nodes, np.int32)
        made[1] = replace(step, num_scheduled_tokens=counts, drafts=batch)
        made = made[:3]
    return made


class TurnCollectives:
    """`Collectives` of threads of which one runs at a time: Triton's interpreter is no good with
    several."""

    def __init__(self, inner: ThreadCollectives, turn: threading.Lock) -> None:
        self.rank = inner.rank
        self.num_gathers = 0
        self._inner, self._turn = inner, turn

    def all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError("ranks with the whole model have no parts to add up")

    def gather_columns(self, x: Tensor) -> Tensor:
        self.num_gathers += 1
        self._turn.release()
        try:
            return self._inner.gather_columns(x)
        finally:
            self._turn.acquire()


T = TypeVar("T")


def run_in_turns(act: Callable[[TurnCollectives], T], size: int) -> list[T]:
    """What each of several ranks returns; one runs at a time."""
    threads, turn = ThreadRanks(size), threading.Lock()

    def alone(own: ThreadCollectives) -> T:
        with turn:
            return act(TurnCollectives(own, turn))

    return threads.run(alone)


def run_shared(
    make: Callable[[SequenceParallel], Any], work: list[SchedulerOutput], size: int
) -> tuple[list[ModelRunnerOutput], list[Tensor], int]:
    """Runs steps on several runners.

    Args:
        make: a runner.

    Returns:
        What rank 0 returned, after checking that all returned the same; the KV caches; how often
        a rank gathered.
    """

    def act(own: TurnCollectives) -> tuple[list[ModelRunnerOutput], Tensor, int]:
        runner = make(SequenceParallel(own, LEAST_TOKENS))
        outputs = [runner.finish(runner.launch(step)) for step in work]
        return outputs, runner.cache.data, own.num_gathers

    found = run_in_turns(act, size)
    for outputs, _, gathers in found[1:]:
        assert [one.token_ids for one in outputs] == [one.token_ids for one in found[0][0]]
        assert gathers == found[0][2]
    return found[0][0], [data for _, data, _ in found], found[0][2]


def check_same(found: list[ModelRunnerOutput], expected: list[ModelRunnerOutput]) -> None:
    for output, wanted in zip(found, expected, strict=True):
        assert output.token_ids == wanted.token_ids
        assert output.num_tokens == wanted.num_tokens
        assert output.prompt_logprobs.keys() == wanted.prompt_logprobs.keys()
        entries = [(output.logprobs or [], wanted.logprobs or [])]
        entries += [(output.prompt_logprobs[slot], wanted.prompt_logprobs[slot])
                    for slot in wanted.prompt_logprobs]  # fmt: skip
        for ours, others in entries:
            assert len(ours) == len(others)
            for entry, other in zip(ours, others, strict=True):
                assert entry.rank == other.rank
                assert entry.sampled == pytest.approx(other.sampled, abs=1e-4)


def check_same_cache(caches: list[Tensor], expected: Tensor) -> None:
    """All ranks have the same bits, those of one runner up to float32's rounding."""
    for data in caches[1:]:
        assert torch.equal(data.view(torch.uint8), caches[0].view(torch.uint8))
    torch.testing.assert_close(caches[0], expected, rtol=1e-4, atol=1e-4)
