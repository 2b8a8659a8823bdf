"""Spans of requests, in memory and over the wire to a collector on 127.0.0.1."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hetero_llm.core.errors import ConfigError
from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server.tracing import Finished, TraceHeaders, Tracer, attributes_of, open_provider
from tests.server.fake_engine import FakeEngine
from tests.server.serving import LIMIT, Served, raw_post, received, serving

COMPLETIONS = "/v1/completions"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
ENDPOINT = "http://127.0.0.1:9"  # no server listens there


@contextmanager
def traced(engine: FakeEngine, tracer: Tracer) -> Iterator[Served]:
    with serving(engine, wrap=TraceHeaders) as served:
        served.context.metrics.tracer = tracer
        yield served


@pytest.fixture
def exporter() -> Any:
    memory = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="needs hetero-llm[otel]"
    )
    return memory.InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: Any) -> Tracer:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracer(provider, "demo")


def test_a_span_says_what_the_request_was(
    exporter: Any, tracer: Tracer, tokenizer: Tokenizer
) -> None:
    body = {"prompt": [66, 67, 68], "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "n": 2,
            "request_id": "r7"}  # fmt: skip
    before = time.time_ns()
    with traced(FakeEngine(tokenizer), tracer) as served:
        assert served.post(COMPLETIONS, body, headers=TRACEPARENT).status_code == 200
    (span,) = exporter.get_finished_spans()
    assert span.name == "llm_request" and span.kind.name == "SERVER"
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
    assert before - 10**6 <= span.start_time <= span.end_time <= time.time_ns() + 10**6
    found = dict(span.attributes)
    assert found.pop("gen_ai.latency.e2e") == pytest.approx(
        (span.end_time - span.start_time) / 1e9, abs=1e-5
    )
    times = {name: found.pop(name) for name in list(found) if "latency" in name}
    assert times.keys() == {
        "gen_ai.latency.time_to_first_token", "gen_ai.latency.time_in_queue",
        "gen_ai.latency.time_in_model_prefill", "gen_ai.latency.time_in_model_decode",
        "gen_ai.latency.time_in_model_inference",
    }  # fmt: skip
    assert all(0 <= seconds < 10 for seconds in times.values())
    assert found == {
        "gen_ai.request.id": "cmpl-r7-0",
        "gen_ai.response.model": "demo",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.n": 2,
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 10,
        "gen_ai.response.finish_reasons": ("length", "length"),
    }


def test_each_request_has_its_own_trace(
    exporter: Any, tracer: Tracer, tokenizer: Tokenizer
) -> None:
    """Side by side over kept connections; one prompt each but for the first, which has three."""
    traces = [f"{number + 1:032x}" for number in range(8)]

    def post(number: int) -> None:
        prompt = [[66], [67], [68]] if number == 0 else [66]
        header = {"traceparent": f"00-{traces[number]}-{PARENT}-01"}
        served.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 3}, headers=header)

    with traced(FakeEngine(tokenizer, delay=0.005), tracer) as served:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(post, range(8)))
        served.post(COMPLETIONS, {"prompt": [66], "max_tokens": 1, "stream": True})
        broken = {"traceparent": "00-nonsense"}
        served.post(COMPLETIONS, {"prompt": [66], "max_tokens": 1}, headers=broken)
    spans = exporter.get_finished_spans()
    found = sorted(f"{span.context.trace_id:032x}" for span in spans if span.parent)
    assert found == sorted([traces[0]] * 2 + traces)
    alone = [span for span in spans if span.parent is None]
    assert len(alone) == 2 and alone[0].context.trace_id != alone[1].context.trace_id


def test_spans_of_requests_that_fail_or_leave(
    exporter: Any, tracer: Tracer, tokenizer: Tokenizer
) -> None:
    with traced(FakeEngine(tokenizer, delay=0.005), tracer) as served:
        body = {"prompt": [66], "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with raw_post(served, COMPLETIONS, body) as connection:
            received(connection, b"data: ")
        served.wait(exporter.get_finished_spans)
        served.engine.fail_after = 1
        assert served.post(COMPLETIONS, {"prompt": [66]}).status_code == 500
        assert served.post(COMPLETIONS, {"prompt": [-1]}).status_code == 400  # never begun
    gone, failed = exporter.get_finished_spans()
    assert gone.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert gone.status.status_code.name == "UNSET"
    assert failed.attributes["gen_ai.response.finish_reasons"] == ("error",)
    assert failed.status.status_code.name == "ERROR"


# -- over the wire ------------------------------------------------------------------------------


class Collector:
    """An OTLP collector; `spans` are those that came, `services` who sent them."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.came = threading.Event()

    def take(self, request: Any) -> None:
        for resource in request.resource_spans:
            for attribute in resource.resource.attributes:
                if attribute.key == "service.name":
                    self.services.add(attribute.value.string_value)
            for scope in resource.scope_spans:
                self.spans += scope.spans
        self.came.set()


