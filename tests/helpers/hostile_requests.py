"""Hostile requests to a whole server, beside a stream of an ordinary user.

Wrong values in every field of every route, bodies that are hardly JSON, grammars made to take long,
clients that leave, read slowly or send several requests at once. Nothing may be a 5xx, hang, or
change or stop the stream beside. By hand, for more than the tests send:

    python -m tests.helpers.hostile_requests http://127.0.0.1:8000 SEED COUNT
"""

from __future__ import annotations

import copy
import json
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx

PATIENCE = 60.0
"""Seconds until an answer counts as missed."""
_MESSAGES = [{"role": "user", "content": "def add(a, b):"}]
_TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
_OPENAI_TOOL = {"type": "function", "function": _TOOL}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def add(a, b):", "max_tokens": 4},
    "/v1/chat/completions": {"messages": _MESSAGES, "max_tokens": 4, "tools": [_OPENAI_TOOL]},
    "/v1/responses": {
        "input": "a",
        "max_output_tokens": 4,
        "tools": [{"type": "function", **_TOOL}],
    },
    "/v1/messages": {
        "messages": _MESSAGES,
        "max_tokens": 4,
        "tools": [{"name": "f", "input_schema": _TOOL["parameters"]}],
    },
    "/v1/messages/count_tokens": {"messages": _MESSAGES, "max_tokens": 4},
    "/generate": {"prompt": "a", "max_tokens": 4},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/score": {"text_1": "a", "text_2": "b"},
    "/classify": {"input": "a"},
    "/pooling": {"input": "a"},
}
_LIMITS = {"/v1/responses": "max_output_tokens"}
_ERROR_KEYS = ("message", "type", "param", "code")
ERRORS_OF_ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")
_WRONG: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    2**64,
    -(2**63),
    10**40,
    0.5,
    -0.5,
    1e308,
    -1e-320,
    "",
    " ",
    "a",
    "0",
    "-1",
    "1e400",
    "nan",
    "NaN",
    "\x00",
    "\ud83d",
    "\ufffe",
    "😀" * 50,
    "a" * 70_000,
    "</s>",
    "<|im_start|>",
    "../../etc/passwd",
    "http://127.0.0.1:1/x",
    "data:image/png;base64,AAAA",
    [],
    [[]],
    [None],
    [0],
    [-1],
    [2**70],
    [0.5],
    ["a"],
    [""],
    ["a"] * 2000,
    list(range(3000)),
    [{}],
    [[1, 2], "a"],
    [[[1]]],
    {},
    {"": ""},
    {"a": 1},
    {"type": "x"},
    {"type": None},
    {"-1": 1},
    {"5": "a"},
    {"99999999999": 1.0},
    {"5": 1e300},
    {"$ref": "#"},
    {"type": "function"},
    {"name": "f"},
    {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {"schema": 3}},
    {"include_usage": "a"},
    {str(i): 1 for i in range(3000)},
)
_LINES = {f"field_{number}": {"type": "string", "maxLength": 3} for number in range(10_000)}
_DEEP: Any = {}
for _ in range(200):
    _DEEP = {"type": "array", "items": _DEEP}
