"""Drafts make tokens come faster and change nothing else: over a runner that verifies any tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hetero_llm import SamplingParams
from hetero_llm.core.draft_tree import MAX_NODES, DraftBatch, DraftTree, chain, join_trees
from hetero_llm.core.drafter import StepReport
from hetero_llm.core.request import Request, Sequence
from hetero_llm.core.sampling_params import RequestOutputKind
from hetero_llm.core.step import LAST_SAMPLED, SchedulerOutput
from tests.helpers.harness import (
    EOS,
    VOCAB,
    absorb,
    begin,
    expected_output,
    make_request,
    make_scheduler,
    next_token,
    token_of,
)
from tests.helpers.traffic import TRAFFIC, check_idle, make_engine, run_all, serve

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)


class TreeDrafter:
    """Random trees; each node's token is the fake model's own with probability `right`."""

    def __init__(self, seed: int, right: float, *, most_nodes: int = 10, idle: float = 0.0) -> None:
        self._rng = np.random.default_rng(seed)
        self._right = right
        self._most_nodes = most_nodes
        self._idle = idle
        self.closed: list[str] = []

    @property
    def idle(self) -> bool:
        return self._rng.random() < self._idle

    def propose(self, sequences: list[Sequence], limits: list[int], num_rows: int) -> DraftBatch:
        return join_trees(
            self._tree(sequence, limit) if self._rng.random() < 0.85 else None
            for sequence, limit in zip(sequences, limits)
        )

    def close(self, request: Request) -> None:
        self.closed.append(request.request_id)

    def observe_step(self, report: StepReport) -> None:
        pass

    def run_deferred(self) -> None:
        pass

    def _tree(self, sequence: Sequence, limit: int) -> DraftTree:
        rng = self._rng
        states = [reduce(absorb, sequence.token_ids, begin(sequence.index))]
        tokens: list[int] = []
        parents: list[int] = []
        for node in range(rng.integers(0, min(limit, self._most_nodes) + 1)):
            parent = node - 1 if rng.random() < 0.6 else int(rng.integers(-1, node))
            state = states[parent + 1]
            token = token_of(state) if rng.random() < self._right else int(rng.integers(VOCAB))
            tokens.append(token)
            parents.append(parent)
            states.append(absorb(state, token))
        return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32))


@dataclass
class Asked:
    """What a drafter was asked about one sequence."""

    request_id: str
    sample_index: int
    num_prompt: int
    token_ids: list[int]
    max_nodes: int


class ChainDrafter:
    """Chains of `nodes` nodes, the first `right` of them right."""

    def __init__(self, nodes: int, right: int) -> None:
        self._nodes = nodes
        self._right = right
        self.idle = False
        self.asked: list[Asked] = []

    def propose(self, sequences: list[Sequence], limits: list[int], num_rows: int) -> DraftBatch:
        asked = [
            Asked(s.request.request_id, s.index, s.num_prompt_tokens, list(s.token_ids), limit)
            for s, limit in zip(sequences, limits)
        ]
        self.asked += asked
        return join_trees(chain(self._tokens(one)) for one in asked)

    def close(self, request: Request) -> None:
        pass

    def observe_step(self, report: StepReport) -> None:
        pass

    def run_deferred(self) -> None:
        pass

    def _tokens(self, asked: Asked) -> np.ndarray:
        tokens = list(asked.token_ids)
        for node in range(min(self._nodes, asked.max_nodes)):
            tokens.append((next_token(tokens, asked.sample_index) + (node >= self._right)) % VOCAB)
        return np.array(tokens[len(asked.token_ids) :], np.int32)


def record_steps(runner: Any) -> list[SchedulerOutput]:
    """All steps that the runner is given from now on."""
    steps: list[SchedulerOutput] = []
    launch: Callable[[SchedulerOutput], int] = runner.launch

    def recording(step: SchedulerOutput) -> int:
        steps.append(step)
        return launch(step)

    runner.launch = recording
    return steps


# -- random traffic -----------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    traffic=TRAFFIC,
    num_blocks=st.integers(18, 60),
    budget=st.integers(6, 60),
    prefix_caching=st.booleans(),
    seed=st.integers(0, 99),
    right=st.sampled_from([0.5, 0.8, 0.95]),
    idle=st.sampled_from([0.0, 0.0, 0.3]),
)
@example(  # three that outgrow the pool, beside stops and a fork
    traffic=[("long", 20, k, 24, 0, None) for k in (1, 2, 3)]
    + [("stop string", 20, 1, 24, 0, None), ("two", 20, 1, 24, 3, None)],
    num_blocks=18,
    budget=40,
    prefix_caching=True,
    seed=0,
    right=0.9,
    idle=0.0,
)
def test_the_same_outputs_as_without_drafts(
    traffic: list[tuple],
    num_blocks: int,
    budget: int,
    prefix_caching: bool,
    seed: int,
    right: float,
    idle: float,
) -> None:
    limits = {
        "num_blocks": num_blocks,
        "max_num_batched_tokens": budget,
        "max_num_seqs": 6,
        "prefix_caching": prefix_caching,
    }
    never_aborted = [(*item[:-1], None) for item in traffic]
    expected, _, _ = serve(never_aborted, False, **limits)
    drafter = TreeDrafter(seed, right, idle=idle)
    outputs, counters, served = serve(traffic, True, drafter=drafter, **limits)
    assert outputs.keys() == expected.keys()
    for name, completions in outputs.items():
        if completions[0][3] != "abort":
            assert completions == expected[name]
            continue
        ((_, token_ids, text, *_),) = completions
        ((_, all_ids, *_),) = expected[name]
        assert len(token_ids) > 0 and token_ids == all_ids[: len(token_ids)]
        assert text == "".join("abcde"[token % 5] for token in token_ids)
    assert served.runner.max_step_tokens <= budget
    assert sorted(drafter.closed) == sorted(outputs)
    if not any("beams" in kind or "ranked" in kind for kind, *_ in traffic):
        shown = sum(len(token_ids) for c in outputs.values() for _, token_ids, *_ in c)
        assert counters["generation_tokens"] == shown
    stats = served.scheduler.stats
    assert stats.num_accepted_tokens <= stats.num_draft_tokens
    assert (stats.num_drafts == 0) == (stats.num_draft_tokens == 0)


def test_the_example_preempts_accepts_and_moves_nodes() -> None:
    traffic = [("long", 20, kind, 24, 0, None) for kind in (1, 2, 3)]
    drafter = TreeDrafter(0, 0.9)
    limits = {"num_blocks": 18, "max_num_batched_tokens": 40}
    outputs, _, served = serve(traffic, True, drafter=drafter, **limits)
    stats = served.scheduler.stats
    assert stats.num_preemptions > 0 and served.runner.num_moved > 0
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 20
    assert all(len(token_ids) == 24 for ((_, token_ids, *_),) in outputs.values())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 999),
    kind=st.sampled_from([RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY]),
    stop=st.sampled_from([None, ["ab", "cde"], ["d"]]),
    include=st.booleans(),
    n=st.integers(1, 3),
    logprobs=st.sampled_from([None, 2]),
)
def test_streams_add_up_to_the_plain_output(
    seed: int,
    kind: RequestOutputKind,
    stop: list[str] | None,
    include: bool,
    n: int,
    logprobs: int | None,
) -> None:
    params = SamplingParams(
        n=n, max_tokens=25, stop=stop, include_stop_str_in_output=include, ignore_eos=True,
        logprobs=logprobs,
    )  # fmt: skip
    prompt = [seed % 50, seed // 50, 3]
    plain = run_all(make_engine(False), [make_request("a", prompt, params)])["a"]
    served = make_engine(False, drafter=TreeDrafter(seed, 0.95))
    served.engine.add_request(make_request("a", prompt, replace(params, output_kind=kind)))
    text, tokens, entries = [""] * n, [[] for _ in range(n)], [[] for _ in range(n)]
    counted = 0
    while served.engine.has_unfinished:
        before, outputs = counted, served.engine.step()
        counted = served.engine.metrics()["generation_tokens"]
        assert counted >= before  # dropped tokens were never shown, not even here
        for output in outputs:
            for completion in output.outputs:
                text[completion.index] += completion.text
                tokens[completion.index] += completion.token_ids
                entries[completion.index] += completion.logprobs or []
                if completion.finish_reason is not None:
                    expected = plain.outputs[completion.index]
                    assert completion.finish_reason == expected.finish_reason
                    assert completion.stop_reason == expected.stop_reason
    assert text == [c.text for c in plain.outputs]
    assert tokens == [c.token_ids for c in plain.outputs]
    assert entries == [c.logprobs or [] for c in plain.outputs]
    assert counted == sum(map(len, tokens))


# -- one step -----------------------------------------------------------------------------------


def test_the_arrays_of_a_drafted_step() -> None:
    class OneTree(ChainDrafter):
        def propose(
            self, sequences: list[Sequence], limits: list[int], num_rows: int
        ) -> DraftBatch:
            super().propose(sequences, limits, num_rows)
            right = next_token(sequences[0].token_ids)
            tokens = [(right + 1) % VOCAB, right, 9]
            tree = DraftTree(np.array(tokens, np.int32), np.array([-1, -1, 0], np.int32))
            return join_trees([tree, *[None] * (len(sequences) - 1)])

    drafter = OneTree(0, 0)
    scheduler, blocks, runner = make_scheduler(drafter=drafter, max_num_batched_tokens=12)
    first, second = (make_request(name, [1, 2, 3, i], GREEDY) for i, name in enumerate("ab"))
    scheduler.add_request(first)
    step = scheduler.schedule()
    assert step.drafts is None and drafter.asked == []  # nothing to draft for in a prompt
    scheduler.update(step, runner.run(step))
    scheduler.add_request(second)
    scheduler.add_request(make_request("c", [5] * 20, GREEDY))
    for counts in ([1, 4, 7], [1, 1, 10]):  # prompts come first and spend the budget
        step = scheduler.schedule()
        assert step.num_scheduled_tokens.tolist() == counts and step.drafts is None
        scheduler.update(step, runner.run(step))
    step = scheduler.schedule()
    assert step.num_scheduled_tokens.tolist() == [4, 1, 3]
    assert step.num_computed_tokens.tolist() == [6, 5, 17]
    assert step.drafts.counts.tolist() == [3, 0, 0]
    assert step.drafts.parents.tolist() == [-1, -1, 0]
    assert step.num_samples.tolist() == [1, 1, 1]
    known = first.sequences[0].token_ids.tolist()
    right = next_token(known)
    assert step.token_ids.tolist() == [known[-1], second.sequences[0].token_ids[-1], 5, 5, 5]
    assert step.drafts.token_ids.tolist() == [(right + 1) % VOCAB, right, 9]
    assert [(a.request_id, a.sample_index, a.num_prompt) for a in drafter.asked] == [
        ("a", 0, 4),
        ("b", 0, 4),
    ]
    assert drafter.asked[0].token_ids == known
    assert scheduler.schedule_ahead() is None
    output = runner.run(step)
    assert output.num_tokens == [2, 1, 1]
    scheduler.update(step, output)
    assert first.sequences[0].num_computed_tokens == 8 and len(first.sequences[0].token_ids) == 9
    assert second.sequences[0].num_computed_tokens == 6
    stats = scheduler.stats
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (1, 3, 1)
    scheduler.check_integrity()


@pytest.mark.parametrize("right", [0, 3, 5])
def test_steps_of_a_chain(right: int) -> None:
    served = make_engine(True, drafter=ChainDrafter(5, right))
    outputs = run_all(served, [make_request("a", [1, 2, 3], GREEDY)])
    assert outputs["a"].outputs[0].token_ids == expected_output([1, 2, 3], GREEDY)
    metrics = served.engine.metrics()
    # One token from the prompt, then right + 1 a step.
    assert metrics["num_steps"] == 1 + -(-19 // (right + 1))
    drafts = metrics["spec_decode_num_drafts"]
    assert drafts >= metrics["num_steps"] - 2  # all but the first step, and perhaps the last one
    assert metrics["spec_decode_num_accepted_tokens"] == 20 - metrics["num_steps"]
    assert 4 * drafts < metrics["spec_decode_num_draft_tokens"] <= 5 * drafts
    check_idle(served)


def test_a_draft_never_passes_the_length() -> None:
    drafter = ChainDrafter(MAX_NODES, MAX_NODES)
    served = make_engine(True, drafter=drafter, max_num_batched_tokens=128, max_model_len=96)
    params = replace(GREEDY, max_tokens=None)
    steps = record_steps(served.runner)
    outputs = run_all(served, [make_request("a", [1, 2, 3], params, 96)])
    assert outputs["a"].outputs[0].token_ids == expected_output(
        [1, 2, 3], replace(params, max_tokens=93)
    )
    assert [asked.max_nodes for asked in drafter.asked] == [MAX_NODES, 96 - 4 - 64 - 1]
    assert max(int((s.num_computed_tokens + s.num_scheduled_tokens).max()) for s in steps) == 95
    assert outputs["a"].outputs[0].finish_reason == "length"


def test_one_missing_token_gets_no_draft() -> None:
    drafter = ChainDrafter(4, 4)
    served = make_engine(True, drafter=drafter)
    run_all(served, [make_request("a", [1, 2, 3], replace(GREEDY, max_tokens=2))])
    assert drafter.asked == []


def test_the_budget_is_kept_in_order_of_admission() -> None:
    drafter = ChainDrafter(6, 6)
    scheduler, _, runner = make_scheduler(drafter=drafter, max_num_batched_tokens=12)
    for i in range(3):
        scheduler.add_request(make_request(str(i), [i, 2, 3], GREEDY))
    scheduler.update(step := scheduler.schedule(), runner.run(step))
    step = scheduler.schedule()
    assert [asked.max_nodes for asked in drafter.asked] == [9, 9, 9]
    assert step.num_scheduled_tokens.tolist() == [7, 4, 1]


@pytest.mark.parametrize(
    ("fields", "drafted"),
    [
        ({"presence_penalty": 0.5}, True),
        ({"logit_bias": {3: 1.0}}, True),
        ({"logprobs": 1}, True),
        ({"prompt_logprobs": 1}, True),
        ({"best_of": 2, "n": 1}, True),
        ({"min_tokens": 3, "ignore_eos": False}, True),
        ({"use_beam_search": True, "best_of": 2, "temperature": 0}, False),
    ],
)
def test_who_gets_drafts(fields: dict[str, Any], drafted: bool) -> None:
    """All sequences but beams, and also those that run beside beams."""
    drafter = ChainDrafter(4, 4)
    served = make_engine(True, drafter=drafter)
    steps = record_steps(served.runner)
    params = SamplingParams(**{"max_tokens": 6, "ignore_eos": True} | fields)
    outputs = run_all(
        served,
        [make_request("plain", [1, 2], GREEDY), make_request("other", [3, 4, 5], params)],
    )
    assert {asked.request_id for asked in drafter.asked} == {"plain", *["other"] * drafted}
    shared = [s for s in steps if s.drafts is not None and len(s.request_slots) > 1]
    assert shared and any((s.drafts.counts == 0).any() for s in shared) == (not drafted)
    assert outputs["plain"].outputs[0].token_ids == expected_output([1, 2], GREEDY)


def test_samples_get_drafts_once_they_have_forked() -> None:
    drafter = ChainDrafter(4, 4)
    served = make_engine(True, drafter=drafter)
    params = replace(GREEDY, n=3, temperature=1.0)
    outputs = run_all(served, [make_request("a", [7], params)])  # one token, like a decoding one
    for index, completion in enumerate(outputs["a"].outputs):
        assert completion.token_ids == expected_output([7], params, index)
    assert sorted(asked.sample_index for asked in drafter.asked[:3]) == [0, 1, 2]
    assert all(len(asked.token_ids) > 1 for asked in drafter.asked)
    assert served.engine.metrics()["num_steps"] < 20 / 3


# -- ends inside a draft ------------------------------------------------------------------------


def prompt_that_stops(after: int) -> list[int]:
    """A prompt whose continuation has its first EOS as token number `after`."""
    for first in range(1, 10000):
        prompt = [first % 50, first // 50]
        tokens = list(prompt)
        for _ in range(after):
            tokens.append(next_token(tokens))
        if EOS in tokens[2:] and tokens.index(EOS, 2) == 1 + after:
            return prompt
    raise AssertionError("no such prompt")


@pytest.mark.parametrize("after", [2, 4, 6, 7])
def test_tokens_behind_a_stop_token_are_dropped(after: int) -> None:
    served = make_engine(True, drafter=ChainDrafter(8, 8))
    params = replace(GREEDY, ignore_eos=False)
    prompt = prompt_that_stops(after)
    outputs = run_all(served, [make_request("a", prompt, params)])
    (completion,) = outputs["a"].outputs
    assert completion.token_ids == expected_output(prompt, params)
    assert len(completion.token_ids) == after and completion.finish_reason == "stop"
    metrics = served.engine.metrics()
    assert metrics["generation_tokens"] == after
    assert metrics["num_steps"] == 2
    # The prompt's step samples the first; the others were drafted, those behind do not count.
    assert metrics["spec_decode_num_accepted_tokens"] == after - 1
    check_idle(served)
    # Cached are the full blocks of the tokens that count, without the last one.
    again = make_request("b", [*prompt, *completion.token_ids, *range(1, 9)], GREEDY)
    outputs = run_all(served, [again])
    assert outputs["b"].num_cached_tokens == (2 + after - 1) // 8 * 8
    assert outputs["b"].outputs[0].token_ids == expected_output(again.prompt_token_ids, GREEDY)


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_a_stop_string_inside_a_draft_comes_before_a_later_end(ignore_eos: bool) -> None:
    """The stop string ends with the third node, the fifth is EOS."""
    prompts = ([first % 50, first // 50 % 50, first // 2500] for first in range(50000))
    prompt = next(
        prompt
        for prompt in prompts
        if (new := expected_output(prompt, replace(GREEDY, max_tokens=6)))[5] == EOS
        and EOS not in new[:5]
        and "".join("abcde"[token % 5] for token in new).find("ab") == 2
    )
    params = SamplingParams(temperature=0, max_tokens=20, stop=["ab"], ignore_eos=ignore_eos)
    served = make_engine(True, drafter=ChainDrafter(8, 8))
    outputs = run_all(served, [make_request("a", prompt, params)])
    (completion,) = outputs["a"].outputs
    assert completion.token_ids == expected_output(prompt, GREEDY)[:4]
    assert completion.text == "".join("abcde"[t % 5] for t in completion.token_ids[:2])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "ab")
    assert served.engine.metrics()["generation_tokens"] == 4
    check_idle(served)


def test_an_abort_in_flight_drops_a_drafts_tokens() -> None:
    drafter = ChainDrafter(4, 4)
    scheduler, blocks, runner = make_scheduler(drafter=drafter)
    requests = [make_request(name, [i, 2, 3], GREEDY) for i, name in enumerate("ab")]
    for request in requests:
        scheduler.add_request(request)
    scheduler.update(step := scheduler.schedule(), runner.run(step))
    step = scheduler.schedule()
    number = runner.launch(step)
    scheduler.abort("a")
    (touched,) = scheduler.update(step, runner.finish(number))
    assert touched.request is requests[1]
    assert touched.output_ids == expected_output([1, 2, 3], GREEDY)[:6]
    assert len(requests[0].sequences[0].output_ids) == 1
    assert scheduler.stats.num_drafts == 1 and scheduler.stats.generation_tokens == 1 + 6
    scheduler.check_integrity()


# -- blocks -------------------------------------------------------------------------------------


def test_a_draft_takes_no_block_that_a_sequence_may_need_next() -> None:
    drafter = ChainDrafter(30, 0)
    scheduler, blocks, runner = make_scheduler(
        num_blocks=5, block_size=4, max_model_len=20, drafter=drafter
    )
    request = make_request("a", [1, 2, 3, 4, 5], replace(GREEDY, max_tokens=15), 20)
    scheduler.add_request(request)
    scheduler.update(step := scheduler.schedule(), runner.run(step))
    assert blocks.num_free == 3
    step = scheduler.schedule()
    assert drafter.asked[0].max_nodes == 13
    assert blocks.num_free == 1
    assert step.num_scheduled_tokens.tolist() == [
        4 * 4 - 5
    ]  # root and nodes fill the blocks that are taken
    scheduler.update(step, runner.run(step))
    # The next draft reuses the blocks of the rejected nodes.
    step = scheduler.schedule()
    assert step.num_scheduled_tokens.tolist() == [4 * 4 - 6] and blocks.num_free == 1
    scheduler.update(step, runner.run(step))
    while (step := scheduler.schedule()) is not None:
        scheduler.update(step, runner.run(step))
        scheduler.check_integrity()
    assert request.sequences[0].output_ids == expected_output([1, 2, 3, 4, 5], request.params)
    assert scheduler.stats.num_preemptions == 0 and blocks.num_free == 5


def test_a_full_pool_drops_the_draft_but_not_the_token() -> None:
    drafter = ChainDrafter(4, 4)
    scheduler, blocks, runner = make_scheduler(
        num_blocks=2, block_size=4, max_model_len=8, drafter=drafter
    )
    request = make_request("a", [1, 2, 3], replace(GREEDY, max_tokens=5), 8)
    scheduler.add_request(request)
    scheduler.update(step := scheduler.schedule(), runner.run(step))
    step = scheduler.schedule()  # the last token of the first block; the second stays free
    assert drafter.asked[0].max_nodes == 3
    assert (
        step.num_scheduled_tokens.tolist() == [1] and step.drafts is None and blocks.num_free == 1
    )
    scheduler.update(step, runner.run(step))
    assert scheduler.schedule().num_scheduled_tokens.tolist() == [
        3
    ]  # its own block has room for both


def test_rejected_nodes_are_not_found_in_the_prefix_cache() -> None:
    served = make_engine(True, drafter=ChainDrafter(10, 4), block_size=4)
    prompt = [1, 2, 3]
    outputs = run_all(served, [make_request("a", prompt, GREEDY)])
    token_ids = outputs["a"].outputs[0].token_ids
    for length in range(5, 23):  # the model's own continuation, then what was drafted instead
        known = (prompt + token_ids)[:length]
        wrong = list(known)
        for _ in range(6):
            wrong.append((next_token(wrong) + 1) % VOCAB)
        request = make_request(f"b{length}", wrong, replace(GREEDY, max_tokens=3))
        last = run_all(served, [request])[request.request_id]
        assert last.outputs[0].token_ids == expected_output(wrong, request.params)
        assert last.num_cached_tokens == length // 4 * 4


# -- idle ---------------------------------------------------------------------------------------


def test_an_idle_drafter_lets_steps_run_ahead_and_comes_back() -> None:
    drafter = ChainDrafter(3, 3)
    served = make_engine(True, drafter=drafter)
    steps = record_steps(served.runner)
    served.engine.add_request(make_request("a", [1, 2, 3], GREEDY))
    served.engine.step()
    assert [s.num_scheduled_tokens.tolist() for s in steps] == [[3], [4]]
    drafter.idle = True
    for _ in range(3):
        served.engine.step()
    # A step without drafts once the drafted one's tokens are known, then two ahead.
    assert len(steps) == 5 and steps[2].token_ids[0] != LAST_SAMPLED
    assert [s.token_ids.tolist() for s in steps[3:]] == [[LAST_SAMPLED]] * 2
    assert len(drafter.asked) == 1
    drafter.idle = False
    served.engine.step()
    assert len(steps) == 6 and steps[5].drafts is not None  # behind the step ahead, not before
    assert steps[5].num_scheduled_tokens.tolist() == [4]
    last = {}
    while served.engine.has_unfinished:
        last |= {output.request_id: output for output in served.engine.step()}
    assert last["a"].outputs[0].token_ids == expected_output([1, 2, 3], GREEDY)
    check_idle(served)


def test_a_drafter_that_turns_idle_behind_a_drafted_step_does_not_let_one_run_ahead() -> None:
    drafter = ChainDrafter(3, 1)
    scheduler, _, runner = make_scheduler(drafter=drafter)
    scheduler.add_request(make_request("a", [1, 2, 3], GREEDY))
    scheduler.update(step := scheduler.schedule(), runner.run(step))
    step = scheduler.schedule()
    drafter.idle = True
    assert scheduler.schedule_ahead() is None
    scheduler.update(step, runner.run(step))
    assert scheduler.schedule().token_ids.tolist() == [expected_output([1, 2, 3], GREEDY)[2]]
    assert scheduler.schedule_ahead().token_ids.tolist() == [LAST_SAMPLED]


# -- a drafter's bugs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda asked, limits, _: join_trees([]), "answers every request"),
        (
            lambda asked, limits, _: join_trees([chain(np.zeros(limits[0] + 1, np.int32))]),
            "keeps to its limits",
        ),
    ],
)
def test_a_drafter_that_breaks_the_contract_is_noticed(answer: Any, message: str) -> None:
    drafter = ChainDrafter(1, 1)
    drafter.propose = answer
    served = make_engine(True, drafter=drafter)
    served.engine.add_request(make_request("a", [1, 2, 3], GREEDY))
    with pytest.raises(AssertionError, match=message):
        served.engine.step()


class SleepingChainDrafter(ChainDrafter):
    """Proposes once, then sleeps for some steps, and so on. `calls`: what is called, in order."""

    def __init__(self, sleep: int) -> None:
        super().__init__(2, 2)
        self._sleep = sleep
        self.num_to_sleep = 0
        self.calls: list[str] = []

    def propose(self, sequences: list[Sequence], limits: list[int], num_rows: int) -> DraftBatch:
        self.calls.append("propose")
        self.idle = True
        return super().propose(sequences, limits, num_rows)

    def observe_step(self, report: StepReport) -> None:
        self.calls.append("drafts" if report.proposed else "plain")

    def run_deferred(self) -> None:
        self.calls.append("run")
        self.num_to_sleep = self._sleep if self.idle else 0

    def wake(self, num_steps: int) -> None:
        self.calls.append(f"wake {num_steps}")
        self.idle, self.num_to_sleep = False, 0

    def prompts_started(self, sequences: list[Sequence]) -> None:
        self.calls.append("prompt")

    def close(self, request: Request) -> None:
        self.calls.append("close")


def test_a_drafter_that_sleeps_is_left_alone() -> None:
    drafter = SleepingChainDrafter(6)
    served = make_engine(False, drafter=drafter)
    served.engine.add_request(make_request("a", [1, 2, 3], GREEDY))
    for _ in range(2):  # the prompt, and a step with drafts
        served.engine.step()
    assert drafter.calls == ["prompt", "run", "propose", "drafts", "run"]
    drafter.calls.clear()
    for _ in range(6):
        served.engine.step()
    assert drafter.calls == ["plain", "wake 6"], "the last one is reported"
    served.engine.step()
    assert drafter.calls[2:] == ["propose", "drafts", "run"]


def test_a_prompt_and_an_end_wake_a_drafter() -> None:
    drafter = SleepingChainDrafter(100)
    served = make_engine(False, drafter=drafter)
    served.engine.add_request(make_request("a", [1, 2, 3], GREEDY))
    for _ in range(4):
        served.engine.step()
    drafter.calls.clear()
    served.engine.add_request(make_request("b", [4, 5], GREEDY))
    served.engine.step()
    assert drafter.calls[:2] == ["wake 2", "prompt"]
    served.engine.step()
    drafter.calls.clear()
    served.engine.abort("a")
    assert drafter.calls == ["wake 0", "close"]
