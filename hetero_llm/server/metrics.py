"""Prometheus metrics under vLLM's names, and our own.

What the API sees is counted as it happens; what the engine counts is read from its last report
when somebody asks. Every server has its own registry, and no label holds a user's text.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hetero_llm.core.errors import EngineDeadError, EngineHungError
from hetero_llm.core.outputs import RequestOutput
from hetero_llm.engine.client import EngineClient

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model_name", "engine")
_ENGINE = "0"

_TTFT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
         7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
            1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
          60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", _TTFT),
    "inter_token_latency_seconds": ("Between two outputs of a stream.", _BETWEEN),
    "request_time_per_output_token_seconds": ("A request's mean time per token after the first.",
                                              _BETWEEN),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", _WHOLE),
    "request_queue_time_seconds": ("From arrival until first scheduled.", _WHOLE),
    "request_prefill_time_seconds": ("From first scheduled to the first token.", _WHOLE),
    "request_decode_time_seconds": ("From the first token to the last.", _WHOLE),
    "request_inference_time_seconds": ("From first scheduled to the last token.", _WHOLE),
}  # fmt: skip
_COUNTS = {
    "request_prompt_tokens": "Tokens of a prompt.",
    "request_generation_tokens": "Tokens generated for a request.",
    "request_params_max_tokens": "max_tokens of a request.",
}

_GAUGES = {
    "num_requests_running": "Requests in the running batch.",
    "num_requests_waiting": "Requests that wait for a place.",
    "kv_cache_usage_perc": "Used part of the KV cache, 0 to 1.",
}
_COUNTERS = {
    "num_preemptions": "Requests put back because the KV cache was full.",
    "prompt_tokens": "Prompt tokens computed or found in the prefix cache.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "spec_decode_num_drafts": "Drafts that were verified.",
    "spec_decode_num_draft_tokens": "Draft tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were accepted.",
}
_OWN_COUNTERS = ("num_requests_finished", "num_steps")
_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]")


class Metrics:
    """Counts what the API sees; one per server."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        labels = {"model_name": model_name, "engine": _ENGINE}
        self._times = {
            name: Histogram(f"vllm:{name}", text, _LABELS, buckets=buckets, registry=self.registry)
            .labels(**labels)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }  # fmt: skip
        steps = _token_buckets(client.info.max_model_len)
        self._counts = {
            name: Histogram(f"vllm:{name}", text, _LABELS, buckets=steps, registry=self.registry)
            .labels(**labels)
            for name, text in _COUNTS.items()
        }  # fmt: skip
        self._params_n = Histogram(
            "vllm:request_params_n", "n of a request.", _LABELS, buckets=(1, 2, 5, 10, 20, 64),
            registry=self.registry,
        ).labels(**labels)  # fmt: skip
        self._success = Counter(
            "vllm:request_success", "Finished requests.", (*_LABELS, "finished_reason"),
            registry=self.registry,
        )  # fmt: skip
        self._labels = labels
        self._http = Counter(
            "hetero_llm:http_requests", "Answers by route and status.", ("route", "status"),
            registry=self.registry,
        )  # fmt: skip
        self._aborted = Counter(
            "hetero_llm:aborted_requests", "Requests that ended early.", ("cause",),
            registry=self.registry,
        )  # fmt: skip
        self._rejected = Counter(
            "vllm:admission_rejections", "Requests refused because of the server's state.",
            ("reason",), registry=self.registry,
        )  # fmt: skip
        self._unknown = Counter(
            "hetero_llm:unknown_fields", "Unknown fields of requests, ignored.",
            registry=self.registry,
        )  # fmt: skip
        self._open = Gauge(
            "hetero_llm:http_requests_in_flight", "Requests being answered.",
            registry=self.registry,
        )  # fmt: skip
        self.registry.register(_EngineCollector(client, labels))

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def http_begins(self) -> None:
        self._open.inc()

    def http_ends(self, route: str, status: int) -> None:
        self._open.dec()
        self._http.labels(route, str(status)).inc()

    def aborted(self, cause: str) -> None:
        """`cause`: client_gone, stalled, timeout or engine."""
        self._aborted.labels(cause).inc()

    def rejected(self, reason: str) -> None:
        """`reason`: the code of a 503."""
        self._rejected.labels(reason).inc()

    def unknown_fields(self, count: int) -> None:
        self._unknown.inc(count)

    def begin(self, *, prompt_tokens: int, n: int, max_tokens: int | None) -> RequestTimes:
        """A request to the engine begins."""
        self._params_n.observe(n)
        if max_tokens is not None:
            self._counts["request_params_max_tokens"].observe(max_tokens)
        return RequestTimes(self, prompt_tokens)

    def observe(self, name: str, seconds: float) -> None:
        self._times[name].observe(max(seconds, 0.0))

    def finish(self, prompt_tokens: int, generated: int, reasons: list[str]) -> None:
        self._counts["request_prompt_tokens"].observe(prompt_tokens)
        self._counts["request_generation_tokens"].observe(generated)
        for reason in reasons:
            self._success.labels(**self._labels, finished_reason=reason).inc()


