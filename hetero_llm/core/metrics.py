"""Metrics as vLLM's `get_metrics` returns them: one object a metric and set of labels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Metric:
    """`name` is that of `/metrics`, without a counter's `_total`."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A sum since the start: of events, tokens, bytes or seconds."""

    value: float


@dataclass
class Gauge(Metric):
    """A present value."""

    value: float


@dataclass
class Vector(Metric):
    """Counters by position: accepted draft tokens by their place in the draft."""

    values: list[int]


@dataclass
class HistogramMetric(Metric):
    """Observed values: how many, their sum, and how many up to each upper bound ("+Inf" last).
    vLLM's name is Histogram."""

    count: int
    sum: float
    buckets: dict[str, int]
