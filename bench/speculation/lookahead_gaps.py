"""What the lookahead cache leaves of the device's time, and how far bfloat16 lets outputs drift.

    python -m bench.speculation.lookahead_gaps --model SCALE_UP [--batches 1,8,64] [--out FILE]

"gap": milliseconds from the end of a verify step's graph to the launch of the next one's, by
events: results, bookkeeping, lookups, packing. Greedy, held-out prompts, cold hybrid cache.
"same as plain": the share of tokens before a sequence's first difference from the same batch
without drafts; beside it the floor, the same prompts one at a time against that batch, both
without drafts.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import print_table, write_results
from bench.speculation.graph_clock import GraphClock, same_share
from bench.speculation.speedup import Bench, batches_of
from hetero_llm.gpu.model_runner import GpuModelRunner

_VERIFY = ("verify", "short verify")


def measure(bench: Bench, batch: list[list[int]], arm: str, *, floor: bool) -> dict[str, Any]:
    """One row of the table."""
    runner = bench.engine._runner
    assert isinstance(runner, GpuModelRunner)
    plain, _ = bench.run("none", [batch])
    bench.run(arm, [batch])  # learns times of steps
    clock = GraphClock(runner)
    drafted, figures = bench.run(arm, [batch])
    gaps = clock.gaps(_VERIFY)
    clock.stop()
    row: dict[str, Any] = {
        "batch": len(batch), "drafts": arm, "gap p50": float(np.median(gaps)),
        "gap p90": float(np.quantile(gaps, 0.9)), "gaps": len(gaps),
        "tokens/step": figures["tokens/step"], "same as plain": same_share(plain, drafted),
    }  # fmt: skip
    if floor:
        alone, _ = bench.run("none", [[prompt] for prompt in batch])
        row["floor"] = same_share(plain, alone)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a scale-up of the demo target")
    parser.add_argument(
        "--batches", type=lambda s: [int(w) for w in s.split(",")], default=[1, 8, 64]
    )
    parser.add_argument("--arms", nargs="+", default=["hybrid", "merged"])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="behind the first")
    parser.add_argument("--floor", type=int, default=8, help="batch whose prompts also run alone")
    parser.add_argument("--out", help="JSON file")
    parser.set_defaults(temperature=0.0, draft=None, device="cuda", dtype="bfloat16")
    args = parser.parse_args()
    bench = Bench(args)
    groups = batches_of(args.batches, args.prompt)
    table = [
        measure(bench, batches[0], arm, floor=size == args.floor)
        for size, batches in zip(args.batches, groups, strict=True)
        for arm in args.arms
    ]
    bench.close()
    print_table(table)
    settings = {"model": Path(args.model).name, "prompt": args.prompt, "tokens": args.tokens}
    write_results("lookahead_gaps", {**settings, "rows": table}, args.out)


if __name__ == "__main__":
    main()
