"""Steps made from arrays are those that would have been made sequence by sequence."""

from __future__ import annotations

import dataclasses
from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm import SamplingParams
from hetero_llm.core.draft_tree import DraftBatch, DraftTree, join_trees
from hetero_llm.core.drafter import NUM_WRITABLE, ROW, SteadyStep, StepReport
from hetero_llm.core.request import Request, Sequence
from hetero_llm.core.step import SchedulerOutput
from tests.helpers.harness import VOCAB, absorb, begin, expected_output, make_request, token_of
from tests.helpers.traffic import TRAFFIC, Served, make_engine, run_all, serve_on
from tests.scheduler.test_draft_admission import record_steps

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)


class ArrayTreeDrafter:
    """Random trees that depend on a sequence's tokens alone; some of their nodes are right.

    Args:
        takes_arrays: else `propose_next` is never called.
    """

    def __init__(self, right: float, *, takes_arrays: bool) -> None:
        self._right, self._takes_arrays = right, takes_arrays
        self._known: list[tuple[Sequence, list[int]]] = []
        self.idle = False
        self.num_from_arrays = self.num_shrunk = 0

    def propose(self, sequences: list[Sequence], limits: list[int], num_rows: int) -> DraftBatch:
        return join_trees(
            self._tree(sequence.index, sequence.token_ids.tolist(), limit)
            for sequence, limit in zip(sequences, limits, strict=True)
        )

    def rows_of(self, sequences: list[Sequence]) -> np.ndarray | None:
        if not self._takes_arrays:
            return None
        self._known = [(sequence, sequence.token_ids.tolist()) for sequence in sequences]
        return np.arange(len(sequences))

    def propose_next(
        self,
        sequences: list[Sequence],
        numbers: np.ndarray,
        token_ids: np.ndarray,
        sizes: np.ndarray,
        most_nodes: int,
    ) -> SteadyStep | None:
        assert (sizes >= 1).all() and sizes.sum() == len(token_ids)
        going_on: list[int] = []
        computed: list[int] = []
        last: list[int] = []
        trees: list[DraftTree | None] = []
        has_blocks = True
        first = 0
        for index, size in enumerate(sizes.tolist()):
            sequence, known = self._known[int(numbers[index, ROW])]
            assert sequence is sequences[index] and sequence.token_ids.tolist() == known
            new = token_ids[first : first + size].tolist()
            first += size
            request = sequence.request
            num_known = len(known) + size
            if num_known >= request.max_total_tokens or request.end_ids.intersection(new):
                continue
            writable = int(numbers[index, NUM_WRITABLE])
            if writable < num_known:
                return None
            limit = min(request.max_total_tokens - num_known - 1, most_nodes)
            tree = self._tree(sequence.index, [*known, *new], limit) if limit > 0 else None
            has_blocks = has_blocks and num_known + (0 if tree is None else len(tree)) <= writable
            going_on.append(index)
            computed.append(num_known - 1)
            last.append(new[-1])
            trees.append(tree)
        if not going_on:
            return None
        self.num_from_arrays += 1
        self.num_shrunk += len(going_on) < len(sizes)
        return SteadyStep(
            None if len(going_on) == len(sizes) else np.array(going_on),
            np.array(computed, np.int32), np.array(last, np.int32), join_trees(trees), has_blocks,
        )  # fmt: skip

    def close(self, request: Request) -> None:
        pass

    def observe_step(self, report: StepReport) -> None:
        assert report.num_tokens >= report.num_sequences and report.idle_seconds >= 0.0

    def run_deferred(self) -> None:
        pass

    def _tree(self, index: int, known: list[int], limit: int) -> DraftTree | None:
        rng = np.random.default_rng([index, *known])
        if rng.random() < 0.2:
            return None
        states = [reduce(absorb, known, begin(index))]
        tokens: list[int] = []
        parents: list[int] = []
        for node in range(rng.integers(0, min(limit, 10) + 1)):
            parent = node - 1 if rng.random() < 0.6 else int(rng.integers(-1, node))
            state = states[parent + 1]
            token = token_of(state) if rng.random() < self._right else int(rng.integers(VOCAB))
            tokens.append(token)
            parents.append(parent)
            states.append(absorb(state, token))
        return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32))