_SCHEMAS: tuple[Any, ...] = (
    True,
    False,
    {},
    {"$ref": "#"},
    {"$ref": "#/$defs/nothing"},
    {"$ref": "http://127.0.0.1:1/a"},
    {"type": "object", "properties": _LINES, "required": sorted(_LINES)},
    {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}},
    {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
    {"allOf": [{"$ref": "#"}]},
    {"anyOf": [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 2}]},
    {"type": "string", "minLength": 10**9},
    {"type": "string", "maxLength": 10**12},
    {"type": "array", "minItems": 10**9},
    {"enum": []},
    {"enum": ["a"] * 20_000},
    _DEEP,
    {"type": "integer", "minimum": 5, "maximum": 4},
    {"multipleOf": 0},
    {"type": "integer", "multipleOf": 1e-300},
    {"pattern": "(a*)*b"},
    {"pattern": "(?=a)b"},
    {"pattern": "(" * 300},
    {"pattern": "a{1000}{1000}"},
    {"type": "string", "pattern": "(x{1,900}){1,900}"},
    {"format": "nothing"},
    {"type": ["object", 3]},
    {"properties": []},
    {"required": "a"},
    {"oneOf": [{"type": "string"}] * 500},
    {"not": {"type": "null"}},
    {"patternProperties": {"(": {}}},
    {"const": "\ud800"},
    {"type": "object", "minProperties": 10**6},
)
_REGEXES = (
    "",
    "(",
    "a{100000}",
    "(a{1000}){1000}",
    "((a{100}){100}){100}",
    "(a*)*",
    "(a|a)*b",
    "[",
    r"\1",
    "(?=a)",
    "(?<n>a)",
    r"\p{L}{500}",
    "." * 5000,
    "(.*)" * 60,
    "\x00",
    "[^\\x00-\\x{10FFFF}]",
    "a" * 60_000,
    "(?i)(" + "|".join(f"w{number}" for number in range(3000)) + ")",
    r"\b",
    "$^",
    "(.|\n){0,5000}",
)
_GRAMMARS = (
    "",
    "start:",
    "start: start",
    'start: start start | "a"',
    "start: a\na: b\nb: a",
    "root ::= root",
    'root ::= "a" root root | "b"',
    "start: /(/",
    'start: "a"~1..1000000000',
    "start: x",
    "?start: " + "(" * 500,
    "start: " + " | ".join(f'"{n}"' for n in range(9000)),
    "%import common.X",
    'start: %json {"type": 3}',
    "start: <nothing>",
    "root ::= [^]",
    "\x00",
    "start: a~5\na: b~5\nb: /x{999}/",
    'start: "a"~1000000',
    'start: ("a"?)~3000',
)
_RAW_BODIES = (
    b"",
    b"null",
    b"[]",
    b'"a"',
    b"{",
    b'{"prompt": "a"',
    b'{"prompt": "a"}}',
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"prompt": "a", "prompt": 5}',
    b'{"prompt": "\\ud800", "messages": []}',
    b'{"prompt": "\xff\xfe"}',
    b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 1}',
    b"NaN",
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": -Infinity}',
    b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": "a", "top_p": 1e99999}',
    b"prompt=a",
    b"\x1f\x8b\x08\x00",
    b"{}" * 1000,
    b" " * 100_000,
    b'{"prompt": "a\x00b"}',
    b'{"\\u0000": 1, "prompt": "a", "max_tokens": 1}',
    b"{'prompt': 'a'}",
    b'{"prompt": "a",}',
)
_METHODS = (b"HEAD", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"TRACE", b"GET", b"FOO", b"post")
_HEADERS = (
    b"x: " + b"y" * 60_000,
    b"x-request-id: " + b"z" * 5000,
    b"content-type: text/plain",
    b"content-type: multipart/form-data; boundary=x",
    b"content-encoding: gzip",
    b"expect: 100-continue",
    b"x-request-timeout-ms: nan",
    b"x-request-timeout-ms: -5",
    b"x-request-timeout-ms: 1",
    b"authorization: Bearer \xff",
    b"accept: text/event-stream",
    b"anthropic-version: \x7f",
    b"content-type: application/json; charset=utf-16",
    b"traceparent: x",
)


@dataclass(frozen=True, slots=True)
class Hostile:
    """One thing that a client does.

    Attributes:
        name: what it is, for messages.
        data: the bytes that it sends.
        fields: those of its body; None: it has none, or the body is broken.
        leaves: it closes the connection after so many bytes of the answer; None: it stays.
        slow: it reads a few bytes at a time.
        drops: it sends a few bytes at a time.
    """

    name: str
    data: bytes
    fields: frozenset[str] | None = None
    leaves: int | None = None
    slow: bool = False
    drops: bool = False


def http(path: str, body: bytes, *headers: bytes, method: bytes = b"POST") -> bytes:
    lines = [b"%s %s HTTP/1.1" % (method, path.encode()), b"host: a", b"connection: close"]
    lines += [b"content-length: %d" % len(body)]
    if not any(line.startswith(b"content-type") for line in headers):
        lines += [b"content-type: application/json"]
    return b"\r\n".join([*lines, *headers]) + b"\r\n\r\n" + body


