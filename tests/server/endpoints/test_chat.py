"""A message in the words of chat completions."""

from __future__ import annotations

import msgspec

from hetero_llm.server.endpoints.chat import MessageWords
from hetero_llm.server.message_events import PlainParser
from hetero_llm.server.regions.formats import named_format
from hetero_llm.server.regions.region_parser import RegionParser

CALL = '<tool_call>{"name": "%s", "arguments": {"a": 1}}</tool_call>'
TWO = CALL % "f" + CALL % "g"


def words(*, with_reasoning: bool = True) -> MessageWords:
    parser = RegionParser(named_format("hermes", "qwen3"), schemas={})
    return MessageWords(parser, with_reasoning=with_reasoning)


def test_one_entry_for_each_call_of_a_delta() -> None:
    """Clients join entries of one index over deltas, not all of them within one."""
    message = words()
    message.add(f"<think>Hm.</think>So: {TWO}", [], last=True)
    delta = msgspec.to_builtins(message.delta())
    assert (delta["content"], delta["reasoning"], delta["reasoning_content"]) == (
        "So:",
        "Hm.",
        "Hm.",
    )
    assert [(call["index"], call["type"], call["function"]) for call in delta["tool_calls"]] == [
        (0, "function", {"name": "f", "arguments": '{"a": 1}'}),
        (1, "function", {"name": "g", "arguments": '{"a": 1}'}),
    ]
    assert message.has_calls and message.delta() is None


def test_deltas_hold_what_is_new() -> None:
    message = words()
    message.add('<tool_call>{"name": "f", "arguments": {"a"', [], last=False)
    first = msgspec.to_builtins(message.delta())["tool_calls"][0]
    message.add(": 1}}", [], last=False)
    second = msgspec.to_builtins(message.delta())["tool_calls"][0]
    assert first["function"] == {"name": "f", "arguments": '{"a"'}
    assert second == {"index": 0, "function": {"arguments": ": 1}"}}
    message.add("</tool_call>", [], last=True)
    assert message.delta() is None


def test_contents_of_whole_messages() -> None:
    for text, content in (("", ""), ("Yes", "Yes"), (TWO, None), ("<think>Hm", None)):
        message = words()
        message.add(text, [], last=True)
        assert message.whole("assistant").content == content
    plain = MessageWords(PlainParser())
    plain.add("", [], last=True)
    assert plain.whole("assistant").content == ""
    assert plain.reasoning_tokens is None


def test_hidden_reasoning() -> None:
    message = words(with_reasoning=False)
    message.add("<think>Hm.", [], last=False)
    assert message.delta() is None
    message.add("</think>Yes", [], last=True)
    assert msgspec.to_builtins(message.delta()) == {"content": "Yes"}
