"""The torch path on CUDA, `batch_invariant=True`: the same tokens as on the CPU, whatever the
batch, the pool and preemption; and the size of the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from hetero_llm import LLM, RequestOutput, SamplingParams
from hetero_llm.demo_models import heldout_prompts
from hetero_llm.sampling.noise import gumbel_noise

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)


def prompts(count: int = 16) -> list[list[int]]:
    rows = heldout_prompts().prompts
    return [rows[2 * i, : 8 + 24 * i].tolist() for i in range(count)]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [c.token_ids for o in outputs for c in o.outputs]


def run(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return tokens_of(
        llm.generate(prompt_token_ids=prompts(), sampling_params=params, use_tqdm=False)
    )


@pytest.fixture(scope="module")
def invariant() -> Iterator[LLM]:
    with LLM(
        "demo", dtype="float32", device="cuda", batch_invariant=True, num_gpu_blocks_override=2048
    ) as llm:
        yield llm


def test_fp32_tokens_are_the_cpus(invariant: LLM) -> None:
    with LLM("demo", dtype="float32", device="cpu", batch_invariant=True) as cpu:
        assert run(cpu) == run(invariant)


def test_sampled_tokens_are_the_cpus(invariant: LLM) -> None:
    params = dataclasses.replace(GREEDY, temperature=0.8, top_p=0.95, n=2, seed=5, max_tokens=12)
    with LLM("demo", dtype="float32", device="cpu", batch_invariant=True) as cpu:
        assert run(cpu, params) == run(invariant, params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_invariant_results_do_not_depend_on_the_batch(dtype: str) -> None:
    # Invariant products of half types are slow on a GPU: a few tokens have to do.
    params = dataclasses.replace(GREEDY, logprobs=1, max_tokens=24 if dtype == "float32" else 6)
    with LLM(
        "demo", dtype=dtype, device="cuda", batch_invariant=True, num_gpu_blocks_override=2048
    ) as llm:
        together = llm.generate(prompt_token_ids=prompts(8), sampling_params=params, use_tqdm=False)
        llm.reset_prefix_cache()
        for prompt, expected in zip(prompts(8), together, strict=True):
            (alone,) = llm.generate(
                prompt_token_ids=[prompt], sampling_params=params, use_tqdm=False
            )
            assert alone.outputs[0].token_ids == expected.outputs[0].token_ids
            assert alone.outputs[0].logprobs == expected.outputs[0].logprobs


def test_preemption_does_not_change_tokens(invariant: LLM) -> None:
    expected = run(invariant)
    with LLM(
        "demo",
        dtype="float32",
        device="cuda",
        batch_invariant=True,
        max_model_len=512,
        num_gpu_blocks_override=48,
    ) as small:
        assert run(small) == expected
        assert small.metrics()["num_preemptions"] > 0


def test_beams_and_penalties_run(invariant: LLM) -> None:
    beams = SamplingParams(use_beam_search=True, n=2, best_of=4, temperature=0, max_tokens=12)
    penalties = SamplingParams(
        temperature=0.7,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        top_k=20,
        min_p=0.02,
        seed=1,
        max_tokens=12,
        no_repeat_ngram_size=3,
        logit_bias={5: 1.0},
        min_tokens=3,
    )
    with LLM("demo", dtype="float32", device="cpu", batch_invariant=True) as cpu:
        for params in (beams, penalties):
            assert run(cpu, params) == run(invariant, params)


def test_noise_has_the_cpus_bits_up_to_the_logarithm() -> None:
    rows = torch.arange(64)
    on_cpu = gumbel_noise(rows, rows * 3, rows % 5, 4096)
    on_gpu = gumbel_noise(rows.cuda(), rows.cuda() * 3, rows.cuda() % 5, 4096).cpu()
    torch.testing.assert_close(on_cpu, on_gpu, rtol=1e-5, atol=1e-5)
