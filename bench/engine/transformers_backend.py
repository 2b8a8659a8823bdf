"""Decode speed of one model through its native family and through its class of transformers.

Random bf16 weights, the same engine settings, one after the other in this process; method of
`bench.engine.decode` (ms per step from the difference of a long and a short run). `of_native` is
the back end's throughput as a share of the native family's at the same batch. Without a GPU, the
native family runs on torch as well: the executor would be another comparison.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.common import print_table, write_results
from bench.engine.decode import STEPS, batch_list, ms_per_step
from bench.shapes import SHAPES, Prompts, write_shape
from hetero_llm import LLM

IMPLEMENTATIONS = ("native", "transformers")


def measure(
    shape: str, model_impl: str, batches: list[int], *, device: str, steps: int
) -> tuple[dict[int, float], float]:
    """Batch -> ms per step, and the seconds until the engine was ready."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        llm = LLM(
            str(write_shape(shape, Path(folder))), load_format="dummy", skip_tokenizer_init=True,
            dtype="bfloat16", device=device, model_impl=model_impl, cpu_backend="torch",
            max_model_len=1024, max_num_seqs=max(batches), enable_prefix_caching=False,
            gpu_memory_utilization=0.7,
        )  # fmt: skip
        ready = time.perf_counter() - begin
        with llm:
            prompts = Prompts(shape)
            found = {batch: ms_per_step(llm, prompts, batch, steps=steps) for batch in batches}
    del llm
    gc.collect()
    return found, ready


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--batches", type=batch_list, default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", help="JSON file")
    args = parser.parse_args()
    found, ready = {}, {}
    for name in IMPLEMENTATIONS:
        found[name], ready[name] = measure(
            args.shape, name, args.batches, device=args.device, steps=args.steps
        )
    rows: list[dict[str, Any]] = [
        {
            "batch": batch,
            **{f"{name}_ms": found[name][batch] for name in IMPLEMENTATIONS},
            "of_native": found["native"][batch] / found["transformers"][batch],
        }
        for batch in args.batches
    ]
    result = {"shape": args.shape, "dtype": "bf16", "ready_s": ready, "rows": rows}
    write_results("transformers_backend", result, args.out)
    print_table(rows)


if __name__ == "__main__":
    main()