def in_lists(step: SchedulerOutput) -> list[object]:
    """What of a step must not depend on how it was made."""
    drafts = step.drafts
    parts = (
        step.request_slots, step.num_computed_tokens, step.num_scheduled_tokens, step.token_ids,
        step.num_samples, step.block_table_writes, step.block_copies,
    )  # fmt: skip
    nodes = [] if drafts is None else [drafts.counts, drafts.token_ids, drafts.parents]
    slots = [admitted.request_slot for admitted in step.admitted]
    return [*(part.tolist() for part in (*parts, *nodes)), slots]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    traffic=TRAFFIC,
    num_blocks=st.integers(18, 60),
    budget=st.integers(8, 60),
    right=st.sampled_from([0.5, 0.8, 0.95]),
)
def test_random_traffic_runs_the_same_steps(
    traffic: list[tuple], num_blocks: int, budget: int, right: float
) -> None:
    limits = {"num_blocks": num_blocks, "max_num_batched_tokens": budget, "max_num_seqs": 6,
              "max_model_len": 72, "block_size": 4}  # fmt: skip
    runs = []
    for takes_arrays in (False, True):
        drafter = ArrayTreeDrafter(right, takes_arrays=takes_arrays)
        served = make_engine(True, drafter=drafter, **limits)
        steps = record_steps(served.runner)
        outputs, counters, _ = serve_on(served, traffic)
        stats = served.scheduler.stats
        runs.append((outputs, counters, dataclasses.replace(stats), [in_lists(s) for s in steps]))
    assert runs[0] == runs[1]


def steady_engine(right: float = 0.9, **limits: int) -> tuple[Served, ArrayTreeDrafter]:
    drafter = ArrayTreeDrafter(right, takes_arrays=True)
    return make_engine(True, drafter=drafter, **limits), drafter


def test_most_steps_of_a_decoding_batch_are_made_from_arrays() -> None:
    served, drafter = steady_engine()
    run_all(served, [make_request(str(i), [1, 2, i], GREEDY) for i in range(4)])
    num_steps = served.scheduler.stats.num_steps
    assert drafter.num_from_arrays >= num_steps - 8, "but the prompts', and those in which one ends"


def test_a_batch_goes_on_from_arrays_when_some_of_its_sequences_end() -> None:
    served, drafter = steady_engine()
    requests = [
        make_request(str(i), [1, 2, i], dataclasses.replace(GREEDY, max_tokens=12 + 8 * i))
        for i in range(4)
    ]
    outputs = run_all(served, requests)
    for request in requests:
        expected = expected_output(request.prompt_token_ids, request.params)
        assert outputs[request.request_id].outputs[0].token_ids == expected
    assert drafter.num_shrunk == 3


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=24, presence_penalty=0.5, detokenize=False),
        SamplingParams(max_tokens=24, use_beam_search=True, best_of=2, temperature=0),
    ],
)
def test_no_step_that_needs_each_sequence_is_made_from_arrays(params: SamplingParams) -> None:
    served, drafter = steady_engine()
    run_all(served, [make_request("a", [1, 2, 3], params)])
    assert drafter.num_from_arrays == 0


def test_a_waiting_request_is_admitted_by_the_next_step() -> None:
    served, drafter = steady_engine()
    served.engine.add_request(make_request("a", [1, 2, 3], GREEDY))
    while not drafter.num_from_arrays:
        served.engine.step()
    served.engine.add_request(make_request("b", [4, 5, 6], GREEDY))
    served.engine.step()
    assert served.scheduler.num_running == 2


def test_a_sequence_may_be_aborted_while_the_next_step_is_in_flight() -> None:
    served, drafter = steady_engine(right=0.5)
    for name in "ab":
        served.engine.add_request(make_request(name, [1, 2, ord(name) % 50], GREEDY))
    while drafter.num_from_arrays < 3:
        served.engine.step()
    assert served.engine.abort("a") is not None
    outputs = run_all(served, [])
    assert len(outputs["b"].outputs[0].token_ids) == 24
