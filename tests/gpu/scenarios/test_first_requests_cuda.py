"""An engine that is ready has compiled what its requests need: none waits for Triton.

The engine has a process of its own, since kernels that other tests compiled would not be missed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

# A KV cache of a given size: other tests need the GPU's memory at the same time.
ARMS: dict[str, dict[str, Any]] = {
    "plain": {"num_gpu_blocks_override": 4000},
    "cache": {"num_gpu_blocks_override": 4000, "use_lookahead": True},
    "few blocks": {"num_gpu_blocks_override": 150},
}


@pytest.mark.parametrize("arm", ARMS)
def test_no_kernel_is_compiled_after_the_start(arm: str) -> None:
    command = [sys.executable, "-m", __name__, arm]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == []


def kernels_of_requests(arm: str) -> list[str]:
    """Serves requests of many lengths, together and alone. Returns the kernels that Triton was
    asked to compile for them."""
    import numpy as np
    import triton

    from hetero_llm import LLM, SamplingParams
    from hetero_llm.demo_models import heldout_prompts

    rng = np.random.default_rng(4)
    text = heldout_prompts().prompts.ravel().tolist()
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "seed": 1},
        {"temperature": 1.0, "top_k": 7, "min_p": 0.01, "n": 2},
        {"temperature": 0.0, "logprobs": 3, "presence_penalty": 0.4},
        {"temperature": 0.5, "repetition_penalty": 1.1, "logit_bias": {5: 2.0}, "min_tokens": 3},
        {"temperature": 0.0, "prompt_logprobs": 2},
    ]
    longest = 2000
    with LLM("demo", device="cuda", disable_log_stats=True, max_model_len=2048, **ARMS[arm]) as llm:
        found: list[str] = []

        def listen(*, src: Any, **_: Any) -> None:
            found.append(src.name)

        triton.knobs.compilation.listener = listen
        lengths = [1, 3, 16, 33, 100, 255, 256, 500, 513, 700, 1000, 1024, 1500, 1999]
        batches = [[n] for n in lengths]
        batches += [rng.integers(1, 600, size).tolist() for size in (2, 5, 9, 16, 30)]
        for index, batch in enumerate(batches):
            begins = rng.integers(0, len(text) - longest, len(batch)).tolist()
            if index % 3 == 2:  # prompts whose beginning is known
                begins = [100] * len(batch)
            llm.generate(
                prompt_token_ids=[text[b : b + n] for b, n in zip(begins, batch, strict=True)],
                sampling_params=[
                    SamplingParams(max_tokens=12, **kinds[(index + i) % len(kinds)])
                    for i in range(len(batch))
                ],
                use_tqdm=False,
            )
    return sorted(set(found))


if __name__ == "__main__":
    print(json.dumps(kernels_of_requests(sys.argv[1])))
