"""Errors of a chat request in the words of the API that was called."""

from __future__ import annotations

import pytest

from hetero_llm.server.errors import ApiError, FieldNames
from hetero_llm.server.responses_api.protocol import InputPart
from hetero_llm.server.translation import Conversation, chat_request, part_of


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
        chat_request({"seed": "much", "n": None}, {"seed": "random_seed"})
    assert caught.value.message.startswith("random_seed: must be an integer")
    with pytest.raises(ApiError) as caught:
        part_of({"text": 3}, InputPart, "input[1].content[0]")
    assert caught.value.param == "input[1].content[0].text"
    assert caught.value.message == "input[1].content[0].text: must be a string, not an integer"
    with pytest.raises(ApiError) as caught:
        part_of("a", InputPart, "input[1]")
    assert caught.value.message == "input[1]: must be an object"
