"""Milliseconds per decode step through `LLM.generate`, beside the matrix products alone.

ms/step = (T(129 tokens) - T(1 token)) / 128, prompts of 128 random ids, all distinct, greedy, no
detokenization, median of three. `cublas_ms` is every linear layer of one step through `F.linear` in
a CUDA graph at the same number of rows, measured in the same run.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from bench.common import print_table, write_results
from bench.gpu_timing import graph_ms
from bench.shapes import SHAPES, Prompts, linear_sizes, start
from hetero_llm import LLM, SamplingParams

PROMPT = 128
STEPS = 128
BATCHES = (1, 4, 8, 32, 128)

# vLLM 0.22.1 on one H200 (FlashAttention 3, full CUDA graphs, torch.compile), bf16, random weights,
# this same method; two runs.
VLLM_MS = {
    "llama-3.1-8b": {
        1: "4.80-4.93",
        4: "4.82-5.00",
        8: "4.89-5.07",
        32: "5.36-5.54",
        128: "7.12-7.24",
    }
}


def params_for(count: int, *, sampling: bool) -> SamplingParams:
    """`count` tokens, no earlier end; greedy or with both restrictions of the support."""
    if sampling:
        return SamplingParams(
            temperature=1.0, top_p=0.95, top_k=50, seed=1, max_tokens=count, ignore_eos=True,
            detokenize=False,
        )  # fmt: skip
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)


def seconds(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    begin = time.perf_counter()
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    elapsed = time.perf_counter() - begin
    assert all(len(o.outputs[0].token_ids) == params.max_tokens for o in outputs)
    assert all(not o.num_cached_tokens for o in outputs)
    return elapsed


def ms_per_step(
    llm: LLM,
    prompts: Prompts,
    batch: int,
    *,
    sampling: bool = False,
    rounds: int = 3,
    steps: int = STEPS,
) -> float:
    """Median over `rounds`, each with prompts of its own, after a short run that warms up."""
    one, many = (params_for(count, sampling=sampling) for count in (1, 1 + steps))
    seconds(llm, prompts.draw(batch, PROMPT), params_for(4, sampling=sampling))
    times = []
    for _ in range(rounds):
        short = seconds(llm, prompts.draw(batch, PROMPT), one)
        long = seconds(llm, prompts.draw(batch, PROMPT), many)
        times.append((long - short) / steps * 1e3)
    return float(np.median(times))


def cublas_ms(shape: str, rows: list[int]) -> dict[int, float]:
    """Rows -> ms of all linear layers of one step, bf16; CUDA only.

    The weights of two layers stand for all: they are several times as large as the L2 cache, so
    each product reads its weight from memory.
    """
    layer_sizes, head_size = linear_sizes(shape)
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        tensor = torch.empty(size, dtype=torch.bfloat16, device="cuda")
        return tensor.uniform_(-0.03, 0.03, generator=generator)

    layers = [[random(*size) for size in layer_sizes] for _ in range(2)]
    head = random(*head_size)
    order = [
        weight
        for index in range(SHAPES[shape]["num_hidden_layers"])
        for weight in layers[index % 2]
    ] + [head]
    times = {}
    for count in rows:
        inputs = {size[1]: random(count, size[1]) for size in [*layer_sizes, head_size]}
        times[count] = _graph_ms(order, inputs)
    return times


def _graph_ms(weights: list[torch.Tensor], inputs: dict[int, torch.Tensor]) -> float:
    def run() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    return graph_ms(run, replays=10)


def measure(
    llm: LLM,
    shape: str,
    batches: list[int],
    *,
    device: str,
    sampling: bool,
    steps: int = STEPS,
) -> list[dict[str, Any]]:
    """One row of the table per batch; `device` is the one that `llm` was started with."""
    prompts = Prompts(shape)
    reference = {}
    if device != "cpu" and torch.cuda.is_available():
        reference = cublas_ms(shape, batches)
        torch.cuda.empty_cache()
    rows = []
    for batch in batches:
        ours = ms_per_step(llm, prompts, batch, steps=steps)
        row: dict[str, Any] = {"batch": batch, "ms_per_step": ours}
        if sampling:
            row["sampling_ms"] = ms_per_step(llm, prompts, batch, sampling=True, steps=steps)
            row["sampling/greedy"] = row["sampling_ms"] / ours
        row["cublas_ms"] = reference.get(batch, "-")
        row["ours/cublas"] = ours / reference[batch] if batch in reference else "-"
        row["vllm_ms"] = VLLM_MS.get(shape, {}).get(batch, "-")
        rows.append(row)
    return rows


def batch_list(text: str) -> list[int]:
    """ "1,8" -> [1, 8]."""
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--batches", type=batch_list, default=list(BATCHES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sampling", action="store_true", help="also top_p 0.95, top_k 50")
    parser.add_argument("--out", help="JSON file")
    args = parser.parse_args()
    llm, ready = start(
        args.shape, dtype="bfloat16", device=args.device, max_model_len=1024,
        max_num_batched_tokens=16384,
    )  # fmt: skip
    with llm:
        rows = measure(llm, args.shape, args.batches, device=args.device, sampling=args.sampling)
    write_results(
        "decode",
        {"shape": args.shape, "dtype": "bf16", "ready_s": ready, "rows": rows},
        args.out,
    )
    print(f"{args.shape}, random weights, bf16; ready after {ready:.1f} s")
    print_table(rows)


if __name__ == "__main__":
    main()
