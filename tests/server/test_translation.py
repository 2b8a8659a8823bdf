"""Errors of a chat request in the words of the API that was called."""

from __future__ import annotations

import pytest

from hetero_llm.core.errors import SamplingError
from hetero_llm.server.errors import ApiError, invalid
from hetero_llm.server.responses_api.protocol import InputPart
from hetero_llm.server.translation import Conversation, FieldNames, chat_request, part_of

NAMES = FieldNames(
    {
        "messages": "input",
        "messages[0]": "instructions",
        "messages[2]": "input[4]",
        "messages[2].content": "input[4].output",
        "stop": "stop_sequences",
    }
)


@pytest.mark.parametrize(
    ("chat", "client"),
    [
        ("messages[0]", "instructions"),
        ("messages[2].role", "input[4].role"),
        ("messages[2].content[1].text is required", "input[4].output[1].text is required"),
        ("messages[7].role", "input[7].role"),
        ("messages: 9, at most 8", "input: 9, at most 8"),
        ("stop='': must be", "stop_sequences='': must be"),
        ("stopped=1", "stopped=1"),
        ("this model's maximum", "this model's maximum"),
        ("", ""),
    ],
)
def test_names(chat: str, client: str) -> None:
    assert NAMES.of(chat) == client


def test_errors_are_renamed_and_keep_the_rest() -> None:
    with pytest.raises(ApiError) as caught, NAMES.in_errors():
        raise invalid("messages[0].content", "messages[0].content is required", "missing")
    error = caught.value
    assert (error.status, error.code) == (400, "missing")
    assert (error.param, error.message) == (
        "instructions.content",
        "instructions.content is required",
    )
    with pytest.raises(ApiError) as caught, NAMES.in_errors():
        raise SamplingError("stop", "", "must be non-empty strings")
    assert caught.value.message == "stop_sequences='': must be non-empty strings"


def test_calls_are_named_by_their_items() -> None:
    conversation = Conversation()
    conversation.add({"role": "assistant", "content": None}, "input[1]")
    conversation.call({"id": "a"}, "input[1]")
    conversation.call({"id": "b"}, "input[2]")
    names = FieldNames(conversation.names)
    assert conversation.messages[0]["tool_calls"] == [{"id": "a"}, {"id": "b"}]
    assert names.of("messages[0].tool_calls[1].function.arguments") == "input[2].arguments"
    assert names.of("messages[0].tool_calls") == "input[1]"


def test_types_are_checked_and_named() -> None:
    with pytest.raises(ApiError) as caught:
        chat_request({"seed": "much", "n": None})
    assert caught.value.message.startswith("seed: must be an integer")
    with pytest.raises(ApiError) as caught:
        part_of({"text": 3}, InputPart, "input[1].content[0]")
    assert caught.value.param == "input[1].content[0].text"
    assert caught.value.message == "input[1].content[0].text: must be a string, not an integer"
    with pytest.raises(ApiError) as caught:
        part_of("a", InputPart, "input[1]")
    assert caught.value.message == "input[1]: must be an object"
