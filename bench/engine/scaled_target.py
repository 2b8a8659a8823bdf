"""Builds a scale-up target from the demo target on a GPU and serves it: a check, not a claim.

A scale-up target has the cost of the named shape and the function of the demo model
(`tools/scale_up.py`), so its greedy text must be the demo target's but for rounding.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from bench.common import bench_parser, print_table, write_results
from bench.generation import greedy
from hetero_llm import LLM
from hetero_llm.demo_models import demo_folder, heldout_prompts

BATCH, PROMPT, NEW_TOKENS = 8, 128, 65
ROOT = Path(__file__).parents[2]


def generate(llm: LLM, count: int) -> list[list[int]]:
    prompts = [row[:PROMPT].tolist() for row in heldout_prompts().prompts[:BATCH]]
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=greedy(count), use_tqdm=False)
    llm.reset_prefix_cache()
    return [o.outputs[0].token_ids for o in outputs]


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--shape", default="mistral-7b")
    args = parser.parse_args()
    with LLM("demo", dtype="float32", device="cuda", gpu_memory_utilization=0.2) as llm:
        expected = generate(llm, NEW_TOKENS)
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        subprocess.run(
            [sys.executable, str(ROOT / "tools" / "scale_up.py"), str(demo_folder("demo")),
             args.shape, folder, "--dtype", "bf16", "--device", "cuda"],
            check=True,
        )  # fmt: skip
        built = time.perf_counter() - begin
        begin = time.perf_counter()
        llm = LLM(folder, dtype="bfloat16", device="cuda", max_model_len=2048)
        loaded = time.perf_counter() - begin
    generate(llm, 2)
    times = []
    for count in (1, NEW_TOKENS):
        begin = time.perf_counter()
        got = generate(llm, count)
        times.append(time.perf_counter() - begin)
    same = float(np.mean([a == b for x, y in zip(expected, got, strict=True)
                          for a, b in zip(x, y, strict=True)]))  # fmt: skip
    row = {
        "shape": f"{args.shape} (scale-up target)",
        "build_and_write_s": built,
        "load_s": loaded,
        f"ms_per_step_batch_{BATCH}": (times[1] - times[0]) / (NEW_TOKENS - 1) * 1e3,
        "tokens_as_fp32_demo": same,
    }
    print_table([row])
    write_results(
        "scaled_target", {"rows": [row], "dtype": "bf16", "path": "eager torch"}, args.out
    )


if __name__ == "__main__":
    main()
