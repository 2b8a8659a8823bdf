"""Draws a bench: latency over throughput, and the distributions of TTFT and ITL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetero_llm.bench_client.report import Point
from hetero_llm.core.errors import HeteroLLMError

_INCHES = (15.0, 4.5)
_DPI = 120


def write_plot(path: Path, points: Sequence[Point], title: str) -> None:
    """Draws all loads into a PNG.

    Raises:
        HeteroLLMError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise HeteroLLMError(
            "module 'matplotlib' is not installed; pip install 'hetero-llm[bench]' brings it"
        ) from None
    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    curve, ttft, itl = figure.subplots(1, 3)
    _draw_curve(curve, points)
    _draw_distribution(ttft, points, "TTFT (ms)", _ttfts)
    _draw_distribution(itl, points, "ITL (ms)", _itls)
    figure.savefig(path, format="png")


def _draw_curve(axes: Any, points: Sequence[Point]) -> None:
    ordered = sorted(points, key=lambda point: point.pooled.output_throughput)
    throughput = [point.pooled.output_throughput for point in ordered]
    for name, label in (("e2el", "E2E latency"), ("ttft", "TTFT"), ("tpot", "TPOT")):
        medians = [point.pooled.latencies[name].median for point in ordered]
        shown = [(x, y) for x, y in zip(throughput, medians, strict=True) if y]
        if shown:
            axes.plot(*zip(*shown, strict=True), marker="o", label=f"median {label}")
    for point in ordered:
        value = point.pooled.latencies["e2el"].median
        if value:
            axes.annotate(
                load_name(point),
                (point.pooled.output_throughput, value),
                xytext=(0, 7),
                textcoords="offset points",
                ha="center",
            )
    axes.margins(x=0.15, y=0.15)
    axes.set(title="Throughput and latency", xlabel="output tokens/s", ylabel="ms", yscale="log")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()


def _draw_distribution(axes: Any, points: Sequence[Point], label: str, values_of: Any) -> None:
    for point in points:
        values = sorted(values_of(point))
        if values:
            shares = [(rank + 1) / len(values) for rank in range(len(values))]
            axes.step(values, shares, where="post", label=load_name(point))
    axes.set(title=f"Distribution of {label[:-5]}", xlabel=label, ylabel="share at most this")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()


def _ttfts(point: Point) -> list[float]:
    return [
        (result.first - result.start) * 1e3
        for run in point.runs
        for result in run.results
        if result.ok and result.first is not None
    ]


def _itls(point: Point) -> list[float]:
    return [
        gap * 1e3 for run in point.runs for result in run.results if result.ok
        for gap in result.itls
    ]  # fmt: skip


def load_name(point: Point) -> str:
    """Short name of a load, such as `2 req/s` or `64 at once`."""
    parts = [] if point.rate == float("inf") else [f"{point.rate:g} req/s"]
    if point.max_concurrency is not None:
        parts.append(f"{point.max_concurrency} at once")
    return ", ".join(parts) or "all at once"
