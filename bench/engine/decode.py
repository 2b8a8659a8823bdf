"""Milliseconds per decode step through `LLM.generate`, beside the matrix products alone: the part
"decode" of `bench.engine.gpu_suite`.

ms/step = (T(129 tokens) - T(1 token)) / 128, prompts of 128 random ids, all distinct, greedy, no
detokenization, median of three. `cublas_ms` is every linear layer of one step through `F.linear` in
a CUDA graph at the same number of rows, measured in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from bench.generation import greedy, seconds
from bench.gpu_timing import graph_ms
from bench.shapes import SHAPES, Prompts, linear_sizes
from hetero_llm import LLM

PROMPT = 128
STEPS = 128
BATCHES = (1, 4, 8, 32, 128)
SAMPLING = {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "seed": 1}

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


def ms_per_step(
    llm: LLM,
    prompts: Prompts,
    batch: int,
    *,
    sampling: bool = False,
    steps: int = STEPS,
    middle: Callable[[list[float]], float] = statistics.median,
) -> float:
    """`middle` of three rounds, each with prompts of its own, after a short run that warms up."""
    more = SAMPLING if sampling else {}
    one, many = (greedy(count, **more) for count in (1, 1 + steps))
    seconds(llm, prompts.draw(batch, PROMPT), greedy(4, **more))
    times = []
    for _ in range(3):
        short = seconds(llm, prompts.draw(batch, PROMPT), one)
        long = seconds(llm, prompts.draw(batch, PROMPT), many)
        times.append((long - short) / steps * 1e3)
    return middle(times)


def cublas_ms(shape: str, rows: list[int]) -> dict[int, float]:
    """Rows -> ms of all linear layers of one step, bf16; CUDA only.

    The weights of two layers stand for all: they are several times as large as the L2 cache, so
    each product reads its weight from memory.
    """
    layer_sizes, head_size = linear_sizes(SHAPES[shape])
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

        def run(inputs: dict[int, torch.Tensor] = inputs) -> None:
            for weight in order:
                F.linear(inputs[weight.shape[1]], weight)

        times[count] = graph_ms(run, replays=10)
    return times


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
    prompts = Prompts(SHAPES[shape]["vocab_size"])
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
