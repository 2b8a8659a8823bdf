"""SageMaker's route, for models that generate; test_pooling.py has those that pool."""

from __future__ import annotations

import pytest

from tests.server.serving import Served

ROUTE = "/invocations"
CHAT = [{"role": "user", "content": "a b"}]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"prompt": "a b"}, "text_completion"),
        ({"messages": CHAT}, "chat.completion"),
        ({"messages": CHAT, "prompt": "a b"}, "chat.completion"),
    ],
)
def test_the_body_says_what_is_meant(server: Served, body: dict[str, object], kind: str) -> None:
    answer = server.post(ROUTE, body | {"max_tokens": 2})
    assert answer.status_code == 200 and answer.json()["object"] == kind


def test_streams(server: Served) -> None:
    answer = server.post(ROUTE, {"prompt": "a b", "max_tokens": 2, "stream": True})
    assert (
        answer.content.endswith(b"data: [DONE]\n\n")
        and answer.content.count(b"text_completion") > 1
    )


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b'{"input": "a"}', 400, "it needs messages (/v1/chat/completions) or prompt"),
        (b"[]", 400, "must be an object"),
        (b"{", 400, "not valid JSON"),
        (b'{"prompt": ""}', 400, "prompt must not be empty"),
    ],
)
def test_mistakes(server: Served, body: bytes, status: int, reason: str) -> None:
    headers = {"content-type": "application/json"}
    answer = server.http.post(ROUTE, content=body, headers=headers)
    assert answer.status_code == status and reason in answer.json()["error"]["message"]
    assert server.http.post(ROUTE, content=body).status_code == 415
