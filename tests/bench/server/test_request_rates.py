"""bench/server/request_rates.py: the figures of a rate, and that no failure is a figure."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from bench.server import request_rates
from bench.server.request_rates import measure, rates, row_of
from hetero_llm.bench_client.serve import ServeBench
from tests.bench_client.points import FAILED, OK, SLOW, point, run


def test_figures_of_a_rate() -> None:
    row = row_of(point(run([OK, SLOW], 4.0, None), rate=2.0))
    assert (row["rate"], row["requests"], row["req/s"]) == (2.0, 2, 0.5)
    assert row["tok/s"] == 10 / 4.0
    assert (row["first p50"], row["gap p50"]) == (750.0, 1250.0)
    assert row["first p50"] < row["first p99"] <= 1000.0
    assert row["client cpu"] == 0.5


def test_a_failure_is_no_figure() -> None:
    with pytest.raises(AssertionError, match="503"):
        row_of(point(run([OK, FAILED], 4.0, None), rate=2.0))


def test_every_rate_has_its_requests_and_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    benches: list[ServeBench] = []

    async def run_bench(bench: ServeBench, report: Any) -> None:
        benches.append(bench)
        seconds = (2.0, 2.0, 1.0, 1.0, 8.0, 4.0)[len(benches) - 1]
        report("demo", point(run([OK], seconds, None), rate=bench.loads[0].rate))

    monkeypatch.setattr(request_rates, "run_bench", run_bench)
    args = argparse.Namespace(
        rates=rates("0.5,8"), seconds=4.0, repeats=3, input_len=16, output_len=8, vocab=100
    )
    rows = measure(args, "http://127.0.0.1:1")
    assert [(row["rate"], row["req/s"]) for row in rows] == [(0.5, 1 / 2.0), (8.0, 1 / 2.0)]
    sent = [(bench.loads[0].rate, bench.num_prompts) for bench in benches]
    assert sent == [(0.5, 2), (8.0, 32)] * 3
    assert len({bench.dataset.seed for bench in benches}) == 6, "no run sends known prompts"
