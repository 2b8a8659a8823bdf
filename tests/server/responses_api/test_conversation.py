"""Tools, formats and options of /v1/responses in the words of a chat request."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hetero_llm.server.errors import ApiError
from hetero_llm.server.protocol import ChatRequest
from hetero_llm.server.responses_api.conversation import new_items, translated
from hetero_llm.server.responses_api.protocol import ResponsesRequest

PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
F = {"type": "function", "name": "f", "description": "d", "parameters": PARAMETERS, "strict": True}
G = {"type": "function", "name": "g", "parameters": None, "strict": None}
F_IN_CHAT = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": PARAMETERS, "strict": True},
}
G_IN_CHAT = {"type": "function", "function": {"name": "g"}}


def chat(*, takes_images: bool = False, **body: Any) -> ChatRequest:
    request = msgspec.convert({"input": "a", **body}, ResponsesRequest)
    found, _ = translated(request, new_items(request), (), takes_images=takes_images)
    return found


def plain(value: Any) -> Any:
    """JSON data without what is null."""
    value = msgspec.to_builtins(value)
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items() if one is not None}
    return [plain(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("choice", "tools", "wanted"),
    [
        (None, [F_IN_CHAT, G_IN_CHAT], None),
        ("auto", [F_IN_CHAT, G_IN_CHAT], "auto"),
        ("required", [F_IN_CHAT, G_IN_CHAT], "required"),
        ("none", [F_IN_CHAT, G_IN_CHAT], "none"),
        (
            {"type": "function", "name": "g"},
            [F_IN_CHAT, G_IN_CHAT],
            {"type": "function", "function": {"name": "g"}},
        ),
        (
            {"type": "allowed_tools", "mode": "required",
             "tools": [{"type": "function", "name": "g"}]},
            [G_IN_CHAT],
            "required",
        ),
    ],
)  # fmt: skip
def test_tools(choice: Any, tools: list[Any], wanted: Any) -> None:
    found = chat(tools=[F, G], tool_choice=choice, parallel_tool_calls=False)
    assert (plain(found.tools), plain(found.tool_choice)) == (tools, wanted)
    assert found.parallel_tool_calls is False


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "allowed_tools", "mode": "some", "tools": [G]}, "tool_choice.mode"),
        ({"type": "allowed_tools", "mode": "auto"}, "tool_choice.tools"),
        ({"type": "allowed_tools", "mode": "auto", "tools": ["g"]}, "tool_choice.tools[0]"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]},
         "tool_choice.tools[0].type"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "h"}]},
         "tool_choice.tools[0].name"),
        ({"type": "function"}, "tool_choice.name"),
        (3, "tool_choice"),
    ],
)  # fmt: skip
def test_wrong_choices(choice: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(tools=[F, G], tool_choice=choice)
    assert caught.value.param == param and caught.value.message.startswith(param)


def test_formats_and_options() -> None:
    schema = {"type": "object"}
    found = chat(
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        reasoning={"effort": "low"}, max_output_tokens=7, top_logprobs=2, user="me",
        metadata={"a": "b"}, seed=1, chat_template_kwargs={"thinking": True},
    )  # fmt: skip
    assert plain(found.response_format) == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": schema, "strict": True},
    }
    assert (found.reasoning_effort, found.max_completion_tokens, found.seed) == ("low", 7, 1)
    assert (found.logprobs, found.top_logprobs, found.user) == (True, 2, "me")
    assert found.chat_template_kwargs == {"thinking": True}
    assert plain(chat(text={"format": {"type": "json_object"}}).response_format) == {
        "type": "json_object"
    }
    assert chat().tools is None and chat(tools=[], tool_choice="auto").tool_choice is None


def test_images() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "auto"}
    text = {"type": "input_text", "text": "what?"}
    found = chat(takes_images=True, input=[{"role": "user", "content": [image, text]}])
    assert plain(found.messages) == [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
                {"type": "text", "text": "what?"},
            ],
        }
    ]
    for wrong, param in (({"file_id": "f"}, "file_id"), ({}, "image_url")):
        with pytest.raises(ApiError) as caught:
            parts = [{"type": "input_image", **wrong}]
            chat(takes_images=True, input=[{"role": "user", "content": parts}])
        assert caught.value.param == f"input[0].content[0].{param}"
