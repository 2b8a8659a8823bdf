"""Computes the figures of a load from the times and token counts of its requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from hetero_llm.bench_client.client import RequestResult

METRICS = ("ttft", "tpot", "itl", "e2el")
"""Time to first token, time per output token after it, gaps between events, end to end."""

FEWEST_RUNS = 3
"""Minimum number of runs for a confidence interval."""

# Two-sided 95% quantiles of Student's t for 1, 2, ... degrees of freedom.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_T95_LARGE = 1.96


@dataclass(frozen=True, slots=True)
class Counted:
    """A request's token counts, None if unknown, and the source of the output count: "usage",
    "ids", "retokenized" or "unknown"."""

    input_tokens: int | None
    output_tokens: int | None
    source: str


@dataclass(frozen=True, slots=True)
class Spread:
    """Statistics of one latency in milliseconds; None if there are no values."""

    mean: float | None
    median: float | None
    std: float | None
    percentiles: dict[float, float | None]


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures of one load. Throughputs are per second of `duration` and count complete answers.

    Attributes:
        uncounted: complete answers of unknown token count, which the totals do not include.
        retokenized: output tokens if the text is tokenized again; None without a tokenizer.
        good: complete answers within all limits of the goodput; None: there are no limits.
    """

    completed: int
    failed: int
    duration: float
    total_input: int
    total_output: int
    retokenized: int | None
    uncounted: int
    sources: dict[str, int]
    errors: dict[str, int]
    latencies: dict[str, Spread] = field(repr=False)
    good: int | None = None

    @property
    def goodput(self) -> float | None:
        """Requests within the limits a second."""
        return None if self.good is None else self.good / self.duration

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration

    @property
    def input_throughput(self) -> float:
        return self.total_input / self.duration

    @property
    def output_throughput(self) -> float:
        return self.total_output / self.duration

    @property
    def total_throughput(self) -> float:
        return (self.total_input + self.total_output) / self.duration


def count_request(
    result: RequestResult, *, prompt_tokens: int | None, retokenized: int | None
) -> Counted:
    """Returns the best known counts: the server's usage, else token ids in the answer, else the
    retokenized text.

    Args:
        prompt_tokens: length of the prompt as the client knows it; used without usage.
        retokenized: number of tokens of the answer's text; None without a tokenizer.
    """
    if result.usage is not None:
        return Counted(result.usage.prompt_tokens, result.usage.completion_tokens, "usage")
    if result.num_ids:
        return Counted(prompt_tokens, result.num_ids, "ids")
    if retokenized is not None:
        return Counted(prompt_tokens, retokenized, "retokenized")
    return Counted(prompt_tokens, None, "unknown")


def summarise(
    results: Sequence[RequestResult],
    counts: Sequence[Counted],
    *,
    duration: float,
    retokenized: int | None,
    percentiles: Sequence[float] = (99.0,),
    goodput: Mapping[str, float] = MappingProxyType({}),
) -> Metrics:
    """All figures of one load.

    Args:
        counts: counts of each result; those of failed requests are ignored.
        duration: seconds, greater than 0.
        retokenized: sum over the complete answers.
        percentiles: percentiles to compute, 0 to 100.
        goodput: the most milliseconds of "ttft", "tpot" and "e2el" with which an answer is good.
    """
    done = [(r, c) for r, c in zip(results, counts, strict=True) if r.ok]
    values = {
        name: [value for r, c in done for value in _latencies(name, r, c.output_tokens)]
        for name in METRICS
    }
    return Metrics(
        completed=len(done),
        failed=len(results) - len(done),
        duration=duration,
        total_input=sum(c.input_tokens or 0 for _, c in done),
        total_output=sum(c.output_tokens or 0 for _, c in done),
        retokenized=retokenized,
        uncounted=sum(c.output_tokens is None for _, c in done),
        sources=dict(Counter(c.source for _, c in done)),
        errors=dict(Counter(r.error for r in results if r.error is not None).most_common()),
        latencies={name: spread(found, percentiles) for name, found in values.items()},
        good=sum(_is_good(r, c.output_tokens, goodput) for r, c in done) if goodput else None,
    )


def _is_good(result: RequestResult, output_tokens: int | None, limits: Mapping[str, float]) -> bool:
    """Whether an answer is within all limits. As in vLLM, one token has no time per token, which is
    within every limit."""
    if result.last is None:
        return False
    return all(
        value <= limit
        for name, limit in limits.items()
        for value in _latencies(name, result, output_tokens)
    )


def _latencies(name: str, result: RequestResult, output_tokens: int | None) -> list[float]:
    """The values in milliseconds that one request adds to one metric."""
    if name == "itl":
        return [gap * 1e3 for gap in result.itls]
    if result.first is None or result.last is None:
        return []
    if name == "ttft":
        return [(result.first - result.start) * 1e3]
    if name == "e2el":
        return [(result.last - result.start) * 1e3]
    if output_tokens is None or output_tokens < 2:
        return []
    return [(result.last - result.first) * 1e3 / (output_tokens - 1)]


def spread(values: Sequence[float], percentiles: Sequence[float]) -> Spread:
    """Mean, median, standard deviation of the population, and percentiles."""
    if not values:
        return Spread(None, None, None, dict.fromkeys(percentiles))
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered)
    variance = math.fsum((value - mean) ** 2 for value in ordered) / len(ordered)
    return Spread(
        mean=mean,
        median=percentile(ordered, 50.0),
        std=math.sqrt(variance),
        percentiles={wanted: percentile(ordered, wanted) for wanted in percentiles},
    )


def percentile(ordered: Sequence[float], wanted: float) -> float:
    """Percentile with linear interpolation, as numpy's default; `ordered` ascends and is not
    empty."""
    index = (len(ordered) - 1) * wanted / 100.0
    below = math.floor(index)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (index - below)


def confidence(values: Sequence[float]) -> float:
    """Half the width of the 95% confidence interval of the mean (Student's t)."""
    assert len(values) >= FEWEST_RUNS
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    freedom = len(values) - 1
    t = _T95[freedom - 1] if freedom <= len(_T95) else _T95_LARGE
    return t * math.sqrt(variance / len(values))
