"""Captured graphs and steps launched ahead change nothing: same tokens, same cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from hetero_llm import LLM, SamplingParams
from hetero_llm.core.outputs import RequestOutput
from hetero_llm.demo_models import heldout_prompts
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.inputs.input_processor import Prompt
from tests.gpu.scenarios.serving import GREEDY, equal, generate, ragged, runner_of, start, tokens_of

LONG = replace(GREEDY, max_tokens=40)
NOISY = replace(LONG, temperature=1.0)

# -- graphs -------------------------------------------------------------------------------------


def lockstep(batch: int, rows: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that fill the first step and then decode side by side: every step is as large as a
    graph, so no padding takes other kernels."""
    prompts = heldout_prompts().prompts[:batch, 300 : 300 + rows // batch].tolist()
    kinds = [
        LONG,
        replace(NOISY, seed=batch),
        replace(NOISY, top_p=0.9, top_k=60, seed=7),
        replace(NOISY, min_p=0.02, seed=8),
    ]
    return prompts, [kinds[i % 4] for i in range(batch)]


# Of 16 bits, chunks from 32 rows on are attended by the library in eager steps.
@pytest.mark.parametrize(("dtype", "rows"), [("float32", 64), ("bfloat16", 16), ("float16", 16)])
def test_graphs_give_the_bits_of_eager_steps(dtype: str, rows: int) -> None:
    tokens: dict[bool, list[Any]] = {}
    caches: dict[bool, torch.Tensor] = {}
    for eager in (True, False):
        with start(dtype=dtype, enforce_eager=eager, max_num_batched_tokens=rows) as llm:
            runner = runner_of(llm)
            assert (runner.graphs is None) == eager
            tokens[eager] = [
                tokens_of(generate(llm, *lockstep(batch, rows))) for batch in (1, 8, 16)
            ]
            # A prompt in many chunks, then decoding with its attention cut into pieces.
            tokens[eager].append(tokens_of(generate(llm, equal(1, 400), LONG)))
            caches[eager] = runner.cache.data.clone()
    assert tokens[False] == tokens[True]
    assert len({tuple(t) for t in tokens[True][2]}) >= 12
    used = caches[True].flatten(1).ne(0).any(1)
    assert used.sum() >= 439 // 16
    assert torch.equal(caches[False][used], caches[True][used])


def test_padded_graphs_give_the_tokens_of_eager_steps() -> None:
    params = [replace(NOISY, seed=i, top_p=0.95) if i % 3 else LONG for i in range(13)]
    found = []
    for eager in (True, False):
        with start(enforce_eager=eager, max_num_batched_tokens=200, max_num_seqs=13) as llm:
            found.append(tokens_of(generate(llm, ragged(13), params)))
    assert found[0] == found[1]


def test_every_bucket_is_captured() -> None:
    with start(max_num_batched_tokens=512) as llm:
        graphs = runner_of(llm).graphs.captured
        for bucket in (1, 2, 4, 8, 16):
            assert ("decode", bucket) in graphs and ("head", bucket) in graphs
        for bucket in (1, 64, 80, 128, 160, 256, 320, 512):
            assert ("model", bucket) in graphs
        assert ("decode", 24) not in graphs


# -- stepping -----------------------------------------------------------------------------------

PLAIN: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 40},
    {"temperature": 0, "max_tokens": 60, "stop": ["\n"]},
    {"temperature": 1.0, "top_p": 0.9, "seed": 3, "max_tokens": 30},
    {"temperature": 1.0, "top_k": 20, "seed": 2**63 + 5, "n": 2, "stop": ["e", "return"]},
    {"temperature": 0, "max_tokens": 50, "stop_token_ids": list(range(200, 700)), "seed": 1},
    {"temperature": 0.8, "min_p": 0.05, "n": 3, "seed": 9, "max_tokens": 12},
    {"temperature": 0, "max_tokens": 1},
    {"temperature": 0.7, "seed": 4, "max_tokens": 33, "ignore_eos": True},
    {"temperature": 1.0, "seed": 5, "max_tokens": 64, "include_stop_str_in_output": True}
    | {"stop": ["):", "self"]},
]
LOOKING_BACK: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 20, "repetition_penalty": 1.3},
    {"temperature": 0, "max_tokens": 6, "prompt_logprobs": 1},
    {"temperature": 0.7, "seed": 4, "max_tokens": 15, "logprobs": 2, "stop": [" "]},
    {"temperature": 0, "max_tokens": 8, "use_beam_search": True, "n": 2, "best_of": 2},
    {"temperature": 1.0, "seed": 6, "max_tokens": 9, "n": 1, "best_of": 3},
]
TRAFFIC = {"plain": PLAIN, "mixed": PLAIN[:6] + LOOKING_BACK}
POOLS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "few blocks": {"num_gpu_blocks_override": 36, "max_num_batched_tokens": 40},
}


