"""Prometheus metrics under vLLM's names, today's and older ones, and our own.

Requests are counted here as they run; the engine's own figures are read from its last heartbeat at
each scrape (`engine_metrics`). Every server has its own registry, and no label holds a user's text.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Counts
from collections.abc import Sequence
from types import TracebackType

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from hetero_llm.core.errors import DuplicateRequestError, OverloadedError, RequestError
from hetero_llm.core.histogram import Histogram as PlainHistogram
from hetero_llm.core.outputs import RequestOutput
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.engine.engine_client import EngineClient
from hetero_llm.server.engine_metrics import EngineCollector
from hetero_llm.server.tracing import Finished, Tracer

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
    "request_max_num_generation_tokens": "Tokens of a request's longest sequence.",
    "request_params_max_tokens": "max_tokens of a request.",
}
_SEQUENCES = (1, 2, 5, 10, 20, 64)
_FINE = tuple(1e-4 * 1.12**power for power in range(143))
"""From 0.1 ms to 1,000 s: percentiles are exact to some 6%."""
_FIRST_TOKEN = "time_to_first_token_seconds"
_BETWEEN_TOKENS = "inter_token_latency_seconds"
_OLD_HISTOGRAMS = {
    "inter_token_latency_seconds": "time_per_output_token_seconds",
    "request_queue_time_seconds": "time_in_queue_requests",
}
"""Names of histograms, and what vLLM called them before."""
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_FINISH_REASONS = ("stop", "length", "abort", "error")
_ABORT_CAUSES = ("client_gone", "stalled", "timeout", "engine")
POLLED = frozenset(
    ("/health", "/live", "/ready", "/ping", "/metrics", "/load", "/status.json", "/version")
)
"""Paths that monitors ask for every few seconds."""
NEVER_BEGUN = (RequestError, OverloadedError, DuplicateRequestError)
"""Errors of requests that the engine never took in."""


# large: one attribute for each family of metrics.
class Metrics:
    """Counts HTTP requests and engine requests; one object per server.

    Args:
        legacy_names: also export the metrics that vLLM has renamed or dropped.

    Attributes:
        tracer: gets every request that has ended; None without tracing.
        latencies: first tokens and gaps between tokens since the start, by the metric's name, in
            finer steps than Prometheus gets.
    """

    def __init__(self, client: EngineClient, model_name: str, *, legacy_names: bool = True) -> None:
        self.latencies = {
            name: PlainHistogram.empty(_FINE) for name in (_FIRST_TOKEN, _BETWEEN_TOKENS)
        }
        self.tracer: Tracer | None = None
        self.registry = CollectorRegistry(auto_describe=False)
        labels = {"model_name": model_name, "engine": _ENGINE}

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            family = Histogram(
                f"vllm:{name}", text, _LABELS, buckets=buckets, registry=self.registry
            )
            return family.labels(**labels)

        def counter(name: str, text: str, *label_names: str) -> Counter:
            return Counter(name, text, label_names, registry=self.registry)

        self._times = {name: histogram(name, *row) for name, row in _HISTOGRAMS.items()}
        self._old_times = {
            name: histogram(old, f"Now {name}.", _HISTOGRAMS[name][1])
            for name, old in (_OLD_HISTOGRAMS.items() if legacy_names else ())
        }
        self._old_best_of = None
        if legacy_names:
            text = "best_of of a request."
            self._old_best_of = histogram("request_params_best_of", text, _SEQUENCES)
        steps = _token_buckets(client.info.max_model_len)
        self._counts = {name: histogram(name, text, steps) for name, text in _COUNTS.items()}
        self._params_n = histogram("request_params_n", "n of a request.", _SEQUENCES)
        self._success = counter(
            "vllm:request_success", "Finished requests.", *_LABELS, "finished_reason"
        )
        self._labels = labels
        for reason in _FINISH_REASONS:
            self._success.labels(**labels, finished_reason=reason)
        self._http = counter(
            "hetero_llm:http_requests", "Answers by route and status.", "route", "status"
        )
        text = "Answers by route, kind of status and method; none to monitors."
        self._http_as_vllm = counter("http_requests", text, "handler", "status", "method")
        text = "Requests that ended early."
        self._aborted = counter("hetero_llm:aborted_requests", text, "cause")
        for cause in _ABORT_CAUSES:
            self._aborted.labels(cause)
        text = "Requests refused because of the server's state."
        self._rejected = counter("vllm:admission_rejections", text, *_LABELS, "reason")
        self._unknown = counter("hetero_llm:unknown_fields", "Unknown fields of requests, ignored.")
        self._open = Gauge(
            "hetero_llm:http_requests_in_flight",
            "Requests being answered.",
            registry=self.registry,
        )
        self.registry.register(EngineCollector(client, labels, legacy_names=legacy_names))
        ProcessCollector(registry=self.registry)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def http_begins(self) -> None:
        self._open.inc()

    def http_ends(self, route: str | None, method: str, status: int) -> None:
        """`route`: its path, None if the request had none."""
        self._open.dec()
        self._http.labels(route or "other", str(status)).inc()
        if route not in POLLED:
            kind = f"{status // 100}xx"
            known = method if method in _METHODS else "other"
            self._http_as_vllm.labels(route or "none", kind, known).inc()

    def aborted(self, cause: str) -> None:
        """`cause`: one of client_gone, stalled, timeout and engine."""
        self._aborted.labels(cause).inc()

    def rejected(self, reason: str) -> None:
        """`reason`: the code of a 503."""
        self._rejected.labels(**self._labels, reason=reason).inc()

    def unknown_fields(self, count: int) -> None:
        self._unknown.inc(count)

    def begin(self, request_id: str, prompt_tokens: int, params: SamplingParams) -> RequestTimes:
        """Call it when a request to the engine begins; its end leaves the returned context."""
        return RequestTimes(self, request_id, prompt_tokens, params)

    def pooled(
        self, prompt_tokens: int, arrival: float, *, reason: str, scheduled: float | None = None
    ) -> None:
        """Counts a request to a model that pools.

        Args:
            arrival, scheduled: seconds of the monotonic clock; `scheduled` when the first of its
                inputs was begun, None if it has no result.
            reason: "stop" with a result, else "abort" or "error".
        """
        now = time.monotonic()
        self._counts["request_prompt_tokens"].observe(prompt_tokens)
        self._success.labels(**self._labels, finished_reason=reason).inc()
        if scheduled is not None:
            self.observe("e2e_request_latency_seconds", now - arrival)
            self.observe("request_queue_time_seconds", scheduled - arrival)
            self.observe("request_inference_time_seconds", now - scheduled)

    def observe(self, name: str, seconds: float) -> None:
        seconds = max(seconds, 0.0)
        self._times[name].observe(seconds)
        if name in self.latencies:
            self.latencies[name].observe(seconds)
        if name in self._old_times:
            self._old_times[name].observe(seconds)

    def finish(self, request: Finished, *, longest: int) -> None:
        """Counts a request to the engine that has ended, in whatever way.

        Args:
            longest: tokens of its longest sequence.
        """
        params = request.params
        self._params_n.observe(params.n)
        if self._old_best_of is not None:
            self._old_best_of.observe(params.width)
        if params.max_tokens is not None:
            self._counts["request_params_max_tokens"].observe(params.max_tokens)
        self._counts["request_prompt_tokens"].observe(request.prompt_tokens)
        self._counts["request_generation_tokens"].observe(request.generated)
        self._counts["request_max_num_generation_tokens"].observe(longest)
        for reason in request.reasons:
            self._success.labels(**self._labels, finished_reason=reason).inc()
        if self.tracer is not None:
            self.tracer.record(request)


class RequestTimes:
    """Measures one request to the engine.

    A request that is not streamed has only one output; the time of its first token then comes from
    the engine. A context that is left before the last output counts as an abort, or as an error if
    there was one.
    """

    def __init__(
        self, metrics: Metrics, request_id: str, prompt_tokens: int, params: SamplingParams
    ) -> None:
        self._metrics = metrics
        self._request_id = request_id
        self._prompt_tokens = prompt_tokens
        self._params = params
        self._parent = None if metrics.tracer is None else metrics.tracer.parent()
        self._arrival = time.monotonic()
        self._first: float | None = None
        self._last: float | None = None
        self._generated: Counts[int] = Counts()  # by sequence
        self._reasons: list[str] = []
        self._ended = False

    def __enter__(self) -> RequestTimes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._ended or isinstance(error, NEVER_BEGUN):
            return
        gone = error is None or isinstance(error, (GeneratorExit, asyncio.CancelledError))
        left = self._params.n - len(self._reasons)
        self._reasons += ["abort" if gone else "error"] * left
        self._end(None, time.monotonic())

    def note(self, output: RequestOutput) -> None:
        """Records an output of the request; call it with every output, in order."""
        now = time.monotonic()
        new = 0
        for one in output.outputs:
            new += len(one.token_ids)
            self._generated[one.index] += len(one.token_ids)
            if one.finish_reason is not None:
                self._reasons.append(one.finish_reason)
        if new:
            if self._last is not None:
                self._metrics.observe(_BETWEEN_TOKENS, now - self._last)
            else:
                first = (
                    output.metrics.first_token_time if output.finished and output.metrics else None
                )
                began = now if first is None else min(first, now)
                self._first = max(began - self._arrival, 0.0)
                self._metrics.observe(_FIRST_TOKEN, self._first)
            self._last = now
        if output.finished:
            self._finish(output, now)

    def _finish(self, output: RequestOutput, now: float) -> None:
        see = self._metrics.observe
        see("e2e_request_latency_seconds", now - self._arrival)
        self._end(output, now)
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
        generated = self._generated.total()
        if generated > 1:
            see("request_time_per_output_token_seconds", decode / (generated - 1))

    def _end(self, output: RequestOutput | None, now: float) -> None:
        self._ended = True
        self._metrics.finish(
            Finished(
                request_id=self._request_id,
                params=self._params,
                prompt_tokens=self._prompt_tokens,
                generated=self._generated.total(),
                reasons=tuple(self._reasons),
                arrival=self._arrival,
                end=now,
                first_token_seconds=self._first,
                times=None if output is None else output.metrics,
                parent=self._parent,
            ),
            longest=max(self._generated.values(), default=0),
        )


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
