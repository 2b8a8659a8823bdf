"""Connections before they are requests: slow heads, too many, what is no HTTP, files that may be
open."""

from __future__ import annotations

import logging
import random
import re
import resource
import socket
from collections import Counter
from contextlib import ExitStack, suppress

import httpx
import pytest

from hetero_llm.core.errors import ConfigError
from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server.connection import bound_kernel_buffers, connections_possible
from tests.helpers.hostile_bytes import odd
from tests.helpers.hostile_requests import attack
from tests.helpers.time_limits import growing_limits
from tests.server.fake_engine import FakeEngine
from tests.server.serving import LIMIT, received
from tests.server.test_serving import Run, running


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
    for limit in growing_limits(0.2):
        with (
            running(FakeEngine(tokenizer), header_timeout=limit) as run,
            connect(run, start) as client,
        ):
            answer = all_of(client)
            rejected = httpx.get(f"{run.url}/metrics", timeout=LIMIT).text
        if answer:  # else the client had sent nothing in time
            break
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"code":"request_timeout"' in answer
    assert b"connection: close" in answer.lower()
    assert re.search(r'admission_rejections_total\{.*reason="slow_headers".*\} 1.0', rejected)


def test_silence_is_answered_with_silence(tokenizer: Tokenizer) -> None:
    with running(FakeEngine(tokenizer), header_timeout=0.1) as run, connect(run) as client:
        assert all_of(client) == b""


def test_the_clock_starts_anew_with_each_request(tokenizer: Tokenizer) -> None:
    """An answer that takes longer than a head may is no slow head."""
    body = {"prompt": "a", "max_tokens": 4, "ignore_eos": True}
    for limit in growing_limits(0.3):
        engine = FakeEngine(tokenizer, delay=limit * 2 / 3)
        with (
            running(engine, header_timeout=limit) as run,
            httpx.Client(base_url=run.url, timeout=LIMIT) as client,
        ):
            answers = [client.post("/v1/completions", json=body) for _ in range(2)]
        if all(answer.status_code == 200 for answer in answers):
            break
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [4, 4]
    for limit in growing_limits(0.2):
        begun = answer = b""
        with (
            running(FakeEngine(tokenizer), header_timeout=limit) as run,
            connect(run) as client,
            suppress(ConnectionError),
        ):
            client.sendall(b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n")
            begun = client.recv(1 << 12)
            client.sendall(b"GET /live")
            answer = all_of(client)
        if begun.startswith(b"HTTP/1.1 200 ") and answer:
            break
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_what_is_no_http(tokenizer: Tokenizer) -> None:
    with running(FakeEngine(tokenizer)) as run:
        for data in (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",
            b"GET / HTTP/1.1\r\n\x00\r\n\r\n",
        ):
            with connect(run, data) as client:
                answer = all_of(client)
                assert answer.startswith(b"HTTP/1.1 400 ") and b'"code":"invalid_http"' in answer
        assert httpx.get(f"{run.url}/live", timeout=LIMIT).status_code == 200


POST = b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
SMUGGLED = b"5\r\n{}   \r\n0\r\n\r\nGET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n"


REFUSED_HEADS = [
    (POST + b"content-length: 2\r\ntransfer-encoding: chunked", 400, "invalid_http"),
    (POST + b"transfer-encoding: chunked\r\ncontent-length: 2", 400, "invalid_http"),
    (POST + b"transfer-encoding: chunked, chunked", 400, "invalid_http"),
    (POST + b"transfer-encoding: gzip", 400, "invalid_http"),
    (POST + b"content-length: 2\r\ncontent-length: 3", 400, "invalid_http"),
    (POST + b"content-length: 0x2", 400, "invalid_http"),
    (POST + b"host: b", 400, "invalid_http"),
    (POST.replace(b"1.1", b"1.0") + b"transfer-encoding: chunked", 400, "invalid_http"),
    (b"GET /live HTTP/9.9\r\nhost: a", 505, "http_version_not_supported"),
    (b"GET /live HTTP/0.9\r\nhost: a", 505, "http_version_not_supported"),
    (b"PRI * HTTP/2.0", 505, "http_version_not_supported"),
]


def test_one_error_and_the_end(tokenizer: Tokenizer) -> None:
    """Nothing behind such a head is read as another request: who looked at it before us may have
    seen its end elsewhere."""
    with running(FakeEngine(tokenizer)) as run:
        for head, status, code in REFUSED_HEADS:
            with connect(run, head + b"\r\n\r\n" + SMUGGLED) as client:
                answer = all_of(client)
            assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"%d" % status], head
            assert b'"code":"%s"' % code.encode() in answer, head
            assert b"connection: close" in answer.lower()
        assert httpx.get(f"{run.url}/live", timeout=LIMIT).status_code == 200


def test_a_refused_head_behind_a_good_request(tokenizer: Tokenizer) -> None:
    good = b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n"
    with running(FakeEngine(tokenizer)) as run:
        bad = POST + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n"
        with connect(run, good + bad + SMUGGLED) as client:
            answer = all_of(client)
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400"]


METHODS = (b"GET", b"POST", b"HEAD", b"OPTIONS", b"PUT", b"TRACE", b"CONNECT", b"get", b"G\x00T",
           b"", b"X" * 5000)  # fmt: skip