@dataclass
class Recorder:
    """A runner that counts steps, and those launched while another one was under way."""

    runner: Any
    under_way: int = 0
    launched: int = 0
    ahead: int = 0

    def launch(self, step: Any) -> Any:
        self.launched += 1
        self.ahead += self.under_way > 0
        self.under_way += 1
        return self.runner.launch(step)

    def finish(self, pending: Any) -> Any:
        self.under_way -= 1
        return self.runner.finish(pending)


def seen(output: RequestOutput) -> list[Any]:
    return [(c.index, c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in output.outputs]


def serve(
    llm: LLM, kinds: list[dict[str, Any]], *, asynchronous: bool
) -> tuple[dict[str, list[Any]], Recorder]:
    """24 requests, eight at once, every end making room for another; some are aborted.

    Returns:
        What each request ended with.
    """
    parts = llm.engine
    recorder = Recorder(parts.runner)
    engine: Engine = Engine(
        parts.input_processor,
        parts.scheduler,
        recorder,
        parts.output_processor,
        asynchronous=asynchronous,
    )
    engine.reset_prefix_cache()
    prompts = ragged(8)
    requests = []
    for number in range(24):
        params = SamplingParams(**kinds[number % len(kinds)])
        prompt = Prompt(token_ids=prompts[number * 3 % 8])
        requests.append(engine.make_request(str(number), prompt, params))
    abort_at = {str(number): 5 + number % 7 for number in (0, 7, 9, 16, 18)}
    for request in requests[:8]:
        engine.add_request(request)
    waiting = requests[8:]
    last: dict[str, list[Any]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            assert output.request_id not in last, "an output after the last one"
            due = len(output.outputs[0].token_ids) == abort_at.get(output.request_id)
            if due and not output.finished:
                aborted = engine.abort(output.request_id)
                assert aborted is not None
                output = aborted
            if output.finished:
                last[output.request_id] = seen(output)
                if waiting:
                    engine.add_request(waiting.pop(0))
    assert len(last) == 24
    assert engine.step() == [] and engine.step() == []  # a stray step ends in silence
    assert recorder.under_way == 0
    parts.scheduler.check_integrity()
    assert engine.metrics()["kv_cache_usage_perc"] == 0.0
    return last, recorder


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("traffic", TRAFFIC)
def test_steps_launched_ahead_give_the_same_outputs(traffic: str, pool: str) -> None:
    with start(**POOLS[pool]) as llm:
        expected, recorder = serve(llm, TRAFFIC[traffic], asynchronous=False)
        assert recorder.ahead == 0
        outputs, recorder = serve(llm, TRAFFIC[traffic], asynchronous=True)
        assert recorder.ahead > (0.3 if traffic == "plain" else 0.0) * recorder.launched
        if pool == "few blocks":
            assert llm.metrics()["num_preemptions"] > 0
    assert outputs == expected
    reasons = {ending[3] for endings in outputs.values() for ending in endings}
    assert reasons >= {"stop", "length", "abort"}


def test_half_precision_steps_ahead_give_the_same_tokens() -> None:
    found = []
    with start(dtype="bfloat16") as llm:
        engine = llm.engine
        assert engine.asynchronous
        for asynchronous in (False, True):
            engine.asynchronous = asynchronous
            llm.reset_prefix_cache()
            found.append([tokens_of(generate(llm, *lockstep(batch, 64))) for batch in (1, 8, 16)])
            assert engine.step() == []  # finishes a step of ended requests that was launched ahead
    assert found[0] == found[1]


# -- streams ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[LLM]:
    with start() as llm:
        yield llm


def test_streams_side_by_side_and_one_given_up(engine: LLM) -> None:
    prompts = equal(3, 30)
    params = [replace(LONG, max_tokens=n) for n in (40, 40, 25)]
    expected = tokens_of(generate(engine, prompts, params))
    streams = [
        engine.stream({"prompt_token_ids": prompt}, wanted)
        for prompt, wanted in zip(prompts, params, strict=True)
    ]
    last: list[list[int]] = [[], [], []]
    for turn in range(40):
        for index, stream in enumerate(streams):
            if index == 1 and turn == 6:
                stream.close()
            output = next(stream, None)
            if output is not None:
                last[index] = output.outputs[0].token_ids
    assert last[0] == expected[0] and last[2] == expected[2]
    assert last[1] == expected[1][:6]
    metrics = engine.metrics()
    assert metrics["num_requests_running"] == 0 and metrics["kv_cache_usage_perc"] == 0.0
    assert tokens_of(generate(engine, prompts, params)) == expected


def test_a_stream_goes_on_beside_a_generate_call(engine: LLM) -> None:
    prompts = equal(2, 50)
    expected = tokens_of(generate(engine, prompts, LONG))
    stream = engine.stream({"prompt_token_ids": prompts[0]}, LONG)
    for _ in range(3):
        next(stream)
    assert tokens_of(generate(engine, [prompts[1]], LONG)) == [expected[1]]
    *_, last = stream
    assert last.finished and last.outputs[0].token_ids == expected[0]
