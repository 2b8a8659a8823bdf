"""Decode steps and first tokens of one engine whose layers are cut into stages, one GPU each.

    python -m bench.engine.pipeline_parallel [--shape llama-3.1-8b] [--sizes 2,1] [--out FILE]

Methods and tables of `bench.engine.tensor_parallel`: greedy, 128 tokens behind prompts of 128, and
cold first tokens. "ms_per_step" is the time in which every sequence gets a token: with two stages
the sequences are two groups, so two steps of half the batch run in it. Random weights.

Predictions for Llama-3.1-8B in bf16, two stages on two H200, from one GPU's 3.95 / 4.1 / 4.6 / 6.3
ms at batch 1 / 8 / 32 / 128 and 110 / 483 ms for prompts of 4K / 16K tokens: a step of half the
batch goes through both stages while the other half's does, so each sequence gets a token in the
time of one step of half the batch, plus what a hand-over takes twice (a receive and a send outside
of graphs, 30 to 60 us each): 4.1 / 4.1 / 4.4 / 5.4 ms. Prompts in chunks of 1024: c chunks take
(c + 1) / (2 c) of one GPU's time: 1K 1.0, 4K 0.63, 16K 0.53.
"""

from __future__ import annotations

from bench.common import bench_parser, numbers, print_table, write_results
from bench.engine.tensor_parallel import Rows, compare, measure
from bench.shapes import SHAPES


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--sizes", type=numbers, default=[2, 1])
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32, 128])
    parser.add_argument("--lengths", type=numbers, default=[1024, 4096, 16384])
    parser.add_argument("--chunk", type=int, default=1024, help="max_num_batched_tokens of stages")
    parser.add_argument("--quantization")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    steps: Rows = []
    first: Rows = []
    ready = {}
    for size in args.sizes:
        engine_args = {
            "device": args.device, "quantization": args.quantization,
            "pipeline_parallel_size": size, "tensor_parallel_size": 1,
            "max_num_batched_tokens": args.chunk if size > 1 else 16384,
        }  # fmt: skip
        own_steps, own_first, ready[size] = measure(
            args.shape, size, args.batches, args.lengths, engine_args
        )
        steps += own_steps
        first += own_first
        compare(steps, "batch", "ms_per_step")
        compare(first, "prompt", "cold_ms")
        about = {
            "shape": args.shape, "dtype": args.quantization or "bf16", "chunk": args.chunk,
            "ready_s": ready,
        }  # fmt: skip
        write_results("pipeline_parallel", {**about, "steps": steps, "first": first}, args.out)
    print_table(steps)
    print_table(first)


if __name__ == "__main__":
    main()
