"""What the server adds: closed loads through HTTP beside the same loads on the engine alone.

    python -m bench.server.http_serving --model FOLDER [--budgets 2048,8192] [--out FILE]

Random prompts of token ids, distinct, no prefix cache; streams of 128 new tokens with text. A load
of C streams keeps C requests in flight until all are done. "offline" drives `Engine.step` in this
process with the same settings. The server runs as users start it, with `hetero-llm serve`, and the
client on the same machine. `http_first_token` measures what HTTP adds to the first token while both
engines are loaded, so the device needs memory for two.

--record-status FILE keeps the readings of the server's status page, one a second, during the loads
(of the last budget).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import (
    Rows,
    bench_parser,
    environment,
    numbers,
    print_table,
    write_results,
)
from bench.generation import add_requests, greedy, step_outputs
from bench.server.http_first_token import ROUNDS, compare
from bench.server.processes import HOST, Serving, serving
from bench.server.status_recording import recorded
from hetero_llm import LLM
from hetero_llm.bench_client.client import Server
from hetero_llm.bench_client.datasets import DatasetOptions
from hetero_llm.bench_client.load import Load
from hetero_llm.bench_client.report import Point
from hetero_llm.bench_client.serve import ServeBench, run_bench

TOKENS = 128
SERVER_MEMORY = 0.45
"""The server's share of the GPU: the other engine takes the same out of the default of 0.9."""


@dataclass(frozen=True, slots=True)
class Row:
    """One load: `requests` prompts of `length` tokens, `streams` at a time. `vllm` has its output
    tokens/s, first token p50, and gaps between tokens p50 and p99 in ms (version 0.22.1, one H200,
    Llama-3.1-8B shape)."""

    streams: int
    length: int
    requests: int
    vllm: tuple[float, float, float, float]


ROWS = (
    Row(1, 1024, 12, (188, 26.2, 4.87, 5.46)),
    Row(8, 1024, 48, (1235, 160, 5.24, 6.24)),
    Row(64, 1024, 192, (3661, 483, 7.6, 161)),
    Row(256, 128, 768, (16343, 584, 9.6, 47)),
)


@contextmanager
def served(args: argparse.Namespace, budget: int) -> Iterator[Serving]:
    """A server without a prefix cache; it ends with the context."""
    values = settings(args, budget) | {"gpu_memory_utilization": SERVER_MEMORY}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    words = ("serve", args.model, "--no-enable-prefix-caching", "--disable-log-requests", *flags)
    with serving(*words) as server:
        yield server


def through_http(args: argparse.Namespace, url: str, rows: list[Row]) -> Rows:
    """Each row's figures."""
    recording: AbstractContextManager[None] = nullcontext()
    if args.record_status:
        source = f"bench/server/http_serving.py on {environment()['gpu'] or 'a CPU'}"
        recording = recorded(url, args.model, Path(args.record_status), source=source)
    with recording:
        return [http_row(url, row, args.vocab) for row in rows]


def http_row(url: str, row: Row, vocab: int) -> dict[str, Any]:
    points: list[Point] = []
    bench = ServeBench(
        Server(url), "/v1/completions", "hetero_llm", None,
        DatasetOptions(input_len=row.length, output_len=TOKENS, vocab_size=vocab, seed=row.streams),
        num_prompts=row.requests, loads=(Load(float("inf"), 1.0, row.streams),),
        num_warmups=min(row.streams, 8), extra={"ignore_eos": True, "temperature": 0},
    )  # fmt: skip
    asyncio.run(run_bench(bench, lambda _, point: points.append(point)))
    return {"streams": row.streams, **figures_of(points[0])}


def figures_of(point: Point) -> dict[str, float]:
    """Throughput, latencies in ms, and cores that the client used. A failed request ends the
    bench."""
    metrics = point.pooled
    assert metrics.failed == 0, metrics.errors
    first, gap = metrics.latencies["ttft"], metrics.latencies["itl"]
    return {
        "tok/s": metrics.output_throughput,
        "first p50": first.median, "first p99": first.percentiles[99.0],
        "gap p50": gap.median, "gap p99": gap.percentiles[99.0],
        "client cpu": max(run.health.cpu for run in point.runs),
    }  # fmt: skip


def settings(args: argparse.Namespace, budget: int) -> dict[str, Any]:
    return {"device": args.device, "max_num_seqs": 256, "max_model_len": 2048,
            "max_num_batched_tokens": budget}  # fmt: skip


def offline(args: argparse.Namespace, llm: LLM, rows: list[Row]) -> list[float]:
    """Output tokens/s of each row."""
    rng = random.Random(5)
    prompts = [
        [[rng.randrange(args.vocab) for _ in range(row.length)] for _ in range(row.requests)]
        for row in rows
    ]
    closed(llm, prompts[0][:1], 1, "warm")
    found = []
    for row, batch in zip(rows, prompts, strict=True):
        closed(llm, [ids[::-1] for ids in batch[: row.streams]], row.streams, f"warm{row.streams}")
        seconds = closed(llm, batch, row.streams, str(row.streams))
        found.append(row.requests * TOKENS / seconds)
    return found


def closed(llm: LLM, prompts: list[list[int]], streams: int, name: str) -> float:
    """Seconds for all prompts, `streams` at a time."""
    engine = llm.engine
    params = greedy(TOKENS, detokenize=True)
    waiting = enumerate(prompts)
    begin = time.perf_counter()

    def send() -> None:
        for index, ids in waiting:
            add_requests(engine, f"{name}-{index}", [ids], params)
            return

    for _ in range(streams):
        send()
    while engine.has_unfinished:
        for _ in step_outputs(engine):
            send()
    return time.perf_counter() - begin


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--vocab", type=int, default=4000, help="random ids are below this")
    parser.add_argument(
        "--budgets", type=numbers, default=[2048], help="values of max_num_batched_tokens"
    )
    parser.add_argument("--streams", type=numbers, default=[row.streams for row in ROWS])
    parser.add_argument("--scale", type=float, default=1.0, help="times as many requests")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="first tokens of each kind")
    parser.add_argument("--record-status", metavar="FILE", help="keep what the status page shows")
    args = parser.parse_args()
    rows = [
        Row(row.streams, row.length, max(row.streams, int(row.requests * args.scale)), row.vllm)
        for row in ROWS
        if row.streams in args.streams
    ]
    table: Rows = []
    firsts: Rows = []
    for budget in args.budgets:
        with served(args, budget) as server:
            http = through_http(args, server.url, rows)
            # The server stays: it has nothing to do, and is needed for the first tokens.
            with LLM(args.model, enable_prefix_caching=False, **settings(args, budget)) as llm:
                alone = offline(args, llm, rows)
                first = compare(llm, HOST, server.port, vocab=args.vocab, rounds=args.rounds)
                firsts.append({"budget": budget, **first})
        for row, ours, speed in zip(rows, http, alone, strict=True):
            names = ("vLLM tok/s", "vLLM first p50", "vLLM gap p50", "vLLM gap p99")
            table.append({"budget": budget, "ready s": server.ready, **ours, "offline tok/s": speed,
                          "of offline": ours["tok/s"] / speed,
                          **dict(zip(names, row.vllm, strict=True))})  # fmt: skip
        print_table(table)
        print("The first token of 1024 in, in ms:")
        print_table(firsts)
    results = {"model": Path(args.model).name, "rows": table, "first_token": firsts}
    write_results(f"http_serving.{args.device}", results, args.out)


if __name__ == "__main__":
    main()
