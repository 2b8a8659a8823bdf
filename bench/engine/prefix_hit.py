"""Time to first token with 900 of the prompt's tokens in the prefix cache, against cold."""

from __future__ import annotations

import numpy as np
import torch

from bench.common import bench_parser, median_ratio, report
from bench.generation import first_token_ms
from hetero_llm import LLM
from hetero_llm.demo_models import heldout_prompts

SHARED = 900
SUFFIX = 32


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = heldout_prompts().prompts
    cold, hit = [], []
    with LLM("demo", dtype="bfloat16", device=args.device) as llm:
        for round_ in range(-1, args.rounds):  # the first round warms up
            head = rows[round_ + 1, :SHARED].tolist()
            tails = [rows[100 + 2 * round_ + i, :SUFFIX].tolist() for i in (2, 3)]
            cold_ms, cached = first_token_ms(llm, head + tails[0])
            assert cached == 0
            hit_ms, cached = first_token_ms(llm, head + tails[1])
            assert cached == SHARED // 16 * 16
            if round_ >= 0:
                cold.append(cold_ms)
                hit.append(hit_ms)
    ratio = median_ratio(hit, cold)
    table = [
        {"prompt": "cold", "first_token_ms": float(np.median(cold))},
        {"prompt": f"{SHARED} tokens cached", "first_token_ms": float(np.median(hit))},
    ]
    print(f"ratio (median of {args.rounds} rounds): {ratio:.3f}")
    about = {"ratio": ratio, "threads": args.threads, "model": "demo", "dtype": "bf16"}
    report("prefix_hit", about, table, args.out)


if __name__ == "__main__":
    main()
