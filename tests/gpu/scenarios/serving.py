"""Engines on the device, prompts for them, and the float32 reference that judges their tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from hetero_llm import LLM, RequestOutput, SamplingParams
from hetero_llm.demo_models import demo_folder, heldout_prompts
from hetero_llm.sampling.noise import gumbel_noise, signed_seed

DEVICE = "cuda"
DEMO = demo_folder("demo")
TIES = 1e-4
"""Scores that are nearer than this are a tie to float32: either token is right."""
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)


def start(model: Path = DEMO, **engine_args: Any) -> LLM:
    """An engine with a small pool and few graphs, so that it starts in a moment."""
    defaults: dict[str, Any] = {
        "device": DEVICE,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 640,
        "disable_log_stats": True,
    }
    return LLM(str(model), **{**defaults, **engine_args})


def ragged(count: int = 16) -> list[list[int]]:
    """Held-out prompts of 8, 32, 56, ... tokens."""
    rows = heldout_prompts().prompts
    return [rows[2 * i, : 8 + 24 * i].tolist() for i in range(count)]


def equal(count: int, length: int) -> list[list[int]]:
    """Held-out prompts of one length."""
    return heldout_prompts().prompts[:count, :length].tolist()


def generate(
    llm: LLM, prompts: list[list[int]], params: SamplingParams | Sequence[SamplingParams] = GREEDY
) -> list[RequestOutput]:
    return llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [c.token_ids for o in outputs for c in o.outputs]


def runner_of(llm: LLM) -> Any:
    return llm.engine.runner


@functools.cache
def transformers_model(folder: Path, dtype: torch.dtype, device: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.to(device).eval()


@torch.inference_mode()
def reference_logits(
    token_ids: list[int],
    folder: Path = DEMO,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> torch.Tensor:
    """[len, vocab] float32 on the CPU, by transformers: row i follows token i."""
    model = transformers_model(folder, dtype, device)
    return model(torch.tensor([token_ids], device=device)).logits[0].float().cpu()


def regrets(
    outputs: list[RequestOutput], params: Sequence[SamplingParams], folder: Path = DEMO
) -> torch.Tensor:
    """How far each generated token's score is below the best one's, 0 for the reference's choice.

    The score is the float32 reference's logit on the very tokens before it, with the request's own
    noise if it is sampled.

    Args:
        outputs: of n = 1.
        params: of each request; greedy, or a temperature and a seed and nothing else.

    Returns:
        [all tokens] float32.
    """
    parts = []
    for output, wanted in zip(outputs, params, strict=True):
        (completion,) = output.outputs
        texts = tuple(output.prompt_token_ids), tuple(completion.token_ids)
        noise = (0.0, None) if wanted.greedy else (wanted.temperature, wanted.seed)
        parts.append(regrets_of(*texts, *noise, folder))
    return torch.cat(parts)


@functools.cache
def regrets_of(
    prompt: tuple[int, ...],
    tokens: tuple[int, ...],
    temperature: float,
    seed: int | None,
    folder: Path,
) -> torch.Tensor:
    """`regrets` of one output, which may be unfinished. Kept, since most engines generate the same
    tokens and the reference is slow; a folder's weights do not change.

    Args:
        temperature, seed: of its request; 0.0 and None: greedy.
    """
    scores = reference_logits([*prompt, *tokens], folder)[len(prompt) - 1 : -1]
    drawn = torch.tensor(tokens)
    if temperature:
        assert seed is not None
        seeds = torch.full_like(drawn, signed_seed(seed))
        positions = torch.arange(len(prompt), len(prompt) + len(drawn))
        noise = gumbel_noise(seeds, positions, torch.zeros_like(drawn), scores.shape[1])
        scores = scores / temperature + noise
    best = scores.max(dim=-1).values
    return best - scores.gather(1, drawn.unsqueeze(1)).squeeze(1)
