"""The same load through each API of a conversation, over /v1/completions.

    python -m bench.server.api_routes [--model demo] [--streams 8,64] [--rounds 7] [--out FILE]
    python -m bench.server.api_routes --shape llama-3.1-8b --device cuda --streams 32 --waves 4 \\
        --input-len 48 --output-len 128 --most-seconds 90

A server as users start it, whose chat template writes a message's text and nothing else, so that
every route computes the same prompts; streams of --output-len tokens, --streams at a time, without
a prefix cache. The routes follow each other in every round, each round in another order. The client
is that of `hetero-llm bench serve`, on the same machine. --shape: random weights and the made-up
vocabulary of `guided_decode`.

"of completions": output tokens/s over those of /v1/completions in the same round, median, least and
most of the rounds. "first over", "token over": medians of the same ratio of the time to the first
token and of the time of a later one, each a median of the load's streams. "api", "engine",
"client": microseconds of CPU time a token of the API's process, of its children (the engine, and
what renders chat templates) and of the client, medians; "api over" is the first one over that of
/v1/completions in the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.common import (
    Rows,
    bench_parser,
    machine_of,
    median_ratio,
    names_of,
    numbers,
    print_table,
    settings_of,
    write_results,
)
from bench.engine.guided_decode import write_tokenizer
from bench.server.processes import Serving, serving
from bench.shapes import CPU_SHAPES, SHAPES, write_config

BASE = "completions"
ROUTES = {
    BASE: "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Sample:
    """One load through one route: tokens of all prompts; output tokens/s; ms until a stream's
    first token and for each later one, medians; CPU microseconds a token of the API's process, its
    children and this process."""

    prompts: int
    speed: float
    first: float
    token: float
    api: float
    engine: float
    client: float


@contextmanager
def served(args: argparse.Namespace) -> Iterator[Serving]:
    """A server; it ends with the context. A shape becomes the folder `args.model`, too."""
    with tempfile.TemporaryDirectory() as place:
        template = Path(place) / "plain.jinja"
        template.write_text(TEMPLATE, encoding="utf-8")
        weights = []
        if args.shape:
            config = {**(SHAPES | CPU_SHAPES)[args.shape], "bos_token_id": 1, "eos_token_id": 2}
            args.model = str(write_config(config, Path(place)))
            write_tokenizer(Path(args.model), config["vocab_size"])
            weights = ["--load-format=dummy"]
        with serving(
            "serve", args.model, *weights, f"--device={args.device}",
            f"--chat-template={template}", "--disable-log-requests", "--disable-uvicorn-access-log",
            "--no-enable-prefix-caching", "--max-num-seqs=256", "--max-model-len=1024",
        ) as server:  # fmt: skip
            yield server


def cpu_seconds(pid: int) -> tuple[float, float]:
    """CPU time of a process, and of its children."""

    def own(one: int) -> float:
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / _TICKS

    children = [
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    ]
    return own(pid), sum(map(own, children))


def load(
    args: argparse.Namespace, server: Serving, route: str, streams: int, *, seed: int
) -> Sample:
    """Sends one load."""
    from hetero_llm.bench_client.client import Server
    from hetero_llm.bench_client.datasets import DatasetOptions
    from hetero_llm.bench_client.load import Load
    from hetero_llm.bench_client.report import Point
    from hetero_llm.bench_client.serve import ServeBench, run_bench

    points: list[Point] = []
    bench = ServeBench(
        Server(server.url), ROUTES[route], "hetero_llm", args.model,
        DatasetOptions(prompt_as="text", input_len=args.input_len, output_len=args.output_len,
                       seed=seed),
        num_prompts=streams * args.waves, loads=(Load(float("inf"), 1.0, streams),),
        num_warmups=0, tokenizer=args.model, extra={"ignore_eos": True, "temperature": 0},
    )  # fmt: skip
    before, client = cpu_seconds(server.pid), time.process_time()
    asyncio.run(run_bench(bench, lambda _, point: points.append(point)))
    after, client = cpu_seconds(server.pid), time.process_time() - client
    metrics = points[0].pooled
    assert metrics.failed == 0, metrics.errors
    tokens = streams * args.waves * args.output_len
    assert metrics.total_output == tokens, (route, metrics.total_output, tokens)
    api, engine = ((b - a) / tokens * 1e6 for a, b in zip(before, after, strict=True))
    first, token = (metrics.latencies[name].median for name in ("ttft", "tpot"))
    assert first is not None and token is not None
    return Sample(
        metrics.total_input, metrics.output_throughput, first, token, api, engine,
        client / tokens * 1e6,
    )  # fmt: skip


def measured(args: argparse.Namespace, server: Serving, streams: int) -> Rows:
    """One row for each route."""
    found: dict[str, list[Sample]] = {route: [] for route in args.routes}
    end = time.monotonic() + args.most_seconds / len(args.streams)
    for number in range(args.rounds + 1):
        if found[BASE] and time.monotonic() > end:
            break
        turn = number % len(args.routes)
        for route in [*args.routes[turn:], *args.routes[:turn]]:
            sample = load(args, server, route, streams, seed=number)
            if number:  # the first round warms up
                found[route].append(sample)
    return [row_of(route, streams, found[route], found[BASE]) for route in args.routes]


def row_of(route: str, streams: int, samples: list[Sample], base: list[Sample]) -> dict[str, Any]:
    assert [one.prompts for one in samples] == [one.prompts for one in base], "not the same prompts"
    ratios = [one.speed / other.speed for one, other in zip(samples, base, strict=True)]

    def over(name: str) -> float:
        return median_ratio(*([getattr(one, name) for one in each] for each in (samples, base)))

    return {
        "streams": streams, "route": route, "rounds": len(samples),
        "tok/s": median(one.speed for one in samples),
        "of completions": median(ratios), "least": min(ratios), "most": max(ratios),
        "first ms": median(one.first for one in samples), "first over": over("first"),
        "token ms": median(one.token for one in samples), "token over": over("token"),
        "api": median(one.api for one in samples), "api over": over("api"),
        "engine": median(one.engine for one in samples),
        "client": median(one.client for one in samples),
    }  # fmt: skip


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--model", help="default: demo")
    parser.add_argument("--shape", choices=list(SHAPES | CPU_SHAPES), help="instead of a model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--routes", type=names_of(tuple(ROUTES)), default=list(ROUTES))
    parser.add_argument("--streams", type=numbers, default=[8, 64])
    parser.add_argument("--waves", type=int, default=2, help="requests of each stream")
    parser.add_argument("--input-len", type=int, default=16, help="words of a prompt")
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--most-seconds", type=float, default=float("inf"),
                        help="no round begins later, start-up apart")  # fmt: skip
    args = parser.parse_args()
    if args.model and args.shape:
        parser.error("--shape: instead of --model")
    args.model = args.model or "demo"
    if BASE not in args.routes:
        parser.error(f"--routes: {BASE} is what the others are compared with")
    rows: Rows = []
    with served(args) as server:
        load(args, server, "chat", 1, seed=0)  # the process of the template starts
        for streams in args.streams:
            rows += measured(args, server, streams)
            print_table(rows)
    args.model = args.shape or args.model
    about = settings_of(args, "model device waves input_len output_len")
    name = f"api_routes.{about['model']}.{machine_of(args.device)}"
    write_results(name, {**about, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
