"""Decode speed of one model through its native family and through its class of transformers.

Random bf16 weights, the same engine settings, one after the other in this process; method of
`bench.engine.decode` (ms per step from the difference of a long and a short run). `of_native` is
the back end's throughput as a share of the native family's at the same batch. Without a GPU, the
native family runs on torch as well: the executor would be another comparison.
"""

from __future__ import annotations

from bench.common import Rows, bench_parser, numbers, report
from bench.engine.decode import STEPS, ms_per_step
from bench.shapes import SHAPES, Prompts, start

IMPLEMENTATIONS = ("native", "transformers")


def measure(
    shape: str, model_impl: str, batches: list[int], *, device: str, steps: int
) -> tuple[dict[int, float], float]:
    """Batch -> ms per step, and the seconds until the engine was ready."""
    llm, ready = start(
        SHAPES[shape], dtype="bfloat16", device=device, model_impl=model_impl, cpu_backend="torch",
        max_model_len=1024, max_num_seqs=max(batches), enable_prefix_caching=False,
        gpu_memory_utilization=0.7,
    )  # fmt: skip
    with llm:
        prompts = Prompts(SHAPES[shape]["vocab_size"])
        found = {batch: ms_per_step(llm, prompts, batch, steps=steps) for batch in batches}
    return found, ready


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    found, ready = {}, {}
    for name in IMPLEMENTATIONS:
        found[name], ready[name] = measure(
            args.shape, name, args.batches, device=args.device, steps=args.steps
        )
    rows: Rows = [
        {
            "batch": batch,
            **{f"{name}_ms": found[name][batch] for name in IMPLEMENTATIONS},
            "of_native": found["native"][batch] / found["transformers"][batch],
        }
        for batch in args.batches
    ]
    about = {"shape": args.shape, "dtype": "bf16", "ready_s": ready}
    report("transformers_backend", about, rows, args.out)


if __name__ == "__main__":
    main()