@contextmanager
def collecting(protocol: str) -> Iterator[tuple[Collector, str]]:
    service = pytest.importorskip(
        "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="needs hetero-llm[otel]"
    )
    collector = Collector()
    if protocol == "grpc":
        grpc = pytest.importorskip("grpc")
        stubs = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc")

        class Service(stubs.TraceServiceServicer):  # type: ignore[misc, name-defined]
            def Export(self, request: Any, context: Any) -> Any:
                collector.take(request)
                return service.ExportTraceServiceResponse()

        server = grpc.server(ThreadPoolExecutor(1))
        stubs.add_TraceServiceServicer_to_server(Service(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield collector, f"http://127.0.0.1:{port}"
        server.stop(0).wait()
        return

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            import gzip

            data = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                data = gzip.decompress(data)
            collector.take(service.ExportTraceServiceRequest.FromString(data))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield collector, f"http://127.0.0.1:{http.server_port}/v1/traces"
    http.shutdown()
    http.server_close()
    thread.join()


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_collector_gets_the_spans(
    protocol: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="needs hetero-llm[otel]")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    with collecting(protocol) as (collector, endpoint):
        provider = open_provider(endpoint)
        tracer = Tracer(provider, "demo")
        with traced(FakeEngine(tokenizer), tracer) as served:
            body = {"prompt": [66, 67], "max_tokens": 3}
            served.post(COMPLETIONS, body, headers=TRACEPARENT)
        asyncio.run(tracer.close())
        assert collector.came.wait(LIMIT)
        (span,) = collector.spans
        provider.shutdown()
    assert span.name == "llm_request" and span.trace_id.hex() == TRACE
    values = {one.key: one.value for one in span.attributes}
    assert values["gen_ai.usage.completion_tokens"].int_value == 3
    assert collector.services == {"hetero-llm"}


def test_no_request_waits_for_a_collector_that_is_away(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="needs hetero-llm[otel]")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")  # seconds that it tries again
    provider = open_provider(ENDPOINT)
    tracer = Tracer(provider, "demo", seconds_to_send=0.1)
    with traced(FakeEngine(tokenizer), tracer) as served:
        for _ in range(3):
            body = {"prompt": [66], "max_tokens": 2}
            assert served.post(COMPLETIONS, body).status_code == 200
    asyncio.run(asyncio.wait_for(tracer.close(), LIMIT))
    provider.shutdown()  # its thread would write into the logs of other tests


# -- without it ---------------------------------------------------------------------------------


def test_without_the_packages_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match=r"pip install 'hetero-llm\[otel\]'") as caught:
        open_provider(ENDPOINT)
    assert caught.value.field == "otlp_traces_endpoint"


def test_an_unknown_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL='http/json': must be grpc"):
        open_provider(ENDPOINT)


def test_attributes_that_are_not_known_are_left_out() -> None:
    from hetero_llm import SamplingParams

    request = Finished(
        request_id="a", params=SamplingParams(max_tokens=None), prompt_tokens=3, generated=0,
        reasons=("abort",), arrival=1.0, end=3.5, first_token_seconds=None, times=None, parent=None,
    )  # fmt: skip
    found = attributes_of(request, "demo")
    assert found["gen_ai.latency.e2e"] == 2.5 and None not in found.values()
    assert not {"gen_ai.request.max_tokens", "gen_ai.latency.time_in_queue"} & found.keys()
