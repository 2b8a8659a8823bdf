"""Connections before they are requests: slow heads, too many, what is no HTTP, files that may be
open."""

from __future__ import annotations

import logging
import re
import resource
import socket
from contextlib import ExitStack

import httpx
import pytest

from hetero_llm.core.errors import ConfigError
from hetero_llm.engine.tokenizer import Tokenizer
from hetero_llm.server.connection import bound_kernel_buffers, connections_possible
from tests.server.fake_engine import FakeEngine
from tests.server.serving import received
from tests.server.test_serving import Run, running

LIMIT = 20.0


def connect(run: Run, data: bytes = b"") -> socket.socket:
    client = socket.create_connection(run.listener.getsockname(), timeout=LIMIT)
    client.sendall(data)
    return client


def all_of(client: socket.socket) -> bytes:
    """What comes until the server ends the connection."""
    data = b""
    while piece := client.recv(1 << 16):
        data += piece
    return data


@pytest.mark.parametrize(
    "start", [b"G", b"GET /live HTTP/1.1\r\n", b"GET /live HTTP/1.1\r\nhost: a\r\nx"]
)
def test_a_head_that_does_not_end(tokenizer: Tokenizer, start: bytes) -> None:
    with running(FakeEngine(tokenizer), header_timeout=0.2) as run, connect(run, start) as client:
        answer = all_of(client)
        assert answer.startswith(b"HTTP/1.1 408 ") and b'"code":"request_timeout"' in answer
        assert b"connection: close" in answer.lower()
        rejected = httpx.get(f"{run.url}/metrics").text
        assert re.search(r'admission_rejections_total\{.*reason="slow_headers".*\} 1.0', rejected)


def test_silence_is_answered_with_silence(tokenizer: Tokenizer) -> None:
    with running(FakeEngine(tokenizer), header_timeout=0.1) as run, connect(run) as client:
        assert all_of(client) == b""


def test_the_clock_starts_anew_with_each_request(tokenizer: Tokenizer) -> None:
    """An answer that takes longer than a head may is no slow head."""
    engine = FakeEngine(tokenizer, delay=0.2)
    body = {"prompt": "a", "max_tokens": 4, "ignore_eos": True}
    with (
        running(engine, header_timeout=0.3) as run,
        httpx.Client(base_url=run.url, timeout=LIMIT) as client,
    ):
        for _ in range(2):
            answer = client.post("/v1/completions", json=body)
            assert answer.json()["usage"]["completion_tokens"] == 4
    with running(FakeEngine(tokenizer), header_timeout=0.2) as run, connect(run) as client:
        client.sendall(b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n")
        assert client.recv(1 << 12).startswith(b"HTTP/1.1 200 ")
        client.sendall(b"GET /live")
        assert all_of(client).startswith(b"HTTP/1.1 408 ")


def test_what_is_no_http(tokenizer: Tokenizer) -> None:
    with running(FakeEngine(tokenizer)) as run:
        for data in (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",
            b"GET / HTTP/1.1\r\n\x00\r\n\r\n",
        ):
            with connect(run, data) as client:
                answer = all_of(client)
                assert answer.startswith(b"HTTP/1.1 400 ") and b'"code":"invalid_http"' in answer
        assert httpx.get(f"{run.url}/live").status_code == 200


def test_more_connections_than_there_should_be(tokenizer: Tokenizer) -> None:
    """Above the limit 64 more connections are open to probes; above those no request is read."""
    request = b"GET %s HTTP/1.1\r\nhost: a\r\n\r\n"
    with running(FakeEngine(tokenizer), max_connections=3) as run, ExitStack() as stack:
        first = [stack.enter_context(connect(run, request % b"/v1/models")) for _ in range(3)]
        for client in first:
            assert received(client, b"]}]}").startswith(b"HTTP/1.1 200 ")
        probe = stack.enter_context(connect(run, request % b"/health"))
        assert probe.recv(1 << 12).startswith(b"HTTP/1.1 200 ")
        spare = stack.enter_context(connect(run))
        spare.sendall(request % b"/live")
        assert spare.recv(1 << 12).startswith(b"HTTP/1.1 200 ")
        for _ in range(62):
            stack.enter_context(connect(run))
        refused = all_of(stack.enter_context(connect(run)))
        assert refused.startswith(b"HTTP/1.1 503 ") and b"too_many_connections" in refused
        assert b"retry-after: 1" in refused
        spare.sendall(request % b"/v1/models")
        told = all_of(spare)
        assert told.startswith(b"HTTP/1.1 503 ") and b"too_many_connections" in told
        first[0].sendall(request % b"/v1/models")  # earlier connections are still served
        assert received(first[0], b"]}]}").startswith(b"HTTP/1.1 200 ")


def test_files_that_may_be_open(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = [(64, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert connections_possible(1000) == 1000
    assert limits == [(64, 4096), (1000 + 64 + 128, 4096)]
    assert connections_possible(1000) == 1000 and len(limits) == 2
    with caplog.at_level(logging.WARNING):
        assert connections_possible(10_000) == 4096 - 64 - 128
    assert "3904 connections at once instead of 10000" in caplog.text
    limits[:] = [(100, resource.RLIM_INFINITY)]
    assert connections_possible(10_000) == 10_000
    limits[:] = [(100, 190)]
    with pytest.raises(ConfigError, match="max_connections=2048: needs 2240 open files"):
        connections_possible(2048)


def test_the_kernel_keeps_little() -> None:
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is None:
        pytest.skip("no such option here")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        bound_kernel_buffers(listener)
        with (
            socket.create_connection(listener.getsockname()) as client,
            listener.accept()[0] as accepted,
        ):
            assert accepted.getsockopt(socket.IPPROTO_TCP, option) == 128 << 10
            assert client.getsockopt(socket.IPPROTO_TCP, option) != 128 << 10
