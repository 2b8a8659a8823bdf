"""Decode steps and first tokens of one engine on several GPUs and on one, one after the other.

    python -m bench.engine.parallel --by tensor [--shape llama-3.1-8b] [--sizes 2,1] [--out FILE]

Methods of `bench.engine.decode` (greedy, 128 tokens behind prompts of 128) and `bench.engine.ttft`
(cold, one prompt at a time). "over one": the time on one GPU of the same run over the time on
several. Random weights. `--by`, what the GPUs divide:

- tensor: each layer. With `--experts` a mixture has so many GiB of experts in the banks of all GPUs
  together, the same ones for any number of GPUs, and the CPU computes the others.
- pipeline: the layers, in stages. "ms_per_step" is the time in which every sequence gets a token:
  with two stages the sequences are two groups, so two steps of half the batch run in it. Prompts
  come in chunks of `--chunk` tokens.
- sequence: the tokens of a prompt. Short prompts, and decoding, take what one GPU takes, so only
  first tokens are measured.
"""

from __future__ import annotations

import argparse
from typing import Any

from bench.common import Rows, bench_parser, numbers, print_table, say, settings_of, write_results
from bench.engine import ttft
from bench.engine.decode import ms_per_step
from bench.shapes import ALL_SHAPES, Prompts, start

STEP_TOKENS = 16384
# vLLM 0.22.1 with tensor_parallel_size=2 on two H200 of one host, the same methods.
VLLM_OF = ("tensor", "llama-3.1-8b", 2)
VLLM_STEP_MS = {1: 3.48, 8: 3.60, 32: 3.77, 128: 4.94}
VLLM_FIRST_MS = {1024: 19.5, 4096: 62, 16384: 284, 32768: 679}


def engine_args(args: argparse.Namespace, size: int) -> dict[str, Any]:
    """The engine's arguments on `size` GPUs."""
    ranks = {"tensor_parallel_size": args.tensor_parallel_size}
    ranks[f"{args.by}_parallel_size"] = size
    pieces = args.by == "pipeline" and size > 1
    experts = {} if args.experts is None else {"moe_expert_memory": args.experts / size}
    return {
        "dtype": "bfloat16", "device": args.device, "quantization": args.quantization,
        "max_num_batched_tokens": args.chunk if pieces else STEP_TOKENS,
        "max_model_len": ttft.context_for(args.shape, args.lengths or [1024]),
        "disable_custom_all_reduce": args.disable_custom_all_reduce, **ranks, **experts,
    }  # fmt: skip


def measure(args: argparse.Namespace, size: int) -> tuple[Rows, Rows, float]:
    """Rows of decode steps and of first tokens, and the seconds until the engine was ready."""
    peers = (args.by, args.shape, size) == VLLM_OF
    steps: Rows = []
    first: Rows = []
    llm, ready = start(ALL_SHAPES[args.shape], **engine_args(args, size))
    with llm:
        prompts = Prompts(ALL_SHAPES[args.shape]["vocab_size"], seed=2)
        for batch in args.batches if args.by != "sequence" else ():
            ms = ms_per_step(llm, prompts, batch)
            vllm = VLLM_STEP_MS.get(batch, "-") if peers else "-"
            steps.append({"size": size, "batch": batch, "ms_per_step": ms, "vllm_ms": vllm})
            say(steps[-1])
        for length in args.lengths:
            cold, hit = ttft.cold_and_hit_ms(llm, prompts, length, args.rounds)
            vllm = VLLM_FIRST_MS.get(length, "-") if peers else "-"
            row = {"size": size, "prompt": length, "cold_ms": cold, "hit_ms": hit, "vllm_ms": vllm}
            first.append(row)
            say(row)
    return steps, first, ready


def compare(rows: Rows, key: str, figure: str) -> None:
    """Adds to each row what one GPU takes for the same over what it takes."""
    alone = {row[key]: row[figure] for row in rows if row["size"] == 1}
    for row in rows:
        row["over one"] = alone[row[key]] / row[figure] if row[key] in alone else "-"


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--by", choices=("tensor", "pipeline", "sequence"), required=True)
    parser.add_argument("--shape", choices=list(ALL_SHAPES), default="llama-3.1-8b")
    parser.add_argument("--sizes", type=numbers, default=[2, 1])
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32, 128])
    parser.add_argument("--lengths", type=numbers, default=[1024, 4096, 16384, 32768])
    parser.add_argument("--rounds", type=int, default=3, help="of a first token")
    parser.add_argument("--chunk", type=int, default=1024, help="pipeline: max_num_batched_tokens")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="beside the other two")
    parser.add_argument("--quantization")
    parser.add_argument("--experts", type=float, help="tensor: GiB in the banks of all GPUs")
    parser.add_argument("--disable-custom-all-reduce", action="store_true")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    if args.experts is not None and args.by != "tensor":
        parser.error("--experts: experts on the CPU go with --by tensor alone")
    steps: Rows = []
    first: Rows = []
    ready = {}
    about = {**settings_of(args, "shape chunk tensor_parallel_size experts"), "ready_s": ready}
    about["dtype"] = args.quantization or "bf16"
    for size in args.sizes:
        own_steps, own_first, ready[size] = measure(args, size)
        steps += own_steps
        first += own_first
        compare(steps, "batch", "ms_per_step")
        compare(first, "prompt", "cold_ms")
        name = f"{args.by}_parallel"
        write_results(name, {**about, "steps": steps, "first": first}, args.out)
    for table in filter(None, (steps, first)):
        print_table(table)


if __name__ == "__main__":
    main()
