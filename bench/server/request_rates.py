"""A server under rising load: throughput, first token and gaps between tokens by request rate.

    python -m bench.server.request_rates --model demo --device cpu --rates 2,4,8,16 [--out FILE]

The server runs as users start it, with `hetero-llm serve`, without a prefix cache; the client is
that of `hetero-llm bench serve`, on the same machine. Requests arrive at random times (a Poisson
process) for --seconds at each rate, with random prompts of --input-len token ids; each answer is a
stream of --output-len tokens. All rates follow each other --repeats times; figures are medians of
the repeats.

"req/s": finished requests over the time until the last of them; below "rate" the server has
fallen behind. "first", "gap": first token and gap between two tokens, in ms. "client cpu": cores
that the client used.
"""

from __future__ import annotations

import argparse
import asyncio
from statistics import median
from typing import Any

from bench.common import Rows, bench_parser, report, settings_of
from bench.server.http_serving import figures_of, served
from hetero_llm.bench_client.client import Server
from hetero_llm.bench_client.datasets import DatasetOptions
from hetero_llm.bench_client.load import Load
from hetero_llm.bench_client.report import Point
from hetero_llm.bench_client.serve import ServeBench, run_bench


def rates(text: str) -> list[float]:
    """Type of an argument: "0.5,8" -> [0.5, 8.0]."""
    return [float(word) for word in text.split(",")]


def row_of(point: Point) -> dict[str, Any]:
    """The figures of one rate."""
    figures, metrics = figures_of(point), point.pooled
    return {
        "rate": point.rate, "requests": metrics.completed, "req/s": metrics.request_throughput,
        **figures,
    }  # fmt: skip


def measure(args: argparse.Namespace, url: str) -> Rows:
    """One row for each rate."""
    points: list[Point] = []
    for index, rate in enumerate(args.rates * args.repeats):
        bench = ServeBench(
            Server(url), "/v1/completions", "hetero_llm", None,
            DatasetOptions(input_len=args.input_len, output_len=args.output_len,
                           vocab_size=args.vocab, seed=index),
            num_prompts=max(1, round(rate * args.seconds)), loads=(Load(rate, 1.0, None),),
            num_warmups=8, extra={"ignore_eos": True, "temperature": 0},
        )  # fmt: skip
        asyncio.run(run_bench(bench, lambda _, point: points.append(point)))
    rows = [row_of(point) for point in points]
    repeated = [rows[at :: len(args.rates)] for at in range(len(args.rates))]
    return [{name: median(row[name] for row in of) for name in of[0]} for of in repeated]


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rates", type=rates, default=[1.0, 2.0, 4.0, 8.0, 16.0, 24.0, 32.0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of arrivals at each rate")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=4000, help="random ids are below this")
    parser.add_argument("--budget", type=int, default=2048, help="max_num_batched_tokens")
    args = parser.parse_args()
    with served(args, args.budget) as server:
        rows = measure(args, server.url)
    about = settings_of(args, "model device seconds repeats input_len output_len budget")
    report("request_rates", about, rows, args.out)


if __name__ == "__main__":
    main()
