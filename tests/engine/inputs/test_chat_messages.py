"""Contents of a conversation in the form that a template sees; what models do with them is tested
in tests/scenarios/test_families.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hetero_llm.core.errors import RequestError
from hetero_llm.engine.inputs.chat_messages import check_place_for_tools, for_template
from hetero_llm.engine.inputs.image_uri import Fetch
from hetero_llm.engine.inputs.media_fetch import NoFetcher

PICTURE = np.zeros((4, 4, 3), np.uint8)

FETCH = NoFetcher().fetch


def of(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, "name": "me"}]


def texts(*words: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": word} for word in words]


@pytest.mark.parametrize(
    ("content", "content_format", "expected"),
    [
        ("a", "auto", "a"),
        (texts("a", "b"), "auto", "a\nb"),
        (["a", {"text": "b"}], "string", "a\nb"),
        ([], "auto", ""),
        (None, "auto", None),
        ("a", "openai", texts("a")),
        (("a", "b"), "openai", texts("a", "b")),
    ],
)
def test_contents_of_a_model_of_texts(content: Any, content_format: str, expected: Any) -> None:
    given = of(content)
    messages, images = for_template(given, content_format, None, template="")
    assert (messages, images) == (of(expected), ())
    assert given == of(content)  # the user's own messages stay


def test_contents_of_a_model_that_takes_images() -> None:
    content = ["see", {"type": "image", "image": PICTURE}, *texts("it")]
    messages, images = for_template(of(content), "auto", FETCH, template="")
    assert messages == of([*texts("see"), {"type": "image"}, *texts("it")])
    assert len(images) == 1 and images[0] is PICTURE
    assert for_template(of("a"), "auto", FETCH, template="") == (of(texts("a")), ())
    assert for_template(of("a"), "string", FETCH, template="") == (of("a"), ())
    with pytest.raises(RequestError, match=r"content\[1\]=(?s:.*)must be a text"):
        for_template(of(content), "string", FETCH, template="")


@pytest.mark.parametrize("fetch", [None, FETCH])
@pytest.mark.parametrize("messages", [["a"], of(5), of([5])])
def test_what_is_no_message(messages: Any, fetch: Fetch | None) -> None:
    with pytest.raises(RequestError, match=r"^messages\[0\]"):
        for_template(messages, "auto", fetch, template="")
    with pytest.raises(RequestError, match="^chat_template_content_format='html'"):
        for_template(messages, "html", fetch, template="")


TOOLS = "{{ tools }}{{ message.tool_calls }}"


def calls(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function}
    return [{"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": [1]}', {"a": [1]}), ({"a": 1}, {"a": 1}), ("", {}), (" ", {}), (None, {})],
)
def test_arguments_of_calls_are_objects(arguments: Any, expected: dict[str, Any]) -> None:
    given = calls(arguments)
    assert for_template(given, "auto", None, template=TOOLS) == (calls(expected), ())
    assert given == calls(arguments)
    (message,), _ = for_template(given, "auto", FETCH, template=TOOLS)
    assert message == {**calls(expected)[0], "content": texts("")}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        *((calls(wrong)[0], r"tool_calls\[0\].function.arguments")
          for wrong in ("{", "[]", "1", 5, "[" * 100_000)),
        ({"role": "assistant", "tool_calls": 5}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [5]}, r"tool_calls\[0\]"),
        ({"role": "assistant", "tool_calls": [{"function": "f"}]}, r"tool_calls\[0\]"),
        ({"content": "a"}, "role"),
        ({"role": 5, "content": "a"}, "role"),
    ],
)  # fmt: skip
def test_malformed_messages(message: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError, match=rf"^messages\[0\]\.{field}="):
        for_template([message], "auto", None, template=TOOLS)


def test_what_the_template_would_leave_out() -> None:
    plain = "{{ message.content }}"
    with pytest.raises(RequestError, match=r"^messages\[0\].tool_calls=.*no place"):
        for_template(calls("{}"), "auto", None, template=plain)
    with pytest.raises(RequestError, match=r"^tools=.*no place"):
        check_place_for_tools([{"type": "function"}], plain)
    check_place_for_tools([{"type": "function"}], TOOLS)
    check_place_for_tools([], plain)


def test_roles_and_texts_are_those_of_the_server() -> None:
    told = [{"role": "developer", "content": "a"}]
    assert for_template(told, "auto", None, template="")[0][0]["role"] == "system"
    assert for_template(told, "auto", None, template="developer")[0] == told
    refused = [{"role": "assistant", "content": None, "refusal": "no"}]
    assert for_template(refused, "auto", None, template="")[0][0]["content"] == "no"
    parts = [{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    assert for_template(of(parts), "auto", None, template="") == (of("a\nb"), ())
