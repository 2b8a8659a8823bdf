from __future__ import annotations

import json
from typing import Any

import pytest

from hetero_llm.bench_client.errors import ServerError
from hetero_llm.bench_client.wire_format import (
    Api,
    Piece,
    Sample,
    Usage,
    api_of,
    read_event,
    refusal,
    request_body,
)
from hetero_llm.core.errors import ConfigError


def body(sample: Sample, **changes: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"api": Api.COMPLETIONS, "model": "m", "stream": True, "extra": {}}
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
    assert body(Sample("hi", None), api=Api.CHAT)["messages"] == [user]
    assert body(Sample(None, None, (user, user)), api=Api.CHAT)["messages"] == [user, user]
    assert "prompt" not in body(Sample("hi", None), api=Api.CHAT)


def test_bodies_of_responses() -> None:
    user = {"role": "user", "content": "hi"}
    assert body(Sample("hi", 4), api=Api.RESPONSES) == {
        "model": "m",
        "stream": True,
        "input": [user],
        "max_output_tokens": 4,
    }
    assert "max_output_tokens" not in body(Sample("hi", None), api=Api.RESPONSES)


def test_bodies_of_messages() -> None:
    system, user = {"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}
    assert body(Sample(None, 4, (system, user)), api=Api.MESSAGES) == {
        "model": "m",
        "stream": True,
        "system": [{"type": "text", "text": "be brief"}],
        "messages": [user],
        "max_tokens": 4,
    }
    limit = body(Sample("hi", None), api=Api.MESSAGES)["max_tokens"]
    assert limit >= 1  # this API has no default


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/completions", Api.COMPLETIONS),
        ("/v1/chat/completions/", Api.CHAT),
        ("/x/v1/responses", Api.RESPONSES),
        ("/v1/messages", Api.MESSAGES),
        ("/generate", Api.COMPLETIONS),
    ],
)
def test_the_path_tells_the_api(path: str, api: Api) -> None:
    assert api_of(path) is api
    assert api.takes_conversations == (api is not Api.COMPLETIONS)


def test_messages_of_a_file_that_only_the_server_can_refuse() -> None:
    """A file may hold objects without a role or a content: sending them ends in no traceback."""
    odd = Sample(None, 4, ({"content": "x"}, {"role": "system"}, {"role": "system", "content": 3}))
    for api in (Api.CHAT, Api.RESPONSES):
        assert list(odd.messages or ()) in body(odd, api=api).values()
    sent = body(odd, api=Api.MESSAGES)
    assert (sent["messages"], sent["system"]) == ([{"content": "x"}], [None, 3])


def test_samples_that_do_not_fit_the_endpoint() -> None:
    with pytest.raises(ConfigError, match="prompt_as='ids': a chat endpoint takes text only"):
        body(Sample((1, 2), 4), api=Api.CHAT)
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


MADE = {"input_tokens": 3, "output_tokens": 4}


@pytest.mark.parametrize(
    ("event", "piece"),
    [
        ({"type": "response.created", "response": {}}, Piece()),
        ({"type": "response.output_text.delta", "delta": "a", "logprobs": []}, Piece("a")),
        ({"type": "response.reasoning_text.delta", "delta": "r"}, Piece("r")),
        ({"type": "response.output_text.done", "text": "ab"}, Piece()),
        ({"type": "response.completed", "response": {"usage": MADE}},
         Piece("", 0, "stop", Usage(3, 4))),
        ({"type": "response.incomplete", "response": {
            "usage": MADE, "incomplete_details": {"reason": "max_output_tokens"}}},
         Piece("", 0, "length", Usage(3, 4))),
        ({"object": "response", "error": None, "usage": MADE, "output": [
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "function_call", "arguments": "{}"},
            {"type": "message", "content": [{"type": "output_text", "text": "c"}]}]},
         Piece("rc", 0, "stop", Usage(3, 4))),
    ],
)  # fmt: skip
def test_events_of_responses(event: dict[str, Any], piece: Piece) -> None:
    assert read_event(json.dumps(event)) == piece


@pytest.mark.parametrize(
    ("event", "piece"),
    [
        ({"type": "message_start", "message": {"usage": {
            "input_tokens": 1, "cache_read_input_tokens": 2, "output_tokens": 0}}},
         Piece(usage=Usage(3, 0))),
        ({"type": "ping"}, Piece()),
        ({"type": "content_block_start", "content_block": {"type": "text", "text": ""}}, Piece()),
        ({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}, Piece("a")),
        ({"type": "content_block_delta", "delta": {"thinking": "t"}}, Piece("t")),
        ({"type": "content_block_delta", "delta": {"partial_json": "{"}}, Piece()),
        ({"type": "message_delta", "delta": {"stop_reason": "max_tokens"},
          "usage": {"output_tokens": 4}}, Piece("", 0, "length", Usage(0, 4))),
        ({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": MADE},
         Piece("", 0, "stop", Usage(3, 4))),
        ({"type": "message_delta", "delta": {"stop_reason": "tool_use"}}, Piece("", 0, "tool_use")),
        ({"type": "message_stop"}, Piece()),
        ({"type": "message", "stop_reason": "end_turn", "usage": MADE, "content": [
            {"type": "thinking", "thinking": "t"}, {"type": "text", "text": "c"}]},
         Piece("tc", 0, "stop", Usage(3, 4))),
    ],
)  # fmt: skip
def test_events_of_messages(event: dict[str, Any], piece: Piece) -> None:
    assert read_event(json.dumps(event)) == piece


def test_later_counts_replace_earlier_ones() -> None:
    assert Usage(3, 0).later(Usage(0, 4)) == Usage(3, 4)
    assert Usage(3, 0).later(None) == Usage(3, 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ('{"type": "error", "code": "x", "message": "no more room"}', "answer: no more room"),
        ('{"type": "error", "error": {"message": "overloaded"}}', "answer: overloaded"),
        ('{"type": "response.failed", "response": {"error": {"message": "died"}}}', "died"),
        ('{"type": "response.completed"}', "response=None of an event is not an object"),
        ('{"type": "message_delta", "delta": {"stop_reason": 5}}', "stands where text should be"),
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
