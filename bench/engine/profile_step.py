"""Where the time of a step goes on a CUDA device: kernels by name, from torch's profiler.

    python -m bench.engine.profile_step [--shape llama-3.1-8b] [--batches 1,8] [--prompts 16384]

Decode: microseconds of each kernel per step, and the step's wall time beside their sum (kernels
launched early overlap, so the sum may exceed it). Prefill: milliseconds of each kernel per prompt.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.common import print_table
from bench.shapes import SHAPES, Prompts, start
from hetero_llm import LLM, SamplingParams

_STEPS = 32
_SHOWN = 14


def kernels_of(run: Any, divide: float) -> list[dict[str, Any]]:
    """Device microseconds by kernel name over `divide`, the largest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
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
    return sorted(rows, key=lambda row: -row["us"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--prompts", default="")
    args = parser.parse_args()
    llm, ready = start(args.shape)
    print(f"ready after {ready:.1f} s")
    prompts = Prompts(args.shape)
    for batch in map(int, filter(None, args.batches.split(","))):
        params = SamplingParams(
            temperature=0.0, max_tokens=_STEPS + 1, ignore_eos=True, detokenize=False
        )
        run = _generation(llm, prompts, batch, 128, params)
        run()
        begin = time.perf_counter()
        run()
        wall = time.perf_counter() - begin
        rows = kernels_of(run, _STEPS)
        total = sum(row["us"] for row in rows)
        print(
            f"\nbatch {batch}: {wall / _STEPS * 1e6:.0f} us a step with its prefill share, "
            f"kernels {total:.0f} us"
        )
        print_table(rows[:_SHOWN])
    for length in map(int, filter(None, args.prompts.split(","))):
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        run = _generation(llm, prompts, 1, length, params)
        run()
        begin = time.perf_counter()
        run()
        wall = time.perf_counter() - begin
        rows = kernels_of(run, 1)
        print(
            f"\nprompt {length}: {wall * 1e3:.1f} ms, kernels "
            f"{sum(row['us'] for row in rows) / 1e3:.1f} ms"
        )
        print_table(rows[:_SHOWN])


def _generation(llm: LLM, prompts: Prompts, batch: int, length: int, params: SamplingParams) -> Any:
    def run() -> None:
        fresh = prompts.draw(batch, length)
        llm.generate(prompt_token_ids=fresh, sampling_params=params, use_tqdm=False)

    return run


if __name__ == "__main__":
    main()
