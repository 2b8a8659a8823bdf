"""Errors of a chat request in the words of the API that was called."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest

from hetero_llm.server.errors import ApiError, FieldNames
from hetero_llm.server.messages_api import protocol as messages_api
from hetero_llm.server.protocol import ChatRequest, Message
from hetero_llm.server.responses_api import protocol as responses_api
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


@pytest.mark.parametrize("api", [responses_api, messages_api])
def test_fields_are_passed_on_with_the_type_that_they_were_checked_to_have(api: Any) -> None:
    (client,) = {
        one
        for one in vars(api).values()
        if isinstance(one, type) and one.__name__ in ("ResponsesRequest", "MessagesRequest")
    }
    theirs, ours = get_type_hints(client), get_type_hints(ChatRequest)
    for name in api.PASSED_ON:
        assert ours[name] in (Any, theirs[name]), name


def test_types_are_checked_and_named() -> None:
    with pytest.raises(ApiError) as caught:
        chat_request({"messages": [{"content": 3}], "n": None}, {"messages[0]": "input[1]"})
    assert caught.value.message.startswith("input[1].content: must be")
    made, _ = chat_request({"messages": [{"role": "user"}], "seed": 3, "stop": None}, {})
    assert made == ChatRequest(messages=[Message(role="user")], seed=3)
    with pytest.raises(ApiError) as caught:
        part_of({"text": 3}, InputPart, "input[1].content[0]")
    assert caught.value.param == "input[1].content[0].text"
    assert caught.value.message == "input[1].content[0].text: must be a string, not an integer"
    with pytest.raises(ApiError) as caught:
        part_of("a", InputPart, "input[1]")
    assert caught.value.message == "input[1]: must be an object"
