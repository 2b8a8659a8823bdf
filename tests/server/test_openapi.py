"""The OpenAPI document allows what the server takes, and not what it always refuses."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from tests.server.serving import Served

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
}


def properties(server: Served, path: str) -> dict[str, Any]:
    operation = server.http.get("/openapi.json").json()["paths"][path]["post"]
    found: dict[str, Any] = operation["requestBody"]["content"]["application/json"]["schema"]
    return found["properties"]


def bounds(schema: dict[str, Any]) -> list[tuple[float, float]]:
    """Pairs of a value that is just allowed and one that is just not."""
    found = []
    for one in schema.get("anyOf", [schema]):
        if one.get("type") not in ("integer", "number"):
            continue
        kind = int if one["type"] == "integer" else float
        for keyword, step in (("minimum", -1), ("maximum", 1)):
            if keyword in one:
                found.append((kind(one[keyword]), kind(one[keyword] + step)))
        if "exclusiveMinimum" in one:
            found.append((one["exclusiveMinimum"] + 0.5, one["exclusiveMinimum"]))
    return found


def refused_field(server: Served, path: str, **fields: Any) -> str | None:
    """The field that a 400 names, None for an answer or a 400 about another one."""
    short = {} if "max_completion_tokens" in fields else {"max_tokens": 1}
    answer = server.post(path, {**BODIES[path], **short, **fields})
    assert answer.status_code in (200, 400), answer.text
    return None if answer.status_code == 200 else answer.json()["error"]["param"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_numbers(server: Served, path: str) -> None:
    """Values at a limit pass their own check, values beyond it do not."""
    checked = 0
    for name, schema in properties(server, path).items():
        for good, bad in bounds(schema):
            if name == "seed":  # limits are written as floats
                bad = 2**64 if bad > 0 else -(2**64)
            assert refused_field(server, path, **{name: bad}) == name, (name, bad)
            # A limit that comes from the context is one for prompt and answer together.
            if name not in ("max_tokens", "max_completion_tokens", "min_tokens"):
                needs = {"top_logprobs": {"logprobs": True}, "best_of": {"n": 1}}.get(name, {})
                assert refused_field(server, path, **{name: good}, **needs) != name, (name, good)
            checked += 1
    assert checked > 25


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_lists_and_texts(server: Served, path: str) -> None:
    checked = set()
    for name, schema in properties(server, path).items():
        for one in schema.get("anyOf", [schema]):
            if name in BODIES[path]:
                continue
            if "maxLength" in one:
                assert refused_field(server, path, **{name: "x" * (one["maxLength"] + 1)}) == name
                checked.add(name)
            if one.get("minLength"):
                assert refused_field(server, path, **{name: ""}) == name
            if "maxItems" in one and name != "allowed_token_ids":
                item = 1 if one["items"]["type"] == "integer" else "x"
                assert refused_field(server, path, **{name: [item] * (one["maxItems"] + 1)}) == name
                assert refused_field(server, path, **{name: [item] * one["maxItems"]}) is None
                checked.add(f"{name}[]")
    assert checked == {"stop", "stop[]", "bad_words[]", "stop_token_ids[]", "cache_salt",
                       "request_id"}  # fmt: skip


def test_roles_and_choices(server: Served) -> None:
    chat = properties(server, CHAT)
    message = chat["messages"]["items"]["properties"]
    for role in (*message["role"]["anyOf"][0]["enum"], "critic"):
        messages = [{"role": role, "content": "a"}, {"role": "user", "content": "b"}]
        assert refused_field(server, CHAT, messages=messages) is None, role
    for name in ("reasoning_effort", "model"):
        for value in chat[name]["anyOf"][0]["enum"]:
            assert refused_field(server, CHAT, **{name: value}) is None, value
    for name, values in (("tool_choice", ["none", "auto", None]), ("chat_template", [None])):
        for value in values:
            assert refused_field(server, CHAT, **{name: value}) is None
    assert chat["echo"]["enum"] == [False, None]


def test_what_is_required(server: Served) -> None:
    for path, body in BODIES.items():
        operation = server.http.get("/openapi.json").json()["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert schema["required"] == list(body)
        answer = server.post(path, {})
        assert answer.json()["error"]["code"] == "missing_required_parameter"
        assert "stream" in str(schema["allOf"])
        assert refused_field(server, path, stream_options={}) == "stream_options"


GOOD: dict[str, list[dict[str, Any]]] = {
    "/v1/responses": [
        {"input": "a", "include": ["message.output_text.logprobs"], "metadata": {"a": "b"}},
        {"input": [{"type": "message", "role": "developer", "content": "a"}], "store": False},
        {"input": "a", "stream": True, "stream_options": {"include_obfuscation": False}},
        {"input": "a", "reasoning": {"effort": "xhigh"}, "text": {"format": {"type": "text"}}},
        {"input": "a", "tool_choice": "none", "truncation": "disabled"},
    ],
    "/v1/messages": [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"messages": [{"role": "user", "content": "a"}], "system": "b", "stop_sequences": ["c"]},
        {"messages": [{"role": "user", "content": "a"}], "thinking": {"type": "disabled"}},
        {"messages": [{"role": "user", "content": "a"}], "output_config": {"effort": "max"}},
        {"messages": [{"role": "user", "content": "a"}], "tool_choice": {"type": "auto"}},
    ],
}
BAD: dict[str, list[dict[str, Any]]] = {
    "/v1/responses": [
        {"input": []},
        {"input": [{"type": "mcp_call"}]},
        {"input": "a", "truncation": "auto"},
        {"input": "a", "store": True},
        {"input": "a", "previous_response_id": "resp_1"},
        {"input": "a", "metadata": {"x" * 65: ""}},
        {"input": "a", "include": ["file_search_call.results"]},
        {"input": "a", "stream_options": {}},
    ],
    "/v1/messages": [
        {"messages": []},
        {"messages": [{"role": "tool", "content": "a"}]},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": None},
        {"messages": [{"role": "user", "content": "a"}], "thinking": {"type": "much"}},
        {"messages": [{"role": "user", "content": "a"}], "output_config": {"effort": "huge"}},
    ],
}


@pytest.mark.parametrize("path", GOOD)
def test_the_other_conversations(server: Served, path: str) -> None:
    """The document and the server agree on what is right and what is wrong."""
    operation = server.http.get("/openapi.json").json()["paths"][path]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert not {"background", "mcp_servers", "container", "prompt"} & schema["properties"].keys()
    validator = jsonschema.Draft202012Validator(schema)
    short = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 1}
    for body in GOOD[path]:
        assert server.post(path, short | body).status_code == 200, body
        validator.validate(short | body)
    for body in BAD[path]:
        assert server.post(path, short | body).status_code == 400, body
        assert not validator.is_valid(short | body), body
