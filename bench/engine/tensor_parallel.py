"""Decode steps and first tokens of one engine on one GPU and on several, one after the other.

    python -m bench.engine.tensor_parallel [--shape llama-3.1-8b] [--sizes 1,2] [--out FILE]

Methods of `bench.engine.decode` (greedy, 128 tokens behind prompts of 128) and `bench.engine.ttft`
(cold). "over one": the time on one GPU of the same run over the time on several. Random weights.

Predictions for Llama-3.1-8B in bf16 on two H200: a step reads 15.0 GB of weights (without the
embedding), 7.5 GB a GPU, or 1.8 ms at the 4.15 TB/s of its products; 65 sums of 5 us, of which the
norms that they replace took 2, add 0.2 ms; what does not shrink (norms, small attention, gaps, the
gathered logits) was 0.35 ms of one GPU's 3.95: 2.4 ms at batch 1. A prompt of 16K: products and
attention halve (483 to 242 ms); 64 sums of 134 MB at 300 GB/s, two halves each way, add 60 ms.
"""

from __future__ import annotations

import gc
from typing import Any

from bench.common import bench_parser, numbers, print_table, write_results
from bench.engine import ttft
from bench.engine.decode import ms_per_step
from bench.shapes import SHAPES, Prompts, start

# vLLM 0.22.1 with tensor_parallel_size=2 on two H200 of one host, the same methods.
VLLM_STEP_MS = {1: 3.48, 8: 3.60, 32: 3.77, 128: 4.94}
VLLM_FIRST_MS = {1024: 19.5, 4096: 62, 16384: 284, 32768: 679}
VLLM_SHAPE, VLLM_SIZE = "llama-3.1-8b", 2

Rows = list[dict[str, Any]]


def measure(
    shape: str, size: int, batches: list[int], lengths: list[int], engine_args: dict[str, Any]
) -> tuple[Rows, Rows, float]:
    """Rows of decode steps and of first tokens, and the seconds until the engine was ready.

    Args:
        size: GPUs.
        engine_args: replace those for `size` ranks and prompts in one step.
    """
    defaults: dict[str, Any] = {"max_num_batched_tokens": 16384, "tensor_parallel_size": size}
    llm, ready = start(
        SHAPES[shape], dtype="bfloat16", max_model_len=ttft.context_for(shape, lengths or [1024]),
        **{**defaults, **engine_args},
    )  # fmt: skip
    peers = (shape, size) == (VLLM_SHAPE, VLLM_SIZE) and "tensor_parallel_size" not in engine_args
    steps, first = [], []
    with llm:
        prompts = Prompts(SHAPES[shape]["vocab_size"], seed=2)
        for batch in batches:
            row: dict[str, Any] = {"size": size, "batch": batch}
            row["ms_per_step"] = ms_per_step(llm, prompts, batch)
            row["vllm_ms"] = VLLM_STEP_MS.get(batch, "-") if peers else "-"
            steps.append(row)
            print(row, flush=True)
        for length in lengths:
            row = {"size": size, "prompt": length}
            row["cold_ms"], row["hit_ms"] = ttft.cold_and_hit_ms(llm, prompts, length)
            row["vllm_ms"] = VLLM_FIRST_MS.get(length, "-") if peers else "-"
            first.append(row)
            print(row, flush=True)
    del llm
    gc.collect()  # the next engine needs the memory
    return steps, first, ready


def compare(rows: Rows, key: str, figure: str) -> None:
    """Adds to each row what one GPU takes for the same over what it takes."""
    alone = {row[key]: row[figure] for row in rows if row["size"] == 1}
    for row in rows:
        row["over one"] = alone[row[key]] / row[figure] if row[key] in alone else "-"


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--sizes", type=numbers, default=[2, 1])
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32, 128])
    parser.add_argument("--lengths", type=numbers, default=[1024, 4096, 16384, 32768])
    parser.add_argument("--quantization")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    steps: Rows = []
    first: Rows = []
    ready = {}
    more = {"device": args.device, "quantization": args.quantization}
    for size in args.sizes:
        own_steps, own_first, ready[size] = measure(
            args.shape, size, args.batches, args.lengths, more
        )
        steps += own_steps
        first += own_first
        compare(steps, "batch", "ms_per_step")
        compare(first, "prompt", "cold_ms")
        about = {"shape": args.shape, "dtype": args.quantization or "bf16", "ready_s": ready}
        write_results("tensor_parallel", {**about, "steps": steps, "first": first}, args.out)
    print_table(steps)
    print_table(first)


if __name__ == "__main__":
    main()
