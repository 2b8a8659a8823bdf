"""Throughput while the draft worker is dead or stopped, over our own run without drafts.

    python -m bench.draft_faults --model SCALE_UP --draft DRAFT [--batches 1,8] [--out FILE]

Greedy, held-out prompts, draft model alone. The worker is killed (SIGKILL) or stopped (SIGSTOP)
when the batch's first tokens are there; what follows is timed. A new worker may start meanwhile, on
cores of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from bench.common import print_table, write_results
from bench.speculation import Bench, batches_of
from hetero_llm import SamplingParams
from hetero_llm.engine.input_processor import parse_prompts

FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def timed(bench: Bench, prompts: list[list[int]], tokens: int, fault: str | None) -> float:
    """Output tokens/s from the first tokens of all sequences to the last one. After a fault there
    is a new worker."""
    engine = bench.engine
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    name = f"{fault}-{time.monotonic_ns()}"
    for index, ids in enumerate(prompts):
        (prompt,) = parse_prompts(None, [ids])
        engine.add_request(engine.make_request(f"{name}-{index}", prompt, params))
    stats = engine._scheduler.stats
    enough = stats.generation_tokens + len(prompts)
    while stats.generation_tokens < enough:
        engine.step()
    done = stats.generation_tokens
    pid = 0
    if fault is not None:
        assert bench.draft is not None and bench.draft.worker.pid is not None
        pid = bench.draft.worker.pid
        os.kill(pid, FAULTS[fault])
    begin = time.perf_counter()
    while engine.has_unfinished:
        engine.step()
    seconds = time.perf_counter() - begin
    engine.reset_prefix_cache()
    if fault is not None:
        with contextlib.suppress(ProcessLookupError):  # the engine may have found out already
            os.kill(pid, signal.SIGKILL)
        wait_for_another(bench, pid)
    return (stats.generation_tokens - done) / seconds


def wait_for_another(bench: Bench, pid: int) -> None:
    """Until another worker is up."""
    assert bench.draft is not None
    worker = bench.draft.worker
    while worker.pid in (None, pid) or not worker.is_up:
        worker.poll(50_000)
        worker.look_after()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--draft-tokens", type=int, default=6)
    parser.add_argument("--draft-threads", type=int)
    parser.add_argument("--draft-weights", default="auto")
    parser.add_argument("--overlap", default="auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", type=lambda s: [int(w) for w in s.split(",")], default=[1, 8])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--out", help="JSON file")
    parser.set_defaults(temperature=0.0)
    args = parser.parse_args()
    bench = Bench(args)
    table: list[dict[str, Any]] = []
    for size, batches in zip(args.batches, batches_of(args.batches, args.prompt), strict=True):
        bench.use("none")
        timed(bench, batches[0], args.tokens, None)
        row: dict[str, Any] = {"batch": size}
        row["none tok/s"] = timed(bench, batches[0], args.tokens, None)
        bench.use("draft")
        timed(bench, batches[0], args.tokens, None)  # learns times of steps
        for fault in FAULTS:
            bench.use("draft")
            rate = timed(bench, batches[0], args.tokens, fault)
            row[f"{fault} tok/s"], row[f"{fault} over none"] = rate, rate / row["none tok/s"]
        table.append(row)
    bench.close()
    print_table(table)
    write_results(
        "draft_faults",
        {"model": Path(args.model).name, "draft": Path(args.draft).name, "rows": table},
        args.out,
    )


if __name__ == "__main__":
    main()
