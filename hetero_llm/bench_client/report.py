"""Writes a load's figures as TACO-LLM's result block and CSV, and as vLLM's JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_llm.bench_client.client import RequestResult
from hetero_llm.bench_client.load import ClientHealth
from hetero_llm.bench_client.metrics import METRICS, Counted, Metrics, Spread, confidence

TITLES = {
    "e2el": ("End-to-End Latency", "E2E Latency"),
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
}
"""Metric -> section and name in the block, in the block's order."""

SERVER_SWITCHES = (
    "enable_prefix_cache",
    "enable_cache_offload",
    "enable_hit_cnt",
    "enable_lookahead",
)
"""Columns of the CSV that only `--metadata` can fill: a client cannot see them."""

_LABEL_WIDTH = 40
_MISSING = "n/a"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a load: its figures and the results from which they were computed."""

    metrics: Metrics
    results: Sequence[RequestResult]
    counts: Sequence[Counted]
    health: ClientHealth


@dataclass(frozen=True, slots=True)
class Point:
    """One load and all its runs. `pooled`: figures of the requests of all runs over the sum of
    their durations. `rate` is in requests per second; `max_concurrency` None: no limit."""

    backend: str
    rate: float
    max_concurrency: int | None
    pooled: Metrics
    runs: Sequence[Run]


# The block


def result_block(
    backend: str,
    rate: float,
    metrics: Metrics,
    *,
    percentile_metrics: Sequence[str],
    percentiles: Sequence[float],
) -> str:
    """TACO-LLM's block, with its labels in its order. Shows `percentiles`, which `metrics` must
    have, of `percentile_metrics`."""
    rows = [
        ("Backend:", backend),
        ("Traffic request rate:", f"{rate:g}"),
        ("Successful requests:", str(metrics.completed)),
        ("Benchmark duration (s):", f"{metrics.duration:.2f}"),
        ("Total input tokens:", str(metrics.total_input)),
        ("Total generated tokens:", str(metrics.total_output)),
        ("Total generated tokens (retokenized):", _count(metrics.retokenized)),
        ("Request throughput (req/s):", f"{metrics.request_throughput:.2f}"),
        ("Input token throughput (tok/s):", f"{metrics.input_throughput:.2f}"),
        ("Output token throughput (tok/s):", f"{metrics.output_throughput:.2f}"),
    ]
    lines = ["===== Serving Benchmark Result =====", *map(_row, rows)]
    for name, (section, label) in TITLES.items():
        lines.append(f"-----{section}-----")
        spread = metrics.latencies[name]
        shown = [("Mean", spread.mean), ("Median", spread.median)]
        if name in percentile_metrics:
            shown += [(f"P{wanted:g}", spread.percentiles[wanted]) for wanted in percentiles]
        lines += [_row((f"{word} {label} (ms):", _milliseconds(value))) for word, value in shown]
    return "\n".join([*lines, "====="]) + "\n"


def remarks(metrics: Metrics, health: ClientHealth, *, max_concurrency: int | None) -> str:
    """Lines that TACO's block does not have: failures, concurrency, sources of the counts, delay of
    the client."""
    lines = []
    if metrics.failed:
        lines.append(_row(("Failed requests:", str(metrics.failed))))
        lines += [f"  {count} x {error}" for error, count in metrics.errors.items()]
    if max_concurrency is not None:
        lines.append(_row(("Maximum request concurrency:", str(max_concurrency))))
    if metrics.goodput is not None:
        lines.append(_row(("Request goodput (req/s):", f"{metrics.goodput:.2f}")))
    lines.append(_row(("Total token throughput (tok/s):", f"{metrics.total_throughput:.2f}")))
    sources = ", ".join(f"{name} {count}" for name, count in sorted(metrics.sources.items()))
    lines.append(_row(("Token counts from:", sources or _MISSING)))
    lines.append(_row(("Client delay p99 (ms):", f"{health.lag_p99 * 1e3:.2f}")))
    if metrics.uncounted:
        lines.append(
            f"{metrics.uncounted} answers came without usage and are missing from the token "
            "totals; --tokenizer would count them"
        )
    return "\n".join(lines) + "\n"


def confidence_table(runs: Sequence[Metrics], percentiles: Sequence[float]) -> str:
    """Mean over runs and 95% confidence interval of each figure."""
    lines = [f"----- Over {len(runs)} runs: mean and 95% confidence -----"]
    for label, values in _by_run(runs, percentiles).items():
        if any(value is None for value in values):
            lines.append(_row((label, _MISSING)))
            continue
        known = [value for value in values if value is not None]
        mean = sum(known) / len(known)
        lines.append(_row((label, f"{mean:.2f} +- {confidence(known):.2f}")))
    return "\n".join(lines) + "\n"


def _by_run(runs: Sequence[Metrics], percentiles: Sequence[float]) -> dict[str, list[float | None]]:
    rows: dict[str, list[float | None]] = {
        "Request throughput (req/s):": [run.request_throughput for run in runs],
        "Input token throughput (tok/s):": [run.input_throughput for run in runs],
        "Output token throughput (tok/s):": [run.output_throughput for run in runs],
    }
    for name, (_, label) in TITLES.items():
        rows[f"Mean {label} (ms):"] = [run.latencies[name].mean for run in runs]
        rows[f"Median {label} (ms):"] = [run.latencies[name].median for run in runs]
        for wanted in percentiles:
            values = [run.latencies[name].percentiles[wanted] for run in runs]
            rows[f"P{wanted:g} {label} (ms):"] = values
    return rows


def _row(row: tuple[str, str]) -> str:
    return f"{row[0]:<{_LABEL_WIDTH}} {row[1]}"


def _milliseconds(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.2f}"


def _count(value: int | None) -> str:
    return _MISSING if value is None else str(value)


# JSON


def as_json(point: Point, *, about: Mapping[str, Any], detailed: bool) -> dict[str, Any]:
    """One load under vLLM's keys, latencies in ms and lists in seconds.

    Args:
        about: what was benched: date, backend, model and the like; stands first.
        detailed: add the lists with one entry for each request, and its text.
    """
    scalars = _scalars(point.pooled)
    worst = max((run.health for run in point.runs), key=lambda health: health.lag_p99)
    answer: dict[str, Any] = {
        **about,
        "request_rate": "inf" if point.rate == float("inf") else point.rate,
        "max_concurrency": point.max_concurrency,
        **scalars,
        "token_count_sources": point.pooled.sources,
        "error_counts": point.pooled.errors,
        "client_lag_p99_ms": worst.lag_p99 * 1e3,
        "client_lag_max_ms": worst.lag_max * 1e3,
        "client_cpu_ratio": max(run.health.cpu for run in point.runs),
        "num_runs": len(point.runs),
    }
    if len(point.runs) > 1:
        each = [_scalars(run.metrics) for run in point.runs]
        answer["runs"] = each
        answer["ci95"] = {
            key: confidence([run[key] for run in each])
            for key in scalars
            if all(isinstance(run[key], (int, float)) for run in each)
        }
    return answer | (_details(point.runs) if detailed else {})


def _scalars(metrics: Metrics) -> dict[str, Any]:
    found: dict[str, Any] = {
        "duration": metrics.duration,
        "completed": metrics.completed,
        "failed": metrics.failed,
        "total_input_tokens": metrics.total_input,
        "total_output_tokens": metrics.total_output,
        "total_output_tokens_retokenized": metrics.retokenized,
        "uncounted": metrics.uncounted,
        "request_throughput": metrics.request_throughput,
        "input_throughput": metrics.input_throughput,
        "output_throughput": metrics.output_throughput,
        "total_token_throughput": metrics.total_throughput,
    }
    if metrics.goodput is not None:
        found["request_goodput"] = metrics.goodput
    for name in METRICS:
        spread: Spread = metrics.latencies[name]
        found[f"mean_{name}_ms"] = spread.mean
        found[f"median_{name}_ms"] = spread.median
        found[f"std_{name}_ms"] = spread.std
        for wanted, value in spread.percentiles.items():
            found[f"p{wanted:g}_{name}_ms"] = value
    return found


def _details(runs: Sequence[Run]) -> dict[str, Any]:
    results = [result for run in runs for result in run.results]
    counts = [count for run in runs for count in run.counts]
    return {
        "input_lens": [count.input_tokens for count in counts],
        "output_lens": [count.output_tokens for count in counts],
        "ttfts": [None if r.first is None else r.first - r.start for r in results],
        "itls": [list(r.itls) for r in results],
        "latencies": [None if r.last is None else r.last - r.start for r in results],
        "start_times": [r.start for r in results],
        "queue_times": [r.start - r.arrival for r in results],
        "finish_reasons": [r.finish_reason for r in results],
        "generated_texts": [r.text for r in results],
        "errors": [r.error or "" for r in results],
    }


def write_json(path: Path, answers: Sequence[Mapping[str, Any]]) -> None:
    """One load as an object, several as a list of objects; raises OSError."""
    content = answers[0] if len(answers) == 1 else list(answers)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# CSV

CSV_COLUMNS = (
    "Name",
    "Backend",
    *SERVER_SWITCHES,
    "Benchmark duration (s)",
    "Total input tokens",
    "Total generated tokens",
    "Input token throughput (tok/s)",
    "Output token throughput (tok/s)",
    "Mean E2E Latency (ms)",
    "Median E2E Latency (ms)",
    "Mean TTFT (ms)",
    "Median TTFT (ms)",
    "P99 TTFT (ms)",
    "Mean TPOT (ms)",
    "Median TPOT (ms)",
    "P99 TPOT (ms)",
    "Mean ITL (ms)",
    "Median ITL (ms)",
    "P99 ITL (ms)",
    "Traffic request rate",
    "Max concurrency",
    "Failed requests",
)
"""TACO-LLM's columns, then three of ours: rate, concurrency and failures."""


def csv_row(name: str, point: Point, metadata: Mapping[str, str]) -> list[str]:
    """One load as a row under `CSV_COLUMNS`; unknown cells are empty. The percentiles of
    `point.pooled` must include the 99th."""
    metrics = point.pooled
    cells: list[Any] = [name, point.backend, *(metadata.get(key) for key in SERVER_SWITCHES)]
    cells += [metrics.duration, metrics.total_input, metrics.total_output]
    cells += [metrics.input_throughput, metrics.output_throughput]
    for key in TITLES:
        spread = metrics.latencies[key]
        cells += [spread.mean, spread.median]
        if key != "e2el":
            cells.append(spread.percentiles[99.0])
    cells += [f"{point.rate:g}", point.max_concurrency, metrics.failed]
    return ["" if cell is None else _cell(cell) for cell in cells]


def _cell(value: Any) -> str:
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def write_csv(path: Path, rows: Sequence[Sequence[str]]) -> None:
    """The rows under their heading; raises OSError."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_COLUMNS)
        writer.writerows(rows)
