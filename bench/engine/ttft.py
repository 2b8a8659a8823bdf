"""Time to the first token through `LLM.generate`: cold, and with the whole prompt in the cache.
The part "ttft" of `bench.engine.gpu_suite`.

Cold: random ids that were never seen. Prefix hit: the same prompt sent again right afterwards, so
that at most one block (and the last token) is computed. One prompt at a time, max_tokens 1, median
of three, at most 16384 tokens a step.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.generation import first_token_ms
from bench.shapes import ALL_SHAPES, SHAPES, Prompts
from hetero_llm import LLM

LENGTHS = (1024, 4096, 16384, 32768)
BLOCK = 16  # tokens of a KV block, the default

# vLLM 0.22.1 on one H200 (FlashAttention 3, full CUDA graphs, torch.compile), bf16, random weights,
# max_num_batched_tokens 16384, this same method; two runs where two figures stand.
VLLM_COLD_MS = {
    "llama-3.1-8b": {
        1024: "26.2-28.6",
        4096: "101-105",
        16384: "479-492",
        32768: "1174-1207",
    }
}
VLLM_HIT_MS = {"llama-3.1-8b": {4096: "8.8-10.3", 16384: "11.7-13.4", 32768: "16.5"}}


def cold_and_hit_ms(
    llm: LLM, prompts: Prompts, length: int, rounds: int = 3
) -> tuple[float, float]:
    """Medians over `rounds`, each with a prompt of its own, after one round that warms up."""
    cold, hit = [], []
    for _ in range(1 + rounds):
        prompt = prompts.one(length)
        first, cached = first_token_ms(llm, prompt)
        assert cached == 0
        again, cached = first_token_ms(llm, prompt)
        assert length - cached <= BLOCK, (length, cached)
        cold.append(first)
        hit.append(again)
    return float(np.median(cold[1:])), float(np.median(hit[1:]))


def measure(llm: LLM, shape: str, lengths: list[int]) -> list[dict[str, Any]]:
    """One row of the table per prompt length; those beyond the context are left out and named."""
    prompts = Prompts(SHAPES[shape]["vocab_size"], seed=1)
    context = SHAPES[shape]["max_position_embeddings"]
    rows = []
    for length in lengths:
        if length >= context:
            print(f"{length} tokens and one more exceed the context of {shape}, {context}: not run")
            continue
        cold, hit = cold_and_hit_ms(llm, prompts, length)
        rows.append(
            {
                "prompt": length,
                "cold_ms": cold,
                "vllm_cold_ms": VLLM_COLD_MS.get(shape, {}).get(length, "-"),
                "hit_ms": hit,
                "vllm_hit_ms": VLLM_HIT_MS.get(shape, {}).get(length, "-"),
            }
        )
    return rows


def context_for(shape: str, lengths: list[int]) -> int:
    """A max_model_len for the longest prompt that the shape can take, and a few tokens more."""
    return min(ALL_SHAPES[shape]["max_position_embeddings"], max(lengths) + 2 * BLOCK)
