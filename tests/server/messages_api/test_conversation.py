"""Tools, images and options of /v1/messages in the words of a chat request."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hetero_llm.server.errors import ApiError
from hetero_llm.server.messages_api.conversation import translated
from hetero_llm.server.messages_api.protocol import MessagesRequest
from hetero_llm.server.protocol import ChatRequest
from hetero_llm.server.settings import Limits
from tests.server.responses_api.test_conversation import plain

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
F = {
    "name": "f", "description": "d", "input_schema": SCHEMA, "type": "custom",
    "cache_control": {"type": "ephemeral"},
}  # fmt: skip
F_IN_CHAT = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": SCHEMA},
}
USER = [{"role": "user", "content": "a"}]


def chat(*, takes_images: bool = False, **body: Any) -> ChatRequest:
    request = msgspec.convert({"messages": USER, "max_tokens": 9, **body}, MessagesRequest)
    found, _ = translated(request, None, Limits(), takes_images=takes_images)
    return found


@pytest.mark.parametrize(
    ("choice", "wanted", "parallel"),
    [
        (None, None, None),
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", None),
        (
            {"type": "tool", "name": "f", "disable_parallel_tool_use": False},
            {"type": "function", "function": {"name": "f"}},
            True,
        ),
    ],
)
def test_tools(choice: Any, wanted: Any, parallel: bool | None) -> None:
    found = chat(tools=[F], tool_choice=choice)
    assert plain(found.tools) == [F_IN_CHAT]
    assert (plain(found.tool_choice), found.parallel_tool_calls) == (wanted, parallel)


def test_options() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    found = chat(output_config={"effort": "max", "format": form}, stop_sequences=["s"], top_k=3)
    assert (found.reasoning_effort, found.stop, found.top_k) == ("xhigh", ["s"], 3)
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
    }
    assert plain(found.response_format) == wanted
    assert plain(chat(output_format=form).response_format) == wanted
    assert chat().response_format is None and chat().max_tokens == 9


@pytest.mark.parametrize(
    ("source", "url"),
    [
        ({"type": "base64", "media_type": "image/png", "data": "AA"}, "data:image/png;base64,AA"),
        ({"type": "url", "url": "https://a/b.png"}, "https://a/b.png"),
    ],
)
def test_images(source: dict[str, Any], url: str) -> None:
    image = {"type": "image", "source": source}
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [image]}
    found = chat(
        takes_images=True,
        messages=[
            {"role": "user", "content": [image]},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result, image]},
        ],
    )
    part = {"type": "image_url", "image_url": {"url": url}}
    user, _, tool, after = plain(found.messages)
    assert user["content"] == tool["content"] == after["content"] == [part]
    assert tool["role"] == "tool" and tool["tool_call_id"] == "c"


@pytest.mark.parametrize(
    ("source", "param"),
    [
        (None, "source"),
        ({"type": "file", "file_id": "f"}, "source.type"),
        ({"type": "base64", "data": "AA"}, "source.media_type"),
        ({"type": "url"}, "source.url"),
    ],
)
def test_wrong_images(source: Any, param: str) -> None:
    image = {"type": "image", "source": source}
    with pytest.raises(ApiError) as caught:
        chat(takes_images=True, messages=[{"role": "user", "content": [image]}])
    assert caught.value.param == f"messages[0].content[0].{param}"
