"""Throughput while the draft worker is dead or stopped, over our own run without drafts.

    python -m bench.speculation.draft_faults --model SCALE_UP --draft DRAFT [--batches 1,8]

Greedy, held-out prompts, draft model alone. The bench stops (SIGSTOP) or kills (SIGKILL) the worker
when the batch's first tokens are there, and times the rest of the batch. A stopped worker is
continued afterwards, so only a batch after the first waits for a new worker to load. Runs without
drafts come before, between and after the stopped ones: the median of each counts. After a kill a
new worker may start while the time runs, on cores of its own. With the target on a GPU, warm, batch
1 takes half a minute, nearly all of it for loading.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from statistics import median

from bench.common import Rows, bench_parser, report, settings_of
from bench.generation import add_requests, greedy
from bench.speculation.arms import Bench, add_arguments, batches_of

FAULTS = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}


def timed(bench: Bench, prompts: list[list[int]], tokens: int, fault: str | None) -> float:
    """Output tokens/s from the first tokens of all sequences to the last one, with the fault in
    between. A stopped worker is continued at the end."""
    engine = bench.engine
    add_requests(engine, f"{fault}-{time.monotonic_ns()}", prompts, greedy(tokens))
    stats = engine.scheduler.stats
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
    if fault == "stopped":
        with contextlib.suppress(ProcessLookupError):  # the engine may have ended it already
            os.kill(pid, signal.SIGCONT)
    while fault == "killed" and bench.draft is not None and bench.draft.worker.pid == pid:
        bench.draft.worker.check_health()  # until the client notices that it is dead
    return (stats.generation_tokens - done) / seconds


def wait_for_worker(bench: Bench) -> None:
    """Until one is up."""
    assert bench.draft is not None
    worker = bench.draft.worker
    worker.check_health()
    while not worker.is_up and worker.why_off is None:
        worker.poll(50_000)
        worker.check_health()
    if worker.why_off is not None:
        raise SystemExit(f"no draft worker any more: {worker.why_off}")


def measure(bench: Bench, prompts: list[list[int]], tokens: int, stops: int) -> dict[str, float]:
    """One row of the table, but for its batch."""
    runs: dict[str, list[float]] = {"none": [], **{fault: [] for fault in FAULTS}}

    def run(arm: str) -> None:
        bench.use("none" if arm == "none" else "draft")
        if arm != "none":
            wait_for_worker(bench)
        runs[arm].append(timed(bench, prompts, tokens, arm if arm in FAULTS else None))

    for arm in ("none", "draft"):  # compiles what is compiled at first use, and learns times
        bench.use(arm)
        timed(bench, prompts, tokens, None)
    run("none")
    for _ in range(stops):
        run("stopped")
        run("none")
    run("killed")
    rates = {name: median(found) for name, found in runs.items()}
    row = {"none tok/s": rates["none"]}
    for fault in FAULTS:
        row[f"{fault} tok/s"] = rates[fault]
        row[f"{fault} over none"] = rates[fault] / rates["none"]
    return row


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--model", required=True)
    add_arguments(parser)
    parser.set_defaults(batches=[1])
    parser.add_argument("--stops", type=int, default=2, help="runs with a stopped worker")
    args = parser.parse_args()
    if args.draft is None:
        parser.error("--draft is needed")
    begin = time.monotonic()
    bench = Bench(args)
    print(f"loaded after {time.monotonic() - begin:.0f} s", flush=True)
    table: Rows = []
    for size, batches in zip(args.batches, batches_of(args.batches, args.prompt), strict=True):
        if table:
            bench.use("none")
            wait_for_worker(bench)
        table.append({"batch": size, **measure(bench, batches[0], args.tokens, args.stops)})
        print(f"batch {size}: after {time.monotonic() - begin:.0f} s", flush=True)
    bench.close()
    report("draft_faults", settings_of(args, "model draft"), table, args.out)


if __name__ == "__main__":
    main()
