"""64 requests of 1024 tokens in and 128 out, submitted together: seconds until all are done."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from bench.common import print_table, write_results
from bench.engine.decode import params_for, seconds
from bench.shapes import SHAPES, Prompts, start
from hetero_llm import LLM

REQUESTS, PROMPT, NEW_TOKENS = 64, 1024, 128

# vLLM 0.22.1 on one H200, bf16, random weights, max_num_batched_tokens 16384.
VLLM_SECONDS = {"llama-3.1-8b": 2.49}


def measure(
    llm: LLM,
    shape: str,
    *,
    requests: int = REQUESTS,
    prompt: int = PROMPT,
    new_tokens: int = NEW_TOKENS,
    rounds: int = 3,
) -> list[dict[str, Any]]:
    """The table's one row: the median over `rounds` after a run that warms up."""
    prompts = Prompts(shape, seed=2)
    seconds(llm, prompts.draw(requests, prompt), params_for(4, sampling=False))
    params = params_for(new_tokens, sampling=False)
    times = [seconds(llm, prompts.draw(requests, prompt), params) for _ in range(rounds)]
    median = float(np.median(times))
    own_sizes = (requests, prompt, new_tokens) == (REQUESTS, PROMPT, NEW_TOKENS)
    return [
        {
            "requests": f"{requests} x ({prompt} in, {new_tokens} out)",
            "seconds": median,
            "output_tok_per_s": requests * new_tokens / median,
            "vllm_seconds": VLLM_SECONDS.get(shape, "-") if own_sizes else "-",
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", help="JSON file")
    args = parser.parse_args()
    llm, ready = start(
        args.shape, dtype="bfloat16", device=args.device, max_model_len=2048,
        max_num_batched_tokens=16384,
    )  # fmt: skip
    with llm:
        rows = measure(llm, args.shape)
    write_results(
        "closed_batch",
        {"shape": args.shape, "dtype": "bf16", "ready_s": ready, "rows": rows},
        args.out,
    )
    print(f"{args.shape}, random weights, bf16; ready after {ready:.1f} s")
    print_table(rows)


if __name__ == "__main__":
    main()
