"""64 requests of 1024 tokens in and 128 out, submitted together: seconds until all are done.

The part "closed" of `bench.engine.gpu_suite`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.generation import greedy, seconds
from bench.shapes import SHAPES, Prompts
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
    prompts = Prompts(SHAPES[shape]["vocab_size"], seed=2)
    seconds(llm, prompts.draw(requests, prompt), greedy(4))
    params = greedy(new_tokens)
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
