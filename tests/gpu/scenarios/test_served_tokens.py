"""What the GPU runner generates, judged token by token by transformers in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from hetero_llm import LLM, SamplingParams
from tests.gpu.scenarios.serving import (
    GREEDY,
    TIES,
    equal,
    generate,
    ragged,
    regrets,
    start,
    tokens_of,
)

MIXED = [GREEDY if i % 2 else replace(GREEDY, temperature=0.9, seed=1000 + i) for i in range(16)]

ENGINES: dict[str, dict[str, Any]] = {
    "whole prompts": {"max_num_batched_tokens": 4096},
    "chunks": {"max_num_batched_tokens": 48},
    "limits between buckets": {"max_num_batched_tokens": 50, "max_num_seqs": 10},
    "limits below the first buckets": {"max_num_batched_tokens": 3, "max_num_seqs": 3},
    "one sequence": {"max_num_seqs": 1},
    "blocks of 8": {"block_size": 8, "num_gpu_blocks_override": 1280},
    "no graphs": {"enforce_eager": True},
    "few blocks": {"num_gpu_blocks_override": 40},
    "few blocks, no prefix cache": {
        "num_gpu_blocks_override": 40,
        "enable_prefix_caching": False,
    },
}


@pytest.mark.parametrize("case", ENGINES)
def test_every_token_is_the_references_choice(case: str) -> None:
    few = case == "limits below the first buckets"  # hundreds of steps for longer prompts
    prompts = ragged(4 if few else 16)
    params = MIXED[: len(prompts)]
    with start(**ENGINES[case]) as llm:
        first = generate(llm, prompts, params)
        again = generate(llm, prompts, params)
        metrics = llm.metrics()
    for outputs in (first, again):
        found = regrets(outputs, params)
        assert len(found) == len(prompts) * GREEDY.max_tokens
        assert found.max() < TIES
    if "few blocks" in case:
        assert metrics["num_preemptions"] > 0
    else:
        assert [o.num_cached_tokens >= 16 for o in again] == [len(p) > 16 for p in prompts]
    assert metrics["kv_cache_usage_perc"] == 0.0


def test_more_draws_than_the_largest_graph_holds() -> None:
    prompts = [[5 + i % 4000] for i in range(300)]
    params = SamplingParams(n=2, seed=1, max_tokens=3, ignore_eos=True, detokenize=False)
    with start(
        max_model_len=64,
        max_num_seqs=1024,
        max_num_batched_tokens=1024,
        num_gpu_blocks_override=2048,
    ) as llm:
        together = tokens_of(generate(llm, prompts, params))
    with start(max_model_len=64) as llm:
        assert tokens_of(generate(llm, prompts, params)) == together
    assert {len(tokens) for tokens in together} == {3}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("budget", [64, 4096])
def test_half_precision_differs_at_near_ties_only(dtype: str, budget: int) -> None:
    with start(dtype=dtype, max_num_batched_tokens=budget) as llm:
        found = regrets(generate(llm, ragged(), MIXED), MIXED)
    assert (found < TIES).float().mean() > 0.95
    assert found.max() < 0.3


# -- draws --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[LLM]:
    with start() as llm:
        yield llm


def _draws() -> list[SamplingParams]:
    settings: list[dict[str, Any]] = [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 40},
        {"temperature": 1.0, "min_p": 0.05, "n": 2},
        {"temperature": 1.0, "top_k": 50, "top_p": 0.95},
        {"temperature": 0.0},
        {"temperature": 2.0, "top_k": 300, "top_p": 0.8, "min_p": 0.01},
        {"temperature": 1.0, "top_k": 1, "n": 3},
    ]
    seeds = (0, 1, 2**31, 2**63 + 5, 2**64 - 1)
    return [
        replace(GREEDY, **settings[i % len(settings)], seed=seeds[i % len(seeds)])
        for i in range(16)
    ]


def test_the_kernel_draws_what_the_torch_sampler_draws(engine: LLM) -> None:
    engine.reset_prefix_cache()
    by_kernel = tokens_of(generate(engine, ragged(), _draws()))
    engine.reset_prefix_cache()
    by_torch = generate(engine, ragged(), [replace(p, logprobs=1) for p in _draws()])
    assert tokens_of(by_torch) == by_kernel
    assert len({tuple(tokens) for tokens in by_kernel}) >= 16
    for output in by_torch:
        for completion in output.outputs:
            assert completion.logprobs is not None
            assert len(completion.logprobs) == len(completion.token_ids)


def test_a_draw_does_not_depend_on_its_neighbours(engine: LLM) -> None:
    engine.reset_prefix_cache()
    together = generate(engine, ragged(), _draws())
    for index in (0, 3, 6, 9):
        engine.reset_prefix_cache()
        (alone,) = generate(engine, [ragged()[index]], _draws()[index])
        assert tokens_of([alone]) == tokens_of([together[index]])


def test_penalties_beams_and_masks_are_those_of_the_cpu(engine: LLM) -> None:
    params = [
        replace(GREEDY, repetition_penalty=1.3),
        replace(GREEDY, temperature=0.8, seed=3, frequency_penalty=0.4, presence_penalty=0.2),
        replace(GREEDY, no_repeat_ngram_size=2, logit_bias={5: 2.0, 9: -3.0}),
        replace(GREEDY, allowed_token_ids=list(range(200, 900)), min_tokens=3),
        replace(GREEDY, use_beam_search=True, n=2, best_of=3),
        replace(GREEDY, temperature=1.0, seed=8, n=2, best_of=4),
    ]
    engine.reset_prefix_cache()
    ours = tokens_of(generate(engine, equal(6, 60), params))
    with start(device="cpu", batch_invariant=True) as cpu:
        assert tokens_of(generate(cpu, equal(6, 60), params)) == ours


def test_log_probabilities_are_the_references(engine: LLM) -> None:
    engine.reset_prefix_cache()
    params = replace(GREEDY, logprobs=3, prompt_logprobs=2)
    ours = generate(engine, ragged(8), params)
    with start(device="cpu", batch_invariant=True) as cpu:
        theirs = generate(cpu, ragged(8), params)
    compared = 0
    for mine, other in zip(ours, theirs, strict=True):
        entries = [*mine.prompt_logprobs[1:], *mine.outputs[0].logprobs]
        expected = [*other.prompt_logprobs[1:], *other.outputs[0].logprobs]
        for entry, wanted in zip(entries, expected, strict=True):
            for token in entry.keys() & wanted.keys():
                assert entry[token].logprob == pytest.approx(wanted[token].logprob, abs=TIES)
                compared += 1
    assert compared > 2 * sum(len(p) for p in ragged(8))
