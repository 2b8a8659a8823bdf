"""Heads and frames of what passes through the router."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_llm.server.router.http_heads import (
    LAST_CHUNK,
    Framing,
    passed_on,
    request_headers,
    response_framing,
    response_head,
)


@given(st.lists(st.lists(st.binary(max_size=50), max_size=4), max_size=6))
def test_frames_are_what_a_strict_client_reads(writes: list[list[bytes]]) -> None:
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("host", "a")]))
    client.send(h11.EndOfMessage())
    framing = Framing(chunked=True)
    data = response_head(200, [(b"x", b"1")], framing, close=False)
    data += b"".join(map(framing.frame, writes)) + LAST_CHUNK
    client.receive_data(data)
    assert isinstance(client.next_event(), h11.Response)
    body = b""
    while isinstance(event := client.next_event(), h11.Data):
        body += event.data
    assert isinstance(event, h11.EndOfMessage)
    assert body == b"".join(piece for pieces in writes for piece in pieces)


@pytest.mark.parametrize(
    ("headers", "status", "method", "old", "expected"),
    [
        ([(b"content-length", b"5")], 200, b"GET", False, Framing()),
        ([], 200, b"GET", False, Framing(chunked=True)),
        ([], 200, b"GET", True, Framing(closes=True)),
        ([], 200, b"HEAD", False, Framing()),
        ([], 204, b"POST", False, Framing()),
        ([], 304, b"GET", False, Framing()),
    ],
)
def test_how_a_body_ends(
    headers: list[tuple[bytes, bytes]], status: int, method: bytes, old: bool, expected: Framing
) -> None:
    assert response_framing(headers, status=status, method=method, http_1_0=old) == expected


def test_a_connections_own_headers_stay() -> None:
    headers = [(b"connection", b"close, X-Own"), (b"x-own", b"1"), (b"te", b"x"), (b"a", b"b")]
    assert passed_on(headers) == [(b"a", b"b")]
    trick = [(b"connection", b"authorization"), (b"authorization", b"Bearer k")]
    assert passed_on(trick) == [(b"authorization", b"Bearer k")]


def test_a_request_gets_its_length_and_addresses() -> None:
    found = request_headers([(b"host", b"a")], host=b"b:1", client="1.2.3.4", length=0)
    assert found == [(b"host", b"b:1"), (b"x-forwarded-for", b"1.2.3.4")]
    found = request_headers([(b"content-length", b"0")], host=b"b", client="::1", length=0)
    assert (b"content-length", b"0") in found