def fields_of(document: Any) -> dict[str, list[str]]:
    """The fields of each route by a server's own OpenAPI document."""
    found = {}
    for path, operations in document["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        schema = content.get("application/json", {}).get("schema", {})
        if schema.get("properties"):
            found[path] = sorted(schema["properties"])
    return found


def hostile(rng: Random, fields: dict[str, list[str]]) -> Hostile:
    """Something that a client should not do."""
    makers = (_field, _field, _field, _inner, _inner, _constraint, _raw, _wire, _manners, _sizes)
    return rng.choice(makers)(rng, fields)


def _field(rng: Random, fields: dict[str, list[str]]) -> Hostile:
    path = rng.choice(sorted(GOOD))
    body = copy.deepcopy(GOOD[path])
    name = rng.choice([*fields.get(path, ()), *body, "no_such_field"])
    body[name] = rng.choice(_WRONG)
    if rng.random() < 0.15:
        other = rng.choice([*fields.get(path, ()), *body])
        body[other] = rng.choice(_WRONG)
        return _json(rng, path, body, f"{name} and {other}")
    return _json(rng, path, body, f"{name}={body[name]!r:.80}")


def _inner(rng: Random, fields: dict[str, list[str]]) -> Hostile:
    """A wrong value, or a missing or unknown key, somewhere inside a good body."""
    path = rng.choice([path for path, body in GOOD.items() if len(str(body)) > 60])
    body = copy.deepcopy(GOOD[path])
    if rng.random() < 0.5:
        body |= copy.deepcopy(rng.choice(_NESTED.get(path, [{}])))
    places = list(_places(body))
    holder, key, top = rng.choice(places)
    match rng.choice(("wrong", "wrong", "missing", "unknown", "many")):
        case "missing":
            del holder[key]
        case "unknown" if isinstance(holder, dict):
            holder[rng.choice(("x", "", "\x00", "type", "id", "strict"))] = rng.choice(_WRONG)
        case "many" if isinstance(holder, list):
            holder[:] = [holder[key]] * rng.choice((200, 3000))
        case _:
            holder[key] = rng.choice(_WRONG)
    return _json(rng, path, body, f"inside {top}: {json.dumps(body)[:200]}")


def _places(value: Any, top: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Every place in a value: what holds it, its key or index, and its field."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        place = top or str(key)
        yield value, key, place
        if isinstance(inner, (dict, list)):
            yield from _places(inner, place)


_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_PART = {"type": "text", "text": "a"}
_NESTED: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {
            "messages": [
                *_MESSAGES,
                {"role": "assistant", "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "1"},
            ]
        },
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        _PART,
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                    ],
                }
            ]
        },
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "f"}}],
                },
            }
        },
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "boolean"}, "strict": True},
            }
        },
        {"stream_options": {"include_usage": True}, "stream": True},
        {"logit_bias": {"5": 1}, "logprobs": True, "top_logprobs": 2},
        {
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {**_TOOL, "strict": True}}],
        },
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"chat_template_kwargs": {"a": [1]}},
    ],
    "/v1/completions": [
        {"structured_outputs": {"regex": "a+"}},
        {"logit_bias": {"5": 1}},
        {"stop": ["a", "b"]},
        {
            "response_format": {
                "type": "structural_tag",
                "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}],
                "triggers": ["<a"],
            }
        },
        {
            "response_format": {
                "type": "structural_tag",
                "format": {
                    "type": "triggered_tags",
                    "triggers": ["<a"],
                    "tags": [
                        {
                            "begin": "<a>",
                            "content": {"type": "json_schema", "json_schema": {}},
                            "end": "</a>",
                        }
                    ],
                },
            }
        },
    ],
    "/v1/responses": [
        {
            "input": [
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "a"}],
                }
            ]
        },
        {
            "input": [
                {"role": "user", "content": "a"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
            ]
        },
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"previous_response_id": "resp_x"},
        {"reasoning": {"effort": "low", "summary": "auto"}},
        {
            "text": {
                "format": {
                    "type": "json_schema",
                    "name": "x",
                    "schema": {"type": "boolean"},
                    "strict": True,
                }
            }
        },
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "mcp", "server_label": "x"}]},
        {"tool_choice": {"type": "function", "name": "f"}},
    ],
    "/v1/messages": [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        _PART,
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
                        },
                    ],
                }
            ]
        },
        {
            "messages": [
                *_MESSAGES,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "a", "signature": ""},
                        {"type": "tool_use", "id": "t", "name": "f", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t",
                            "content": [_PART],
                            "is_error": True,
                        }
                    ],
                },
            ]
        },
        {"tool_choice": {"type": "tool", "name": "f"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
        {"system": [_PART], "stop_sequences": ["a"]},
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "boolean"}}}},
    ],
}


