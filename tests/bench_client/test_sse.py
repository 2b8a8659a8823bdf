from __future__ import annotations

import random

import pytest

from hetero_llm.bench_client import sse
from hetero_llm.bench_client.errors import ServerError
from hetero_llm.bench_client.sse import SseDecoder

STREAM = (
    ": keep-alive\n\n"
    "data: one\n\n"
    "event: ping\r\ndata: größe 漢字 🙂\r\nid: 7\r\n\r\n"
    "data:no space\r\r"
    "data: lines\r\ndata: of windows\r\n\r\n"
    "data:  two spaces\ndata: second line\n\n"
    "\n\nretry: 5\n\n"
    "data: [DONE]\n\n"
)
EVENTS = [
    "one",
    "größe 漢字 🙂",
    "no space",
    "lines\nof windows",
    " two spaces\nsecond line",
    "[DONE]",
]


def decoded(pieces: list[bytes]) -> list[str]:
    decoder = SseDecoder()
    events = [event for piece in pieces for event in decoder.feed(piece)]
    assert decoder.is_whole
    return events


def test_whole() -> None:
    assert decoded([STREAM.encode()]) == EVENTS


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_byte_by_byte(bom: bytes) -> None:
    data = bom + STREAM.encode()
    assert decoded([data[i : i + 1] for i in range(len(data))]) == EVENTS


@pytest.mark.parametrize("seed", range(50))
def test_any_split(seed: int) -> None:
    rng = random.Random(seed)
    data = STREAM.encode()
    cuts = sorted(rng.sample(range(1, len(data)), 12))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)])]
    assert decoded(pieces) == EVENTS


def test_an_unfinished_event_is_not_given() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: half") == []
    assert not decoder.is_whole
    assert decoder.feed(b" whole\n") == []
    assert not decoder.is_whole
    assert decoder.feed(b"\n") == ["half whole"]
    assert decoder.is_whole


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(ServerError, match="not UTF-8"):
        SseDecoder().feed(b"data: \xff\xfe\n\n")


def test_an_endless_event_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "LONGEST_EVENT", 100)
    decoder = SseDecoder()
    decoder.feed(b"data: " + b"x" * 90)
    with pytest.raises(ServerError, match="longer than 100 bytes"):
        decoder.feed(b"x" * 20)
    decoder = SseDecoder()
    with pytest.raises(ServerError, match="longer than 100 bytes"):
        for _ in range(20):
            decoder.feed(b"data: 0123456789\n")