TARGETS = (b"/live", b"/v1/models", b"/tokenize", b"/v1/completions", b"/metrics", b"*", b"//",
           b"/v1/../live", b"/%2e%2e/%00", b"http://b/live", b"/" + b"a" * 70_000, b"/\xff", b"/?" +
           b"a=&" * 3000, b"/v1/models/%0d%0aX:1", b"", b"/status.json#x")  # fmt: skip
VERSIONS = (b"HTTP/1.1",) * 6 + (
    b"HTTP/1.0",
    b"HTTP/9.9",
    b"HTTP/1",
    b"http/1.1",
    b"",
    b"HTTP/1.1 ",
)
HEADERS = (
    b"content-length: 2", b"content-length: 2", b"content-length: -1", b"content-length: 1e9",
    b"content-length: 99999999999999999999", b"content-length: 2, 2", b"content-length:",
    b"transfer-encoding: chunked", b"transfer-encoding: identity", b"transfer-encoding:\x0b",
    b"Transfer-Encoding : chunked", b"content-type: application/json", b"content-type: \xff",
    b"content-encoding: gzip", b"authorization: Bearer x", b"authorization: Basic \x00",
    b"expect: 100-continue", b"expect: x", b"connection: close", b"connection: upgrade",
    b"upgrade: websocket", b"upgrade: h2c", b"x-request-id: \xc3\xa9", b"x: " + b"y" * 40_000,
    b" folded: yes", b"no colon", b": no name", b"x-request-timeout-ms: nan", b"range: bytes=0-",
    b"host: b", b"sec-websocket-key: x", b"x-forwarded-for: \"", b"cookie: " + b";" * 9000,
    b"traceparent: 00-0-0-0",
)  # fmt: skip
BODIES = (b"", b"{}", b'{"prompt": "a"}', b"[" * 20_000, b'{"prompt": ' + b"9" * 5000 + b"}",
          b"2\r\n{}\r\n0\r\n\r\n", b"2;x=y\r\n{}\r\n0\r\nx: y\r\n\r\n", b"ffffffffffffffffff\r\n",
          b"-2\r\n{}\r\n0\r\n\r\n", b"\xff\xfe", b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n",
          b"0\r\n\r\nGET /load HTTP/1.1\r\n\r\n")  # fmt: skip


ROUTES = (
    b"/tokenize", b"/detokenize", b"/v1/completions", b"/v1/chat/completions", b"/live",
    b"/metrics",
)  # fmt: skip


def hostile_request(rng: random.Random) -> bytes:
    """A request of which about two parts are wrong, or wrong together."""

    def mostly(good: bytes, strange: tuple[bytes, ...]) -> bytes:
        return good if rng.random() < 0.85 else rng.choice(strange)

    body = mostly(b'{"prompt": "a", "max_tokens": 1}', BODIES)
    end = mostly(b"\r\n", (b"\n", b"\r", b"\r\n\r"))
    route = mostly(rng.choice(ROUTES), TARGETS)
    method = mostly(b"GET" if route in ROUTES[4:] else b"POST", METHODS)
    lines = [b" ".join((method, route, mostly(b"HTTP/1.1", VERSIONS[6:])))]
    lines += [b"host: a"] * rng.choice((1,) * 8 + (0, 2))
    lines += [mostly(b"content-length: %d" % len(body), HEADERS)]
    lines += [mostly(b"content-type: application/json", HEADERS)]
    lines += rng.choices(HEADERS, k=rng.choice((0, 0, 0, 1, 2, 300)))
    data = end.join(lines) + end * 2 + body
    if rng.random() < 0.1:
        return data[: rng.randrange(len(data))]
    return data + rng.choice((b"", b"", b"\r\n", data))


def test_200_hostile_requests(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    """Every answer is a whole one, none a 500, no connection stays open, nothing reaches the log as
    an error, and afterwards the server answers as before."""
    rng = random.Random(7)
    statuses: Counter[int] = Counter()
    with running(FakeEngine(tokenizer), header_timeout=1.0) as run:
        before = httpx.get(f"{run.url}/load", timeout=LIMIT).json()
        for number in range(200):
            data = hostile_request(rng)
            with connect(run) as client:
                with suppress(OSError):  # it may refuse before it has read all
                    client.sendall(data)
                    client.shutdown(socket.SHUT_WR)
                answer = b""
                with suppress(ConnectionError):
                    answer = all_of(client)
            found = [int(code) for code in re.findall(rb"(?:^|\n|}|>)HTTP/1\.1 (\d{3}) ", answer)]
            assert not set(found) & {500, 502}, (number, data[:300], answer[:500])
            assert not answer or found, (number, data[:300], answer[:500])
            statuses.update(found)
        assert httpx.get(f"{run.url}/load", timeout=LIMIT).json() == before
        assert httpx.get(f"{run.url}/live", timeout=LIMIT).status_code == 200
    assert len(statuses) > 5, statuses
    wrong = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not wrong, wrong[0].getMessage()


def test_odd_bytes_to_every_route(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    """Errors have their form and name the field; the stream of an ordinary user goes on."""
    with running(FakeEngine(tokenizer), header_timeout=30.0) as run:
        counts, faults = attack(run.url, seed=5, count=50, make=odd)
        assert not faults, "\n".join(faults)
    assert counts["400"] > 12 and counts["200"] > 3 and counts["rounds beside"] > 0
    wrong = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not wrong, wrong[0].getMessage()


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
