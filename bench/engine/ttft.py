"""Time to the first token through `LLM.generate`: cold, and with the whole prompt in the cache.

Cold: random ids that were never seen. Prefix hit: the same prompt sent again right afterwards, so
that at most one block (and the last token) is computed. One prompt at a time, max_tokens 1, median
of three, at most 16384 tokens a step.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from bench.common import print_table, write_results
from bench.engine.decode import batch_list, params_for
from bench.shapes import SHAPES, Prompts, start
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


def first_token_ms(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """The time, and how many of the prompt's tokens came from the prefix cache."""
    params = params_for(1, sampling=False)
    begin = time.perf_counter()
    (output,) = llm.generate(prompt_token_ids=[prompt], sampling_params=params, use_tqdm=False)
    return (time.perf_counter() - begin) * 1e3, output.num_cached_tokens


def cold_and_hit_ms(
    llm: LLM, prompts: Prompts, length: int, rounds: int = 3
) -> tuple[float, float]:
    """Medians over `rounds`, each with a prompt of its own, after one round that warms up."""
    cold, hit = [], []
    for _ in range(1 + rounds):
        (prompt,) = prompts.draw(1, length)
        first, cached = first_token_ms(llm, prompt)
        assert cached == 0
        again, cached = first_token_ms(llm, prompt)
        assert length - cached <= BLOCK, (length, cached)
        cold.append(first)
        hit.append(again)
    return float(np.median(cold[1:])), float(np.median(hit[1:]))


def measure(llm: LLM, shape: str, lengths: list[int]) -> list[dict[str, Any]]:
    """One row of the table per prompt length; those beyond the context are left out and named."""
    prompts = Prompts(shape, seed=1)
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
    return min(SHAPES[shape]["max_position_embeddings"], max(lengths) + 2 * BLOCK)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--lengths", type=batch_list, default=list(LENGTHS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", help="JSON file")
    args = parser.parse_args()
    llm, ready = start(
        args.shape, dtype="bfloat16", device=args.device, max_num_batched_tokens=16384,
        max_model_len=context_for(args.shape, args.lengths),
    )  # fmt: skip
    with llm:
        rows = measure(llm, args.shape, args.lengths)
    write_results(
        "ttft",
        {"shape": args.shape, "dtype": "bf16", "ready_s": ready, "rows": rows},
        args.out,
    )
    print(f"{args.shape}, random weights, bf16; ready after {ready:.1f} s")
    print_table(rows)


if __name__ == "__main__":
    main()
