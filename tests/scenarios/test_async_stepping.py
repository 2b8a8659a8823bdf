"""The next step is launched before the last one's tokens are known, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hetero_llm import LLM, SamplingParams
from hetero_llm.core.errors import EngineDeadError
from hetero_llm.core.request import FinishReason
from hetero_llm.core.step import LAST_SAMPLED
from hetero_llm.demo_models import heldout_prompts
from hetero_llm.engine.engine import Engine
from tests.helpers.harness import (
    EOS,
    AsyncStepper,
    expected_output,
    make_request,
    make_scheduler,
    next_token,
)
from tests.helpers.traffic import TRAFFIC, check_idle, make_engine, run_all, serve

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)


def launched_ahead(events: list[str]) -> list[int]:
    """Numbers of the steps that were launched before the one before was finished."""
    numbers = (int(event.split()[1]) for event in events if event.startswith("launch"))
    return [
        n for n in numbers if n and events.index(f"launch {n}") < events.index(f"finish {n - 1}")
    ]


# -- random traffic -----------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    traffic=TRAFFIC,
    num_blocks=st.integers(18, 60),
    budget=st.integers(6, 40),
    prefix_caching=st.booleans(),
)
@example(  # three that outgrow the pool, beside stops and a fork
    traffic=[("long", 20, k, 24, 0, None) for k in (1, 2, 3)]
    + [("stop string", 20, 1, 24, 0, None), ("two", 20, 1, 24, 3, None)],
    num_blocks=18,
    budget=12,
    prefix_caching=True,
)
def test_the_same_outputs_as_synchronously(
    traffic: list[tuple], num_blocks: int, budget: int, prefix_caching: bool
) -> None:
    limits = {
        "num_blocks": num_blocks,
        "max_num_batched_tokens": budget,
        "max_num_seqs": 6,
        "prefix_caching": prefix_caching,
    }
    outputs, counters, _ = serve(traffic, False, **limits)
    async_outputs, async_counters, served = serve(traffic, True, **limits)
    assert async_outputs == outputs
    assert async_counters == counters
    assert served.runner.max_step_tokens <= budget


def test_the_example_preempts_and_steps_ahead_all_the_same() -> None:
    traffic = [("long", 20, kind, 24, 0, None) for kind in (1, 2, 3)]
    _, _, served = serve(traffic, True, num_blocks=18, max_num_batched_tokens=12)
    assert served.engine.metrics()["num_preemptions"] > 0
    assert len(launched_ahead(served.runner.events)) > served.engine.metrics()["num_steps"] / 2


# -- one step after another ---------------------------------------------------------------------


def test_each_step_is_launched_before_the_last_is_finished_and_no_token_is_wasted() -> None:
    served = make_engine(True, max_num_batched_tokens=16)
    prompt = list(range(1, 41))
    outputs = run_all(served, [make_request("a", prompt, GREEDY)])
    assert outputs["a"].outputs[0].token_ids == expected_output(prompt, GREEDY)
    steps = 3 + 9  # chunks of the prompt, then a step for every token but the last
    expected = ["launch 0"]
    for number in range(1, steps):
        expected += [f"launch {number}", f"finish {number - 1}"]
    assert served.runner.events == [*expected, f"finish {steps - 1}"]
    assert served.runner.num_tokens_run == 40 + 9
    assert served.engine.metrics()["num_steps"] == steps
    check_idle(served)


def prompt_that_stops(after: int) -> list[int]:
    """A prompt whose greedy continuation has its first EOS as token number `after`."""
    for first in range(1, 10000):
        prompt = [first % 50, first // 50]
        tokens = list(prompt)
        while len(tokens) < 2 + after and (len(tokens) == 2 or tokens[-1] != EOS):
            tokens.append(next_token(tokens))
        if tokens.index(EOS, 2) == 1 + after if EOS in tokens[2:] else False:
            return prompt
    raise AssertionError("no such prompt")


@pytest.mark.parametrize("after", [2, 7, 8])  # 6 + 2: the stray token would fill a block
def test_a_stop_token_costs_one_stray_token_that_is_never_shown(after: int) -> None:
    served = make_engine(True)
    prompt = prompt_that_stops(after)
    params = SamplingParams(temperature=0, max_tokens=30, detokenize=False)
    outputs = run_all(served, [make_request("a", prompt, params)])
    (completion,) = outputs["a"].outputs
    assert completion.token_ids == expected_output(prompt, params)
    assert completion.token_ids[-1] == EOS and completion.finish_reason == "stop"
    assert served.engine.metrics()["generation_tokens"] == after
    assert served.blocks.num_free == served.blocks.num_blocks
    check_idle(served)
    assert served.runner.num_tokens_run == 2 + (after - 1) + 1


def test_a_stray_token_is_not_cached() -> None:
    """The stray token fills a block; a later prompt with these very tokens must not find it."""
    served = make_engine(True)
    params = SamplingParams(temperature=0, max_tokens=30, detokenize=False)
    prompt = prompt_that_stops(6)
    run_all(served, [make_request("a", prompt, params)])
    again = make_request("b", [*prompt, *expected_output(prompt, params), 9], GREEDY)
    assert len(again.prompt_token_ids) == 9  # one full block of 8, its last token by the stray one
    outputs = run_all(served, [again])
    assert outputs["b"].num_cached_tokens == 0
    assert outputs["b"].outputs[0].token_ids == expected_output(again.prompt_token_ids, GREEDY)


def test_blocks_and_slot_of_a_stray_token_serve_the_next_request_at_once() -> None:
    served = make_engine(True, num_blocks=2, max_num_seqs=1, max_model_len=16)
    params = SamplingParams(temperature=0, max_tokens=14, detokenize=False)
    stopping = prompt_that_stops(7)
    other = list(range(5, 15))
    short = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    requests = [make_request("a", stopping, params, 16), make_request("b", other, short, 16)]
    outputs = run_all(served, requests)
    assert outputs["a"].outputs[0].token_ids == expected_output(stopping, params)
    assert outputs["b"].outputs[0].token_ids == expected_output(other, short)
    events = served.runner.events  # b was launched while a's stray token was in flight
    assert events[events.index("launch 8") + 1] == "finish 7"
    check_idle(served)


def test_a_pending_step_of_ended_sequences_ends_silently_and_the_next_request_works() -> None:
    served = make_engine(True)
    engine = served.engine
    engine.add_request(make_request("a", [1, 2, 3], GREEDY))
    engine.step()
    last = engine.abort("a")
    assert last is not None and last.outputs[0].finish_reason == "abort"
    assert last.outputs[0].token_ids == expected_output([1, 2, 3], GREEDY)[:1]
    assert not engine.has_unfinished
    assert served.blocks.num_free == served.blocks.num_blocks
    # Straight into the pending step, then after it.
    for name in ("b", "c"):
        outputs = run_all(served, [make_request(name, [4, 5, 6], GREEDY)])
        assert outputs[name].outputs[0].token_ids == expected_output([4, 5, 6], GREEDY)
        check_idle(served)


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.5},
        {"stop_token_ids": [0]},  # which min_tokens forbids at first
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [3, 4]},
        {"no_repeat_ngram_size": 2},
        {"logits_processors": [lambda ids, logits: logits]},
        {"ignore_eos": False},  # EOS, too
        {"use_beam_search": True, "best_of": 2, "temperature": 0},
    ],
)
def test_while_a_request_looks_back_no_step_is_ahead(fields: dict[str, Any]) -> None:
    served = make_engine(True)
    engine, events = served.engine, served.runner.events
    engine.add_request(make_request("plain", [1, 2], replace(GREEDY, max_tokens=16)))
    engine.step()
    assert events == ["launch 0", "launch 1", "finish 0"]
    params = SamplingParams(**{"max_tokens": 5, "min_tokens": 2, "ignore_eos": True} | fields)
    engine.add_request(make_request("looks back", [3, 4], params))
    finished: set[str] = set()
    while "looks back" not in finished:
        finished |= {output.request_id for output in engine.step() if output.finished}
    assert launched_ahead(events) == [1]
    alone = len(events) // 2
    while "plain" not in finished:
        finished |= {output.request_id for output in engine.step() if output.finished}
    assert launched_ahead(events) == [1, *range(alone + 1, len(events) // 2)]
    check_idle(served)


def test_blocks_that_run_out_ahead_preempt_no_sequence_before_the_tokens_are_known() -> None:
    scheduler, _, runner = make_scheduler(num_blocks=4, block_size=4, max_model_len=16)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    requests = [
        make_request(name, [i, 2, 3, 4, 5, 6, 7], params, 16) for i, name in enumerate("ab")
    ]
    for request in requests:
        scheduler.add_request(request)
    step = scheduler.schedule()  # 7 tokens each: 2 blocks each, the pool is full
    number = runner.launch(step)
    ahead = scheduler.schedule_ahead()  # the 8th still fits
    assert ahead.token_ids.tolist() == [LAST_SAMPLED, LAST_SAMPLED]
    runner.launch(ahead)
    scheduler.update(step, runner.finish(number))
    assert scheduler.schedule_ahead() is None  # the 9th does not
    assert scheduler.stats.num_preemptions == 0
    scheduler.update(ahead, runner.finish(number + 1))
    assert [len(r.sequences[0].output_ids) for r in requests] == [2, 2]
    stepper = AsyncStepper(scheduler, runner)
    while stepper.step():
        pass
    assert scheduler.stats.num_preemptions > 0
    for request in requests:
        (sequence,) = request.sequences
        assert sequence.output_ids == expected_output(request.prompt_token_ids, params)


def test_a_result_of_an_earlier_epoch_is_dropped_even_in_the_same_slot() -> None:
    scheduler, blocks, runner = make_scheduler(max_num_seqs=1)
    scheduler.add_request(make_request("a", [1, 2, 3], GREEDY))
    step = scheduler.schedule()
    number = runner.launch(step)
    scheduler.abort("a")
    other = make_request("b", [4, 5, 6], GREEDY)
    scheduler.add_request(other)
    ahead = scheduler.schedule_ahead()
    assert ahead.request_slots.tolist() == step.request_slots.tolist()
    assert ahead.num_computed_tokens.tolist() == step.num_computed_tokens.tolist()
    runner.launch(ahead)
    assert scheduler.update(step, runner.finish(number)) == []
    assert other.sequences[0].output_ids == []
    scheduler.update(ahead, runner.finish(number + 1))
    assert other.sequences[0].output_ids == expected_output([4, 5, 6], GREEDY)[:1]
    scheduler.abort("b")
    assert scheduler.stats.generation_tokens == 1
    assert blocks.num_free == blocks.num_blocks
    scheduler.check_integrity()


def test_an_ahead_step_admits_no_synchronous_request() -> None:
    scheduler, _, runner = make_scheduler()
    penalty = replace(GREEDY, presence_penalty=1.0)
    requests = [make_request("plain", [1, 2], GREEDY), make_request("late", [3, 4], GREEDY)]
    requests.append(make_request("looks back", [5, 6], penalty))
    scheduler.add_request(requests[0])
    step = scheduler.schedule()
    number = runner.launch(step)
    for request in requests[1:]:
        scheduler.add_request(request)
    ahead = scheduler.schedule_ahead()
    assert [state.params for state in ahead.admitted] == [GREEDY]
    runner.launch(ahead)
    scheduler.update(step, runner.finish(number))
    assert scheduler.schedule_ahead() is None  # now it is the next to come
    scheduler.update(ahead, runner.finish(number + 1))
    assert [state.params for state in scheduler.schedule().admitted] == [penalty]


def test_a_prompt_that_forks_joins_one_step_later() -> None:
    served = make_engine(True)
    params = SamplingParams(n=3, max_tokens=6, ignore_eos=True, detokenize=False)
    prompt = [7, 8, 9]
    requests = [make_request("a", prompt, params), make_request("b", [1, 2], GREEDY)]
    scheduler, runner = served.scheduler, served.runner
    for request in requests:
        scheduler.add_request(request)
    step = scheduler.schedule()
    launched = [runner.launch(step)]
    ahead = scheduler.schedule_ahead()
    assert ahead.request_slots.tolist() == [requests[1].sequences[0].request_slot]
    launched.append(runner.launch(ahead))
    scheduler.update(step, runner.finish(launched[0]))
    third = scheduler.schedule_ahead()
    assert third.token_ids.tolist() == [
        *(s.token_ids[-1] for s in requests[0].sequences),
        LAST_SAMPLED,
    ]
    launched.append(runner.launch(third))
    scheduler.update(ahead, runner.finish(launched[1]))
    scheduler.update(third, runner.finish(launched[2]))
    stepper = AsyncStepper(scheduler, runner)
    while stepper.step():
        pass
    for index, sequence in enumerate(requests[0].sequences):
        assert sequence.output_ids == expected_output(prompt, params, index)
        assert sequence.finish_reason is FinishReason.LENGTH


def test_a_failed_step_kills_the_engine() -> None:
    served = make_engine(True)
    served.engine.add_request(make_request("a", [1, 2, 3], GREEDY))
    served.engine.step()
    served.runner.memory[:] = 7  # the fake runner notices
    with pytest.raises(AssertionError, match="KV is not"):
        served.engine.step()
    with pytest.raises(EngineDeadError, match="KV is not"):
        served.engine.step()


# -- the demo model -----------------------------------------------------------------------------


def test_the_demo_model_gives_the_same_tokens() -> None:
    torch.set_num_threads(1)  # such small products gain nothing from more
    rows = heldout_prompts().prompts
    plain = SamplingParams(temperature=0, max_tokens=12)
    kinds = [
        plain,
        SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=12, logprobs=2),
        SamplingParams(temperature=0, max_tokens=20, stop=["\n"]),
        SamplingParams(n=3, seed=1, max_tokens=8, stop=["e"]),
        SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=1),
        SamplingParams(temperature=0, max_tokens=6, repetition_penalty=1.3),
        SamplingParams(use_beam_search=True, n=2, best_of=2, temperature=0, max_tokens=5),
    ]
    with LLM(
        "demo",
        dtype="float32",
        device="cpu",
        batch_invariant=True,
        max_model_len=256,
        num_gpu_blocks_override=20,
        max_num_seqs=8,
        max_num_batched_tokens=48,
    ) as llm:
        parts = llm.engine
        results = []
        for asynchronous in (False, True):
            engine = Engine(
                parts.input_processor,
                parts.scheduler,
                parts.runner,
                parts.output_processor,
                asynchronous=asynchronous,
            )
            engine.reset_prefix_cache()
            results.append(_demo_outputs(engine, rows, kinds))
            assert not engine.has_unfinished and engine.step() == []
            assert engine.metrics()["kv_cache_usage_perc"] == 0.0
    assert results[0] == results[1]
    assert {c[1] for output in results[0].values() for c in output[0]} >= {
        "stop",
        "length",
        "abort",
    }


def _demo_outputs(engine: Engine, rows: Any, kinds: list[SamplingParams]) -> dict[str, Any]:
    """Tokens, ends and log-probabilities by request; request 0 is aborted at its fifth token."""
    from hetero_llm.engine.inputs.input_processor import Prompt

    for index, params in enumerate(kinds):
        ids = rows[index, : 20 + 9 * index].tolist()
        engine.add_request(engine.make_request(str(index), Prompt(token_ids=ids), params))
    results: dict[str, Any] = {}
    while engine.has_unfinished:
        for output in engine.step():
            if output.request_id == "0" and len(output.outputs[0].token_ids) == 5:
                aborted = engine.abort("0")
                assert aborted is not None
                output = aborted
            if output.finished:
                results[output.request_id] = (
                    [(c.token_ids, c.finish_reason, c.text, c.logprobs) for c in output.outputs],
                    output.prompt_logprobs,
                )
    return results
