"""What is read of a request for the choice."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hetero_llm.engine.processes.replica_choice import PIECE_BYTES
from hetero_llm.server.router.request_key import RequestKey, read_key

TEXT = "def add(a, b): return a + b\n" * 60


def key(**fields: Any) -> RequestKey:
    return read_key(json.dumps(fields).encode())


def chat(*texts: str, **fields: Any) -> RequestKey:
    messages = [{"role": "user", "content": text} for text in texts]
    return key(**fields, model="m", messages=messages)


def num_shared(one: RequestKey, other: RequestKey) -> int:
    shared = 0
    for mine, their in zip(one.pieces, other.pieces):
        if mine != their:
            break
        shared += 1
    return shared


def test_a_conversation_that_grows_keeps_its_pieces() -> None:
    first, second = chat(TEXT), chat(TEXT, "and then?")
    assert num_shared(first, second) >= len(TEXT) // PIECE_BYTES
    assert second.num_pieces > first.num_pieces


def test_other_fields_do_not_matter_wherever_they_stand() -> None:
    assert chat(TEXT, seed=1, temperature=0.5).pieces == chat(TEXT).pieces


def test_another_model_or_other_tools_share_nothing() -> None:
    assert num_shared(key(model="a", prompt=TEXT), key(model="b", prompt=TEXT)) == 0
    assert num_shared(chat(TEXT, tools=[{"type": "function"}]), chat(TEXT)) == 0


def test_all_apis_have_text() -> None:
    for fields in (
        {"prompt": TEXT}, {"prompt": list(range(600))}, {"input": TEXT},
        {"instructions": TEXT, "input": "x"}, {"system": TEXT, "messages": []},
    ):  # fmt: skip
        assert len(key(**fields).pieces) >= 6


def test_sessions() -> None:
    assert key(prompt="x").session == ""
    assert key(prompt="x", user="me").session == "me"
    assert key(prompt="x", user="me", prompt_cache_key="chat").session == "chat"
    assert read_key(b'{"user": "me"}', b"header").session == "header"
    assert key(user=5).session == "" and key(user="").session == ""


@given(st.binary(max_size=2000))
def test_anything_has_a_key(body: bytes) -> None:
    found = read_key(body, b"s")
    assert found.session == "s" and len(found.pieces) <= found.num_pieces


def test_deep_json_is_no_error() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    assert read_key(b'{"messages": ' + deep + b"}").session == ""