def _constraint(rng: Random, fields: dict[str, list[str]]) -> Hostile:
    path = rng.choice(("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"))
    body = copy.deepcopy(GOOD[path])
    kind = rng.choice(("json", "json", "regex", "grammar", "tool"))
    schema = rng.choice(_SCHEMAS)
    if kind == "tool":
        tool = body.get("tools", [copy.deepcopy(_OPENAI_TOOL)])[0]
        holder = tool.get("function", tool)
        holder["input_schema" if "input_schema" in holder else "parameters"] = schema
        holder["strict"] = True
        body["tools"] = [tool]
        body["tool_choice"] = {"type": "any"} if path == "/v1/messages" else "required"
        where = "tools"
    elif path == "/v1/responses":
        where = "text"
        body[where] = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    elif path == "/v1/messages":
        where = "output_config"
        body[where] = {"format": {"type": "json_schema", "schema": schema}}
    elif kind == "json":
        where = rng.choice(("response_format", "guided_json", "structured_outputs"))
        forms = {"json_schema": {"name": "x", "schema": schema}, "type": "json_schema"}
        body[where] = {"response_format": forms, "guided_json": schema}.get(where, {"json": schema})
    else:
        text = rng.choice(_REGEXES if kind == "regex" else _GRAMMARS)
        where = rng.choice((f"guided_{kind}", "structured_outputs"))
        body[where] = text if where != "structured_outputs" else {kind: text}
    return _json(rng, path, body, f"{where}: {json.dumps(body[where])[:160]}")


