"""The messages that the bench reads hold what it says, and its rows have a time each."""

from __future__ import annotations

import json

import pytest

from bench.server.message_parsing import Message, measure
from hetero_llm.server.endpoints.chat import MessageWords
from hetero_llm.server.regions.formats import TOOL_PARSER_NAMES


@pytest.mark.parametrize("name", TOOL_PARSER_NAMES)
def test_a_message_has_reasoning_and_a_call(name: str) -> None:
    message = Message(name, 100, marked=True)
    words = MessageWords(message.parser())
    for text, token_ids in message.pieces:
        words.add(text, token_ids, last=False)
    words.add("", [], last=True)
    whole = words.whole("assistant")
    assert whole.reasoning and whole.tool_calls
    assert len(json.dumps(json.loads(whole.tool_calls[0].function.arguments))) > 100


def test_rows() -> None:
    rows = measure(["hermes"], [60, 120], 1)
    assert [(row["format"], row["markers"]) for row in rows] == [
        ("plain", "-"),
        ("hermes", "tokens"),
        ("hermes", "text"),
    ]
    assert all(row["us at 60"] > 0 and row["us at 120"] > 0 for row in rows)
