"""How events reach the wire: those of one moment in one write."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server.app import build_app
from hetero_llm.server.responses import EventStream
from hetero_llm.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine, demo_tokenizer

USER = {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 3}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return demo_tokenizer()


async def _bodies(app: Any, path: str, body: bytes) -> list[bytes]:
    """What one request's response is written as, write by write."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "scheme": "http", "headers": [(b"content-type", b"application/json"), (b"host", b"a")],
        "client": ("127.0.0.1", 5), "server": ("a", 80), "state": {},
    }  # fmt: skip
    sent: list[dict[str, Any]] = []
    requests = iter([{"type": "http.request", "body": body, "more_body": False}])
    stays = asyncio.get_running_loop().create_future()

    async def receive() -> Any:
        return next(requests, None) or await stays

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    stays.cancel()
    assert sent[0]["status"] == 200, sent
    return [one["body"] for one in sent[1:] if one["body"]]


@pytest.mark.parametrize(
    ("path", "body", "first", "last"),
    [
        ("/v1/chat/completions", USER, 2, 1),
        ("/v1/responses", {"input": "a b", "max_output_tokens": 3}, 5, 4),
        ("/v1/messages", USER, 3, 3),
    ],
)
def test_the_events_around_the_first_and_last_token_are_one_write_each(
    tokenizer: Tokenizer, path: str, body: Any, first: int, last: int
) -> None:
    """`first`, `last`: events of the first write, and of the last one with events."""
    app = build_app(FakeEngine(tokenizer), ServerSettings(chat_template=TEMPLATE))

    async def run() -> list[bytes]:
        async with app.router.lifespan_context(app):
            return await _bodies(app, path, msgspec.json.encode({**body, "stream": True}))

    writes = [one for one in asyncio.run(run()) if one != b"data: [DONE]\n\n"]
    assert (writes[0].count(b"\n\n"), writes[-1].count(b"\n\n")) == (first, last)
    if path == "/v1/responses":
        # What the first events show is the response before its end.
        assert writes[0].count(b'"status":"in_progress"') == 3 and b"completed_at" in writes[0]
        assert b'"status":"incomplete"' not in writes[0] and b"incomplete" in writes[-1]


def test_several_payloads_of_one_call_are_one_write() -> None:
    written: list[bytes] = []

    async def send(message: Any) -> None:
        written.append(message.get("body", b""))

    async def run() -> None:
        stream = EventStream(send)
        await stream.send({"a": 1}, {"b": 2})
        await stream.send({"c": 3})
        await stream.done()

    asyncio.run(run())
    assert written == [
        b"", b'data: {"a":1}\n\ndata: {"b":2}\n\n', b'data: {"c":3}\n\n', b"data: [DONE]\n\n"
    ]  # fmt: skip
