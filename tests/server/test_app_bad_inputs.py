"""The list of bad inputs: exact status and body of each, and a server that lives on.

`bad_inputs.json` has one case a line. A case with "on" runs on these generation endpoints, its
body merged into a good one; others name method and path. `$repeat`, `$text` and the like stand for
values that are too large to write down. The messages are in `golden/bad_inputs.json`;
WRITE_GOLDEN=1 writes them anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server.settings import Limits, ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import Served, raw_post, serving

MESSAGES_FILE = Path(__file__).with_name("golden") / "bad_inputs.json"
MESSAGES: dict[str, str] = json.loads(MESSAGES_FILE.read_text(encoding="utf-8"))
CASES = json.loads(Path(__file__).with_name("bad_inputs.json").read_text(encoding="utf-8"))
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
GOOD = {
    "completions": {"prompt": "a b", "max_tokens": 2},
    "chat": {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 2},
}
KINDS = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}
REFUSING = ("draining", "full", "dead", "hung")
"""States of a server that refuses all generation requests."""
RUNS = [(case, on) for case in CASES for on in case["on"] or ["-"]]


def expanded(value: Any) -> Any:
    """The value with its stand-ins replaced."""
    if isinstance(value, list):
        return [expanded(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$repeat": [item, count]}:
            return [expanded(item)] * count
        case {"$text": [text, count]}:
            return text * count
        case {"$deep": depth}:  # raw JSON of this depth, the outermost object included
            inner = "[" * (depth - 1) + "]" * (depth - 1)
            return f'{{"prompt": "a", "max_tokens": 2, "user": null, "metadata": {inner}}}'
        case {"$many": count}:  # raw JSON of `count` objects
            return '{"metadata": [' + "{}, " * count + "{}]}"
        case {"$ids": count}:
            return {str(token): 1 for token in range(count)}
        case {"$bearer": length}:
            return "Bearer " + "a" * length
        case {"$nest": depth}:
            nested: Any = {}
            for _ in range(depth):
                nested = {"items": nested}
            return nested
    return {name: expanded(item) for name, item in value.items()}


@pytest.fixture(scope="module")
def servers(tokenizer: Tokenizer, server: Served) -> Iterator[dict[str, Served]]:
    settings = {
        "keys": ServerSettings(api_keys=("key-one", "key-two")),
        "small": ServerSettings(limits=Limits(body_bytes=2000)),
        "strict": ServerSettings(strict_fields=True),
    }
    engines = {
        "full": FakeEngine(tokenizer, max_queue=0),
        "busy": FakeEngine(tokenizer, silent_above=100),
    }
    names = {case["server"] for case in CASES if "server" in case}
    with ExitStack() as stack:
        found = {"default": server}
        for name in sorted(names):
            engine = engines.get(name) or FakeEngine(tokenizer)
            found[name] = stack.enter_context(serving(engine, settings.get(name)))
        found["draining"].context.draining = True
        found["dead"].engine.dead = True
        found["hung"].engine.hung = True
        busy = found["busy"]
        for on, path in PATHS.items():
            body = GOOD[on] | {"request_id": "live", "max_tokens": 1000}
            stack.enter_context(raw_post(busy, path, body))
        busy.wait(lambda: busy.context.load == 2)
        yield found


def test_the_list_is_whole() -> None:
    assert len(CASES) >= 330
    assert len({(case["group"], case["name"]) for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    ("case", "on"), RUNS, ids=[f"{case['group']}-{case['name']}-{on}" for case, on in RUNS]
)
def test_case(servers: dict[str, Served], case: dict[str, Any], on: str) -> None:
    served = servers[case.get("server", "default")]
    response = send(served, case, on)
    assert response.status_code == case["status"], response.text[:600]
    assert response.headers["x-request-id"]
    if case["status"] >= 400:
        check_error(response, case, on)
    probe(served, case)


def send(served: Served, case: dict[str, Any], on: str) -> httpx.Response:
    headers = {"content-type": "application/json", **expanded(case.get("headers", {}))}
    if case.get("many_headers"):
        headers |= {f"x-{index}": "a" for index in range(case["many_headers"])}
    content: bytes | None = None
    if "raw" in case:
        content = expanded(case["raw"]).encode("latin-1")
    elif "body" in case:
        body = expanded(case["body"])
        content = json.dumps(GOOD.get(on, {}) | body if isinstance(body, dict) else body).encode()
    path = PATHS.get(on) or case["path"]
    method = case.get("method", "POST")
    target = {"target": path.encode()}  # as it is: httpx would tidy it
    return served.http.request(
        method,
        served.url,
        headers=headers,
        content=iter([content or b""]) if case.get("chunked") else content,
        extensions=target,
    )


def check_error(response: httpx.Response, case: dict[str, Any], on: str) -> None:
    assert len(response.content) <= 4096
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (case["code"], case["param"])
    assert error["type"] == KINDS.get(case["status"], "invalid_request_error")
    assert 0 < len(error["message"]) <= 512
    check_message(f"{case['group']}-{case['name']}-{on}", error["message"])
    if case["status"] == 503:
        assert int(response.headers["retry-after"]) >= 1
    if case["status"] == 405:
        assert response.headers["allow"]


def check_message(name: str, message: str) -> None:
    if os.environ.get("WRITE_GOLDEN"):
        MESSAGES[name] = message
        text = json.dumps(MESSAGES, indent=0, ensure_ascii=False, sort_keys=True)
        MESSAGES_FILE.write_text(text + "\n", encoding="utf-8")
    assert message == MESSAGES[name]


def probe(served: Served, case: dict[str, Any]) -> None:
    """The next request finds a server that is as it was."""
    headers = {"authorization": "Bearer key-two"} if case.get("server") == "keys" else {}
    answer = served.post("/v1/completions", GOOD["completions"], headers=headers)
    name = case.get("server")
    assert answer.status_code == (503 if name in REFUSING else 200)
    live = 2 if name == "busy" else 0
    assert served.engine.num_live == live and served.context.load == live
