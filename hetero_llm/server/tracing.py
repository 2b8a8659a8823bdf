"""OpenTelemetry: one span for each request to the engine, under vLLM's names.

The span is made when the request has ended, from times that the metrics measure anyway, and is sent
by a thread of OpenTelemetry. It belongs to the trace that the client's `traceparent` header names.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Receive, Scope, Send

from hetero_llm.core.errors import ConfigError
from hetero_llm.core.outputs import RequestMetrics
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.utils.env import traces_protocol

if TYPE_CHECKING:
    from opentelemetry.context import Context as TraceContext
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)

_SPAN = "llm_request"
_SERVICE = "hetero-llm"
_HEADERS = ("traceparent", "tracestate")
_INSTALL = "needs OpenTelemetry: pip install 'hetero-llm[otel]'"
_EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A request to the engine that has ended.

    Attributes:
        generated: tokens of all its sequences.
        reasons: why each sequence ended.
        arrival, end: seconds of the monotonic clock.
        first_token_seconds: from its arrival; None if no token came.
        times: the engine's, if the request was finished.
        parent: see `Tracer.parent`.
    """

    request_id: str
    params: SamplingParams
    prompt_tokens: int
    generated: int
    reasons: tuple[str, ...]
    arrival: float
    end: float
    first_token_seconds: float | None
    times: RequestMetrics | None
    parent: Any


class Tracer:
    """Makes spans of requests.

    Args:
        provider: OpenTelemetry's; it is closed with this object.
        model: the name in the responses.
        seconds_to_send: most time that `close` takes.
    """

    def __init__(
        self, provider: TracerProvider, model: str, *, seconds_to_send: float = 2.0
    ) -> None:
        from opentelemetry import context
        from opentelemetry.trace import SpanKind, StatusCode

        self._provider = provider
        self._tracer = provider.get_tracer("hetero_llm")
        self._model = model
        self._seconds_to_send = seconds_to_send
        self._kind, self._error = SpanKind.SERVER, StatusCode.ERROR
        self._current = context.get_current

    def parent(self) -> TraceContext:
        """The parent context for spans of the current HTTP request."""
        return self._current()

    def record(self, request: Finished) -> None:
        """Makes a span of a request."""
        since_epoch = time.time() - time.monotonic()
        span = self._tracer.start_span(
            _SPAN,
            context=request.parent,
            kind=self._kind,
            attributes=attributes_of(request, self._model),
            start_time=int((since_epoch + request.arrival) * 1e9),
        )
        if "error" in request.reasons:
            span.set_status(self._error)
        span.end(int((since_epoch + request.end) * 1e9))

    async def close(self) -> None:
        """Sends the remaining spans, as far as the collector accepts them in time."""
        # A thread that is not joined: the exporter's own time limits are longer than ours.
        flush = threading.Thread(
            target=self._provider.force_flush, args=(int(self._seconds_to_send * 1e3),), daemon=True
        )
        flush.start()
        deadline = time.monotonic() + self._seconds_to_send
        while flush.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        if flush.is_alive():
            logger.warning("the last traces could not be sent")


class TraceHeaders:
    """ASGI middleware that makes the trace in a request's headers the current one."""

    def __init__(self, app: ASGIApp) -> None:
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app = app
        self._context = context
        self._extract = TraceContextTextMapPropagator().extract

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = {name.decode("latin-1"): value for name, value in scope["headers"]}
        carrier = {name: given[name].decode("latin-1") for name in _HEADERS if name in given}
        # Not detached: each request has a task, and so a context, of its own.
        self._context.attach(self._extract(carrier, context=self._context.Context()))
        await self._app(scope, receive, send)


def attributes_of(request: Finished, model: str) -> dict[str, Any]:
    """A span's attributes; durations are in seconds."""
    params, times = request.params, request.times
    found: dict[str, Any] = {
        "gen_ai.request.id": request.request_id,
        "gen_ai.response.model": model,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.n": params.n,
        "gen_ai.usage.num_sequences": len(request.reasons),
        "gen_ai.usage.prompt_tokens": request.prompt_tokens,
        "gen_ai.usage.completion_tokens": request.generated,
        "gen_ai.response.finish_reasons": request.reasons,
        "gen_ai.latency.e2e": request.end - request.arrival,
        "gen_ai.latency.time_to_first_token": request.first_token_seconds,
    }
    if times is not None and times.first_scheduled_time is not None:
        scheduled = times.first_scheduled_time
        found["gen_ai.latency.time_in_queue"] = scheduled - times.arrival_time
        if times.first_token_time is not None and times.last_token_time is not None:
            first, last = times.first_token_time, times.last_token_time
            found["gen_ai.latency.time_in_model_prefill"] = first - scheduled
            found["gen_ai.latency.time_in_model_decode"] = last - first
            found["gen_ai.latency.time_in_model_inference"] = last - scheduled
    return {name: value for name, value in found.items() if value is not None}


def open_provider(endpoint: str) -> TracerProvider:
    """A provider that sends spans to an OTLP collector, over gRPC, or over HTTP if the standard
    variable OTEL_EXPORTER_OTLP_TRACES_PROTOCOL says so.

    Raises:
        ConfigError: OpenTelemetry is not installed, or the variable's value is unknown.
    """
    protocol = traces_protocol()
    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = importlib.import_module(_EXPORTERS[protocol])
    except ImportError:
        raise ConfigError("otlp_traces_endpoint", endpoint, _INSTALL) from None
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: _SERVICE}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter.OTLPSpanExporter(endpoint)))
    return provider
