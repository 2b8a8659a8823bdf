"""POST /generate as clients of vLLM's first server use it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import Served, serving

BODY = {"prompt": "a b", "max_tokens": 3}
ECHO = "a ba ba ba b"  # the fake engine repeats the prompt


def test_texts_begin_with_the_prompt(server: Served) -> None:
    answer = server.post("/generate", BODY | {"n": 2, "temperature": 0.0, "top_k": 1})
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    first, second = answer.json().pop("text")
    assert answer.json().keys() == {"text"}
    assert ECHO.startswith(first) and second.startswith("a b") and first != second
    _, prompt, params = server.engine.seen[-1]
    assert (prompt.text, params.n, params.top_k, params.max_tokens) == ("a b", 2, 1, 3)
    server.post("/generate", {"prompt": "a"})
    assert server.engine.seen[-1][2].max_tokens == 16  # that of SamplingParams
    beams = {"use_beam_search": True, "n": 4, "temperature": 0.0}
    assert len(server.post("/generate", BODY | beams).json()["text"]) == 4


def pieces(content: bytes) -> list[Any]:
    """As TACO-LLM's manual reads a stream."""
    assert content.endswith(b"\0")
    return [json.loads(piece) for piece in content.split(b"\0") if piece]


def test_a_stream_has_the_whole_text_in_each_piece(server: Served) -> None:
    whole = server.post("/generate", BODY | {"n": 2}).json()
    found = pieces(server.post("/generate", BODY | {"n": 2, "stream": True}).content)
    assert found[-1] == whole and len(found) == 6
    for before, after in zip(found, found[1:], strict=False):
        assert all(b.startswith(a) for a, b in zip(before["text"], after["text"], strict=True))
    assert found[0]["text"][0].startswith("a b") and found[0]["text"][1] == "a b"


def test_silence_and_errors_in_a_stream(tokenizer: Tokenizer) -> None:
    settings = ServerSettings(keep_alive_seconds=0.001)
    with serving(FakeEngine(tokenizer, delay=0.02, fail_after=2), settings) as served:
        found = pieces(served.post("/generate", BODY | {"stream": True}).content)
    assert [one.keys() for one in found] == [{"text"}, {"text"}, {"error"}]
    assert found[-1]["error"]["code"] == "generation_failed"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [66]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"guided_json": {"type": "poem"}}, "guided_json.type"),
    ],
)
def test_mistakes(server: Served, more: dict[str, Any], param: str) -> None:
    answer = server.post("/generate", BODY | more)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