def _sizes(rng: Random, fields: dict[str, list[str]]) -> Hostile:
    """More than there should be of what is allowed."""
    path = rng.choice(("/v1/completions", "/v1/chat/completions", "/generate"))
    body = copy.deepcopy(GOOD[path])
    more: dict[str, Any] = rng.choice(
        (
            {"n": 64},
            {"n": 65},
            {"best_of": 10**6},
            {"n": 64, "best_of": 64, "use_beam_search": True, "temperature": 0},
            {"max_tokens": 10**9},
            {"max_tokens": 0},
            {"seed": -5},
            {"seed": -(2**63)},
            {"stop": [""]},
            {"stop": ["a"] * 5000},
            {"stop": ["a" * 100_000]},
            {"min_tokens": 10**9},
            {"logit_bias": {str(i): 100 for i in range(20_000)}},
            {"bad_words": ["a"] * 5000},
            {"allowed_token_ids": list(range(10**5))},
            {"stop_token_ids": list(range(10**5))},
            {"prompt_logprobs": 10**6},
            {"truncate_prompt_tokens": 10**9},
            {"repetition_penalty": 1e-300},
            {"temperature": 1e-300},
            {"temperature": 1e300},
            {"frequency_penalty": 1e300},
            {"presence_penalty": -1e300},
            {"no_repeat_ngram_size": 10**9},
            {"min_p": 1.0, "top_p": 1e-300},
            {"num_speculative_tokens": 10**9},
            {"priority": -(2**63)},
            {"logprobs": 10**6},
            {"user": "a" * 200_000},
            {"metadata": {str(i): "a" for i in range(1000)}},
            {"cache_salt": "a" * 200_000},
        )
    )
    if rng.random() < 0.3:
        long = rng.choice(("a " * 3000, "a" * 900_000, "\x00" * 5000, "😀" * 4000))
        more = (
            {"messages": [{"role": "user", "content": long}]}
            if "chat" in path
            else {"prompt": long}
        )
    elif "chat" not in path and rng.random() < 0.2:
        prompts = (
            ["a"] * 3000,
            [""],
            [[]],
            [5] * 5000,
            [[5], [10**6]],
            [-1],
            ["a", [5]],
            [[5]] * 200,
        )
        more = {"prompt": rng.choice(prompts)}
    if "chat" in path and rng.random() < 0.3:
        template = rng.choice(
            (
                "{% for a in range(10**9) %}x{% endfor %}",
                "{{ ''.__class__.__mro__ }}",
                "{{ 'a' * 10**10 }}",
                "{{",
                "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
                "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            )
        )
        more = {"chat_template": template}
    body |= more
    return _json(rng, path, body, f"{json.dumps(more)[:120]}")


def _json(rng: Random, path: str, body: Any, name: str) -> Hostile:
    if isinstance(body, dict) and "stream" not in body and rng.random() < 0.3:
        body["stream"] = True
    fields = frozenset(body) | GOOD[path].keys()  # one may be missing
    return Hostile(f"{path}: {name}", http(path, json.dumps(body).encode()), fields)


def _raw(rng: Random, fields: dict[str, list[str]]) -> Hostile:
    path, body = rng.choice(sorted(GOOD)), rng.choice(_RAW_BODIES)
    headers = rng.sample(_HEADERS, rng.choice((0, 0, 1)))
    return Hostile(f"{path}: raw {body[:60]!r} {headers!r:.80}", http(path, body, *headers))


def _wire(rng: Random, fields: dict[str, list[str]]) -> Hostile:
    path = rng.choice(
        (
            *GOOD,
            "/",
            "/metrics",
            "/v1/models",
            "/v1/models/%00",
            "/v1/responses/x",
            "/docs",
            "/status.json",
            "/v1/responses/x/input_items",
            "/../../x",
            "/v1/files",
            "/%ff",
            "/openapi.json",
        )
    )
    body = json.dumps(GOOD.get(path, {})).encode()
    if rng.random() < 0.5:
        data = http(path, body, method=rng.choice(_METHODS))
        return Hostile(f"{path}: {data.split()[0].decode()}", data)
    headers = rng.sample(_HEADERS, 2) + rng.choice(([], [b"a: b"] * 400))
    return Hostile(f"{path}: headers {headers!r:.100}", http(path, body, *headers))


def _manners(rng: Random, fields: dict[str, list[str]]) -> Hostile:
    """Clients that leave, read slowly, or send several requests before they read."""
    path = rng.choice(("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"))
    body = {**GOOD[path], "stream": True, "ignore_eos": True}
    body[_LIMITS.get(path, "max_tokens")] = rng.choice((30, 300))
    data = http(path, json.dumps(body).encode())
    match rng.choice(("leaves", "leaves", "slow", "pipeline", "cut", "half")):
        case "leaves":
            return Hostile(f"{path}: leaves", data, leaves=rng.choice((0, 1, 200, 2000)))
        case "slow":
            return Hostile(f"{path}: reads slowly", data, slow=True)
        case "pipeline":
            kept = data.replace(b"connection: close\r\n", b"")
            return Hostile(f"{path}: pipelined", kept * rng.randint(2, 4) + data)
        case "cut":
            return Hostile(f"{path}: cut", data[: rng.randrange(1, len(data))], leaves=0)
        case _:
            return Hostile(f"{path}: half a body", data[: -rng.randrange(1, 20)], leaves=0)


# -- sending and judging --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server is."""

    host: str
    port: int

    @staticmethod
    def at(url: str) -> Server:
        parts = httpx.URL(url)
        return Server(parts.host, parts.port or 80)

    def send(self, what: Hostile) -> bytes:
        """The answer, all of it unless the client leaves.

        Raises:
            TimeoutError: no end of it comes.
        """
        answer = b""
        deadline = time.monotonic() + PATIENCE
        with socket.socket() as connection:
            if what.slow:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.settimeout(PATIENCE)
            connection.connect((self.host, self.port))
            with suppress(ConnectionError):  # it may refuse before it has read all
                size = len(what.data) // 40 + 1 if what.drops else len(what.data) or 1
                for first in range(0, len(what.data), size):
                    connection.sendall(what.data[first : first + size])
                    if what.drops:
                        time.sleep(0.002)
            with suppress(ConnectionError):
                while what.leaves is None or len(answer) < what.leaves:
                    piece = connection.recv(256 if what.slow else 1 << 16)
                    if not piece:
                        break
                    answer += piece
                    if time.monotonic() > deadline:
                        raise TimeoutError
                    if what.slow and len(answer) < 4000:
                        time.sleep(0.02)
        return answer


def faults_of(what: Hostile, answer: bytes) -> list[str]:
    """What is wrong with an answer."""
    if what.leaves is not None:
        return []
    statuses = [int(code) for code in re.findall(rb"(?:^|\n|}|>)HTTP/1\.1 (\d{3}) ", answer)]
    if not statuses:
        return [] if len(what.data) > 50_000 else ["no answer"]
    found = [f"status {code}" for code in statuses if code >= 500 and code not in (501, 505)]
    if re.search(rb"internal_error|Traceback|api_error|server_error", answer):
        found.append("an internal error")
    if 400 <= statuses[0] < 500 and len(statuses) == 1:
        found += _faults_of_error(what, answer, names=statuses[0] in (400, 422))
    return found


def _faults_of_error(what: Hostile, answer: bytes, *, names: bool) -> list[str]:
    """What is wrong with one error.

    Args:
        names: its message has to begin with a field of the request.
    """
    head, _, body = answer.partition(b"\r\n\r\n")
    if what.data.startswith(b"HEAD"):
        return []
    try:
        error = json.loads(body)["error"]
        message = error["message"]
    except (ValueError, KeyError, TypeError):
        return ["an error without a message"]
    whole = json.loads(body)
    keys = {"message", "type"} if whole.get("type") == "error" else set(_ERROR_KEYS)
    if not error.keys() >= keys or (keys == set(_ERROR_KEYS)) != (whole.keys() == {"error"}):
        return ["an error that is not of OpenAI's or Anthropic's form"]
    if not isinstance(message, str) or not message or not names:
        return [] if message else ["an error with an empty message"]
    wholes = (
        "the body",
        "the JSON",
        "the model",
        "this model's maximum context",
        "prompt is too long",
    )
    if what.fields is None or message.startswith(wholes):
        return []
    if re.split(r"[^a-z_0-9]", message)[0] not in what.fields:
        return ["an error that begins with no field of the request"]
    return []


class Beside:
    """An ordinary user, who streams the same request again and again.

    Attributes:
        rounds: whole answers so far.
        gap: longest wait for the next token so far, in seconds.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._body = {"prompt": "class Stack:", "max_tokens": 60, "temperature": 0, "stream": True}
        self.rounds = 0
        self.gap = 0.0
        self.fault: str | None = None
        self._wanted = self._text()
        self.gap = 0.0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @contextmanager
    def running(self) -> Iterator[Beside]:
        self._thread.start()
        try:
            yield self
        finally:
            self._ends.set()
            self._thread.join(2 * PATIENCE)
            assert not self._thread.is_alive(), "the stream beside hangs"

    def _run(self) -> None:
        while not self._ends.is_set() and self.fault is None:
            try:
                text = self._text()
            except Exception as error:
                self.fault = f"{type(error).__name__}: {error}"
                return
            if text != self._wanted:
                self.fault = f"{text!r} instead of {self._wanted!r}"
            self.rounds += 1

    def _text(self) -> str:
        found, last = "", time.monotonic()
        with httpx.stream(
            "POST", f"{self._url}/v1/completions", json=self._body, timeout=PATIENCE
        ) as answer:
            assert answer.status_code == 200, answer.status_code
            for line in answer.iter_lines():
                now = time.monotonic()
                self.gap, last = max(self.gap, now - last), now
                if line.startswith("data: {"):
                    found += json.loads(line[6:])["choices"][0]["text"]
        return found


Make = Callable[[Random, dict[str, list[str]]], Hostile]
"""Makes something hostile; knows the fields of each route."""


def attack(
    url: str, seed: int, count: int, *, make: Make = hostile, loud: bool = False
) -> tuple[Counter[str], list[str]]:
    """Sends `count` hostile requests of a seed. Returns what was counted, and all faults."""
    server = Server.at(url)
    fields = fields_of(httpx.get(f"{url}/openapi.json").json())
    counts: Counter[str] = Counter()
    faults: list[str] = []
    with Beside(url).running() as beside:
        for number in range(count):
            what = make(Random(f"{seed} {number}"), fields)
            begun, beside.gap = time.monotonic(), 0.0
            try:
                answer = server.send(what)
                found = faults_of(what, answer)
                counts[answer[9:12].decode() or "none"] += 1
            except OSError as error:
                answer, found = b"", [f"{type(error).__name__}: {error}"]
            took = time.monotonic() - begun
            if loud and max(took, beside.gap) > 1.0:
                print(f"slow: {seed} {number} {took:.1f} s, gap {beside.gap:.1f} s, {what.name}")
            if beside.fault is not None:
                found.append(f"the stream beside: {beside.fault}")
            faults += [f"{seed} {number}, {one}: {what.name}\n{answer[-600:]!r}" for one in found]
            if loud:
                for one in faults[len(faults) - len(found) :]:
                    print(one, flush=True)
            if beside.fault is not None:
                break
    counts["rounds beside"] = beside.rounds
    return counts, faults


if __name__ == "__main__":
    print(dict(attack(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), loud=True)[0]))
