"""The demo target through the engine writes what transformers' `generate` writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hetero_llm import LLM, RequestOutput, SamplingParams
from hetero_llm.demo_models import demo_folder, heldout_prompts

COUNT = 18
NEW_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Held-out prompts cut to mixed lengths from 8 to 256 tokens."""
    lengths = np.random.default_rng(0).permutation(np.linspace(8, 256, COUNT).astype(int))
    rows = heldout_prompts().prompts
    return [rows[3 * i, :n].tolist() for i, n in enumerate(lengths)]


@pytest.fixture(scope="module")
def reference() -> Any:
    folder = demo_folder("demo")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def expected(reference: Any, prompts: list[list[int]]) -> list[list[int]]:
    with torch.inference_mode():
        outputs = [
            reference.generate(
                torch.tensor([p]),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                eos_token_id=-1,
                pad_token_id=0,
            )
            for p in prompts
        ]
    return [o[0, len(p) :].tolist() for o, p in zip(outputs, prompts, strict=True)]


@pytest.fixture(scope="module")
def invariant() -> Iterator[LLM]:
    with LLM("demo", dtype="float32", device="cpu", batch_invariant=True) as llm:
        yield llm


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


def test_batch_invariant_text_is_exactly_transformers_alone(
    invariant: LLM, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    alone = [
        tokens_of(invariant.generate(prompt_token_ids=[p], sampling_params=GREEDY, use_tqdm=False))
        for p in prompts[::3]
    ]
    assert [tokens for (tokens,) in alone] == expected[::3]


def test_batch_invariant_text_is_exactly_transformers_in_batches_of_16(
    invariant: LLM, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    invariant.reset_prefix_cache()
    got: list[list[int]] = []
    for first in range(0, COUNT, 16):
        batch = prompts[first : first + 16]
        got += tokens_of(
            invariant.generate(prompt_token_ids=batch, sampling_params=GREEDY, use_tqdm=False)
        )
    assert got == expected


def test_without_invariance_only_near_ties_differ(
    reference: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with LLM("demo", dtype="float32", device="cpu") as llm:
        got = tokens_of(
            llm.generate(prompt_token_ids=prompts, sampling_params=GREEDY, use_tqdm=False)
        )
    for prompt, ours, theirs in zip(prompts, got, expected, strict=True):
        if ours == theirs:
            continue
        at = next(i for i in range(NEW_TOKENS) if ours[i] != theirs[i])
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + theirs[:at]])).logits[0, -1]
        gap = float(logits[theirs[at]] - logits[ours[at]])
        two_ulp = 2 * float(torch.finfo(torch.float32).eps * logits.abs().max())
        assert gap <= two_ulp


def test_bf16_tokens_are_the_teacher_forced_argmax_or_near_ties(prompts: list[list[int]]) -> None:
    folder = demo_folder("demo")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with LLM("demo", dtype="bfloat16", device="cpu") as llm:
        outputs = llm.generate(
            prompt_token_ids=prompts[:16], sampling_params=GREEDY, use_tqdm=False
        )
    for output in outputs:
        prompt, ours = output.prompt_token_ids, output.outputs[0].token_ids
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + ours])).logits[0].float()
        rows = logits[len(prompt) - 1 : -1]
        gap = rows.max(dim=-1).values - rows.gather(1, torch.tensor(ours).unsqueeze(1)).squeeze(1)
        # bf16 keeps 8 bits: one ulp of a logit near 16 is 1/8.
        two_ulp = 2 * 2.0**-7 * rows.abs().max(dim=-1).values
        assert bool((gap <= two_ulp).all())


def test_held_out_continuations_are_as_likely_as_the_card_says(prompts: list[list[int]]) -> None:
    rows = heldout_prompts()
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    with LLM("demo", dtype="float32", device="cpu") as llm:
        text = [
            [*rows.prompts[i, -200:].tolist(), *rows.continuations[i].tolist()]
            for i in range(0, 24, 2)
        ]
        outputs = llm.generate(prompt_token_ids=text, sampling_params=params, use_tqdm=False)
    losses = [
        -entry[token].logprob
        for o in outputs
        for token, entry in zip(o.prompt_token_ids[200:], o.prompt_logprobs[200:], strict=True)
    ]
    assert 0.8 < float(np.mean(losses)) < 2.2