class RequestTimes:
    """The times of one request to the engine, seen from here.

    A request that is not streamed has one output only: the engine's own times fill in.
    """

    def __init__(self, metrics: Metrics, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._arrival = time.monotonic()
        self._last: float | None = None
        self._generated = 0
        self._reasons: list[str] = []

    def note(self, output: RequestOutput) -> None:
        """Call it with every output of the request, in order."""
        now = time.monotonic()
        new = 0
        for one in output.outputs:
            new += len(one.token_ids)
            if one.finish_reason is not None:
                self._reasons.append(one.finish_reason)
        if new:
            if self._last is not None:
                self._metrics.observe("inter_token_latency_seconds", now - self._last)
            else:
                first = (
                    output.metrics.first_token_time if output.finished and output.metrics else None
                )
                began = now if first is None else min(first, now)
                self._metrics.observe("time_to_first_token_seconds", began - self._arrival)
            self._last = now
            self._generated += new
        if output.finished:
            self._finish(output, now)

    def _finish(self, output: RequestOutput, now: float) -> None:
        see = self._metrics.observe
        see("e2e_request_latency_seconds", now - self._arrival)
        self._metrics.finish(self._prompt_tokens, self._generated, self._reasons)
        times = output.metrics
        if times is None or times.first_scheduled_time is None:
            return
        see("request_queue_time_seconds", times.first_scheduled_time - times.arrival_time)
        if times.first_token_time is None or times.last_token_time is None:
            return
        decode = times.last_token_time - times.first_token_time
        see("request_prefill_time_seconds", times.first_token_time - times.first_scheduled_time)
        see("request_decode_time_seconds", decode)
        see("request_inference_time_seconds", times.last_token_time - times.first_scheduled_time)
        if self._generated > 1:
            see("request_time_per_output_token_seconds", decode / (self._generated - 1))


class _EngineCollector(Collector):
    """The engine's last report, in Prometheus' terms."""

    def __init__(self, client: EngineClient, labels: dict[str, str]) -> None:
        self._client = client
        self._labels = labels

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._client.stats()
        left = dict(stats.metrics)
        for name, text in _GAUGES.items():
            yield self._gauge(f"vllm:{name}", text, left.pop(name, 0.0))
        for name, text in _COUNTERS.items():
            yield self._counter(f"vllm:{name}", text, left.pop(name, 0.0))
        yield self._cache_config()
        for name in _OWN_COUNTERS:
            value = left.pop(name, None)
            if value is not None:
                yield self._counter(f"hetero_llm:{name}", f"The engine's {name}.", value)
        for name, value in sorted(left.items()):
            safe = _NOT_A_NAME.sub("_", name)
            yield self._gauge(f"hetero_llm:{safe}", f"The engine's {name}.", value)
        yield self._gauge(
            "hetero_llm:queue", "Requests accepted and not finished.", float(stats.queue)
        )
        yield self._gauge(
            "hetero_llm:last_step_timestamp_seconds",
            "When the engine last showed life, in Unix time.",
            time.time() - stats.last_step_age,
        )
        yield self._gauge(
            "hetero_llm:engine_up", "1 while the engine is well.", float(self._is_up())
        )

    def _is_up(self) -> bool:
        try:
            self._client.check_health()
        except (EngineDeadError, EngineHungError):
            return False
        return True

    def _cache_config(self) -> Metric:
        info = self._client.info
        labels = self._labels | {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "cache_dtype": info.dtype,
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache's configuration.", labels=list(labels)
        )
        family.add_metric(list(labels.values()), 1.0)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._filled(GaugeMetricFamily(name, text, labels=list(self._labels)), value)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._filled(CounterMetricFamily(name, text, labels=list(self._labels)), value)

    def _filled(self, family: Any, value: float) -> Metric:
        family.add_metric(list(self._labels.values()), float(value))
        return family


def _token_buckets(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to the context length."""
    buckets: list[float] = []
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > largest:
                return tuple(buckets)
            buckets.append(float(digit * power))
        power *= 10
