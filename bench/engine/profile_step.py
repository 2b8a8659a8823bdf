"""Where the time of a step goes on a CUDA device: kernels by name, from torch's profiler.

    python -m bench.engine.profile_step [--shape llama-3.1-8b] [--batches 1,8] [--prompts 16384]

Decode: microseconds of each kernel per step, and the step's wall time beside their sum (kernels
launched early overlap, so the sum may exceed it). Prefill: milliseconds of each kernel per prompt.
"""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from bench.common import Rows, bench_parser, numbers, print_table
from bench.generation import greedy, seconds
from bench.shapes import SHAPES, Prompts, start
from hetero_llm import LLM

_STEPS = 32
_SHOWN = 14


def profiled(
    llm: LLM, prompts: Prompts, size: tuple[int, int], count: int, divide: int
) -> tuple[Rows, float]:
    """Device microseconds by kernel name, the largest first, and wall seconds of a run; both over
    `divide`. `size`: prompts and their tokens. `count`: new tokens. The first run warms up."""
    seconds(llm, prompts.draw(*size), greedy(count))
    wall = seconds(llm, prompts.draw(*size), greedy(count))
    fresh = prompts.draw(*size)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        seconds(llm, fresh, greedy(count))
        torch.cuda.synchronize()
    rows = [
        {
            "us": event.self_device_time_total / divide,
            "calls": event.count / divide,
            "us a call": event.self_device_time_total / event.count,
            "kernel": event.key[:70],
        }
        for event in profiler.key_averages()
        if event.self_device_time_total > 0
    ]
    return sorted(rows, key=lambda row: -row["us"]), wall / divide


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument("--prompts", type=numbers, default=[])
    args = parser.parse_args()
    llm, ready = start(SHAPES[args.shape])
    print(f"ready after {ready:.1f} s")
    prompts = Prompts(SHAPES[args.shape]["vocab_size"])
    for batch in args.batches:
        kernels, wall = profiled(llm, prompts, (batch, 128), _STEPS + 1, _STEPS)
        total = sum(row["us"] for row in kernels)
        print(
            f"\nbatch {batch}: {wall * 1e6:.0f} us a step with its prefill share, "
            f"kernels {total:.0f} us"
        )
        print_table(kernels[:_SHOWN])
    for length in args.prompts:
        kernels, wall = profiled(llm, prompts, (1, length), 1, 1)
        total = sum(row["us"] for row in kernels)
        print(f"\nprompt {length}: {wall * 1e3:.1f} ms, kernels {total / 1e3:.1f} ms")
        print_table(kernels[:_SHOWN])


if __name__ == "__main__":
    main()
