"""What the lookahead cache leaves of the device's time, and how far bfloat16 lets outputs drift.

    python -m bench.speculation.lookahead_gaps --model SCALE_UP [--batches 1,8,64] [--out FILE]

"gap": milliseconds from the end of a verify step's graph to the launch of the next one's, by
events: results, bookkeeping, lookups, filling the step input buffer. Greedy, held-out prompts, cold
hybrid cache.
"same as plain": the share of tokens before a sequence's first difference from the same batch
without drafts; "floor": the same share of the prompts run one at a time against that batch,
both without drafts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.common import bench_parser, report, settings_of
from bench.speculation.arms import Bench, add_arguments, batches_of
from bench.speculation.graph_clock import GraphClock, same_share
from hetero_llm.gpu.model_runner import GpuModelRunner

_VERIFY = ("verify", "short verify")


def measure(bench: Bench, batch: list[list[int]], arm: str, *, floor: bool) -> dict[str, Any]:
    """One row of the table."""
    runner = bench.engine.runner
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
    parser = bench_parser(__doc__)
    parser.add_argument("--model", required=True, help="a scale-up of the demo target")
    add_arguments(parser)
    parser.set_defaults(batches=[1, 8, 64])
    parser.add_argument("--arms", nargs="+", default=["hybrid", "merged"])
    parser.add_argument("--floor", type=int, default=8, help="batch whose prompts also run alone")
    args = parser.parse_args()
    bench = Bench(args)
    groups = batches_of(args.batches, args.prompt)
    table = [
        measure(bench, batches[0], arm, floor=size == args.floor)
        for size, batches in zip(args.batches, groups, strict=True)
        for arm in args.arms
    ]
    bench.close()
    report("lookahead_gaps", settings_of(args, "model prompt tokens"), table, args.out)


if __name__ == "__main__":
    main()
