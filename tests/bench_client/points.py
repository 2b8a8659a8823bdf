"""Loads with known figures, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetero_llm.bench_client.client import RequestResult
from hetero_llm.bench_client.load import ClientHealth
from hetero_llm.bench_client.metrics import count_request, summarise
from hetero_llm.bench_client.report import Point, Run
from hetero_llm.bench_client.serve import pooled
from hetero_llm.bench_client.wire_format import Usage

PERCENTILES = (90.0, 99.0)

OK = RequestResult(0.0, 0.25, 0.75, 2.75, (0.5, 1.5), "a b", 0, Usage(100, 5), "length", None)
SLOW = replace(OK, arrival=1.0, start=1.0, first=2.0, last=5.0, itls=(1.0, 2.0), text="c")
FAILED = replace(OK, first=None, last=None, itls=(), text="", usage=None, error="HTTP 503: full")


def run(results: Sequence[RequestResult], duration: float, retokenized: int | None) -> Run:
    counts = [count_request(r, prompt_tokens=None, retokenized=None) for r in results]
    metrics = summarise(
        results, counts, duration=duration, retokenized=retokenized, percentiles=PERCENTILES
    )
    return Run(metrics, results, counts, ClientHealth(0.001, 0.002, 0.5))


def point(*runs: Run, rate: float = float("inf"), max_concurrency: int | None = None) -> Point:
    return Point("taco_llm", rate, max_concurrency, pooled(runs, PERCENTILES), runs)
