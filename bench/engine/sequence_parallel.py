"""First tokens of one engine whose GPUs share the tokens of each prompt, and of one GPU.

    python -m bench.engine.sequence_parallel [--shape llama-3.1-8b] [--sizes 2] [--out FILE]

The cold prompts of `bench.engine.ttft`, one at a time, at most 16384 tokens a step. Random weights.
"over half": the time over what one GPU takes divided by the number of GPUs; one GPU's times are
those of the same run where `--sizes` has 1 (`--sizes 2,1`), else those of ONE_GPU_MS. Shorter
prompts, and decoding, take what one GPU takes.

Predictions for Llama-3.1-8B in bf16 on two H200 (one GPU: 98 / 480 / 1195 ms for 4K / 16K / 32K):
a step of 16K tokens has 8K on each GPU, and half the attention, since pieces are paired: 240 ms.
Each of 32 layers adds: 33.5 MB of keys and values each way at 265 GB/s (as gathered logits of 64
rows move), 126 us; their store, 40; joining two parts of attention for pieces behind others, 60;
a second copy of keys for the second piece, and of its output, 80. That is 10 ms: 250 ms for 16K,
or 1.04 of half. 32K are two such steps, of which the second attends to twice as much: 617 ms, 1.03.
4K: 49 + 2.5 + 1.5 ms of what does not shrink (the head, sampling, the first launch): 53 ms, 1.08.
"""

from __future__ import annotations

import gc
from typing import Any

from bench.common import bench_parser, numbers, print_table, write_results
from bench.engine import ttft
from bench.shapes import SHAPES, Prompts, start

ONE_GPU_MS = {"llama-3.1-8b": {4096: 98.1, 16384: 480.0, 32768: 1195.0}}
"""One H200, bf16; docs/benchmarks.md, "Two GPUs"."""

Rows = list[dict[str, Any]]


def measure(
    shape: str, size: int, lengths: list[int], rounds: int, engine_args: dict[str, Any]
) -> tuple[Rows, float]:
    """A row for each length, and the seconds until the engine was ready."""
    llm, ready = start(
        SHAPES[shape], dtype="bfloat16", max_num_batched_tokens=16384,
        max_model_len=ttft.context_for(shape, lengths), sequence_parallel_size=size,
        **engine_args,
    )  # fmt: skip
    rows = []
    with llm:
        prompts = Prompts(SHAPES[shape]["vocab_size"], seed=3)
        for length in lengths:
            row: dict[str, Any] = {"size": size, "prompt": length}
            row["cold_ms"], row["hit_ms"] = ttft.cold_and_hit_ms(llm, prompts, length, rounds)
            rows.append(row)
            print(row, flush=True)
    del llm
    gc.collect()  # the next engine needs the memory
    return rows, ready


def compare(rows: Rows, known: dict[int, float]) -> None:
    """Adds "over half" to each row. `known`: one GPU's milliseconds by length, of another run."""
    alone = known | {row["prompt"]: row["cold_ms"] for row in rows if row["size"] == 1}
    for row in rows:
        one = alone.get(row["prompt"])
        row["over half"] = "-" if one is None else row["cold_ms"] * row["size"] / one


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--sizes", type=numbers, default=[2])
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--lengths", type=numbers, default=[4096, 16384, 32768])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quantization")
    parser.add_argument("--disable-custom-all-reduce", action="store_true")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    more = {
        "device": args.device,
        "quantization": args.quantization,
        "tensor_parallel_size": args.tensor_parallel_size,
        "disable_custom_all_reduce": args.disable_custom_all_reduce,
    }
    plain = args.quantization is None and args.tensor_parallel_size == 1
    known = ONE_GPU_MS.get(args.shape, {}) if plain else {}
    rows: Rows = []
    ready = {}
    for size in args.sizes:
        own, ready[size] = measure(args.shape, size, args.lengths, args.rounds, more)
        rows += own
        compare(rows, known)
        about = {"shape": args.shape, "dtype": args.quantization or "bf16", "ready_s": ready}
        about["tensor_parallel_size"] = args.tensor_parallel_size
        write_results("sequence_parallel", {**about, "first": rows}, args.out)
    print(f"ready after {ready} s")
    print_table(rows)


if __name__ == "__main__":
    main()
