from __future__ import annotations

import json
from typing import Any

import pytest

from hetero_llm.bench_client.errors import ServerError
from hetero_llm.bench_client.wire_format import (
    Piece,
    Sample,
    Usage,
    read_event,
    refusal,
    request_body,
)
from hetero_llm.core.errors import ConfigError


def body(sample: Sample, **changes: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"chat": False, "model": "m", "stream": True, "extra": {}}
    return request_body(sample, **(options | changes))


def test_completion_bodies() -> None:
    assert body(Sample("hi", 4)) == {
        "model": "m",
        "stream": True,
        "prompt": "hi",
        "max_tokens": 4,
        "stream_options": {"include_usage": True},
    }
    assert body(Sample((1, 2), None), stream=False) == {
        "model": "m",
        "stream": False,
        "prompt": [1, 2],
    }
    assert body(Sample("hi", 4), extra={"max_tokens": 9, "top_k": 1})["max_tokens"] == 9


def test_chat_bodies() -> None:
    user = {"role": "user", "content": "hi"}
    assert body(Sample("hi", None), chat=True)["messages"] == [user]
    assert body(Sample(None, None, (user, user)), chat=True)["messages"] == [user, user]
    assert "prompt" not in body(Sample("hi", None), chat=True)


def test_samples_that_do_not_fit_the_endpoint() -> None:
    with pytest.raises(ConfigError, match="prompt_as='ids': a chat endpoint takes text only"):
        body(Sample((1, 2), 4), chat=True)
    with pytest.raises(ConfigError, match="conversations need --backend openai-chat"):
        body(Sample(None, 4, ({"role": "user", "content": "x"},)))


@pytest.mark.parametrize(
    ("event", "piece"),
    [
        ({"choices": [{"text": "a", "finish_reason": None}]}, Piece("a")),
        ({"choices": [{"text": "", "finish_reason": "stop"}]}, Piece("", 0, "stop")),
        ({"choices": [{"text": "ab", "token_ids": [5, 6]}]}, Piece("ab", 2)),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, Piece()),
        ({"choices": [{"delta": {"content": None}, "finish_reason": "length"}]},
         Piece("", 0, "length")),
        ({"choices": [{"delta": {"reasoning_content": "r", "content": "c"}}]}, Piece("rc")),
        ({"choices": [{"delta": {"reasoning": "r"}}]}, Piece("r")),
        ({"choices": [{"message": {"content": "c"}, "finish_reason": "stop"}]},
         Piece("c", 0, "stop")),
        ({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}},
         Piece(usage=Usage(3, 4))),
        ({"choices": [{"text": "x"}], "usage": None}, Piece("x")),
        ({"choices": [{"text": "x"}], "usage": {"prompt_tokens": "3"}}, Piece("x")),
        ({"choices": [{"text": "x"}], "usage": {"prompt_tokens": 1, "completion_tokens": -1}},
         Piece("x")),
        ({"object": "ping"}, Piece()),
    ],
)  # fmt: skip
def test_events(event: dict[str, Any], piece: Piece) -> None:
    assert read_event(json.dumps(event)) == piece


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ('{"error": {"message": "out\\nof memory", "code": 500}}', "answer: out of memory"),
        ('{"error": "plain words"}', "plain words"),
        ('{"error": {"code": 7}}', '{"code": 7}'),
        ('{"choices"', "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"choices": [1]}', "not a list of objects"),
        ('{"choices": 5}', "not a list of objects"),
        ('{"choices": [{"text": 5}]}', "stands where text should be"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_events_that_are_errors(data: str, message: str) -> None:
    with pytest.raises(ServerError) as caught:
        read_event(data)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"error": {"message": "queue is full"}}', "HTTP 503: queue is full"),
        (b'{"error": "Unauthorized"}', "HTTP 503: Unauthorized"),
        (b'{"detail": "Not Found"}', "HTTP 503: Not Found"),
        (b"<html>Bad   Gateway\n</html>", "HTTP 503: <html>Bad Gateway </html>"),
        (b"", "HTTP 503: empty answer"),
        (b"\xff", "HTTP 503: \ufffd"),
        (b"x" * 1000, "HTTP 503: " + "x" * 297 + "..."),
    ],
)
def test_refusals(data: bytes, message: str) -> None:
    error = refusal(503, data)
    assert str(error) == message
    assert error.status == 503
