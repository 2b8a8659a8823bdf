"""Golden transcripts of every format, whole and cut at every character and every token; ids, bounds
and other rules that hold for all formats.

`transcripts.json` has one message a line: the names of its formats, its text, and what it says:
content, reasoning and calls, each with its arguments and whether it was closed. The markers of one
that is "spelled" are no tokens.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.core.reasoning_formats import REASONING_FORMATS
from hetero_llm.server.message_events import CallArguments, Content
from hetero_llm.server.regions.formats import HARMONY, TOOL_FORMATS, MessageFormat, named_format
from hetero_llm.server.regions.region_parser import RegionParser
from hetero_llm.server.regions.tool_grammar import written_texts
from tests.server.regions.reading_aloud import SCHEMAS, Said, Tokens, said

CASES: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("transcripts.json").read_text(encoding="utf-8")
)


def of(case: dict[str, Any]) -> MessageFormat:
    return named_format(case.get("tools"), case.get("reasoning"))


def check(found: Said, case: dict[str, Any]) -> None:
    assert found.content == case.get("content", "")
    assert found.reasoning == case.get("thoughts", "")
    assert found.calls == case.get("calls", [])


def test_every_format_has_transcripts() -> None:
    tools = {case.get("tools") for case in CASES}
    assert {*TOOL_FORMATS, HARMONY.name} <= tools
    assert REASONING_FORMATS.keys() <= {case.get("reasoning") for case in CASES}
    for name in TOOL_FORMATS:
        ways = [case for case in CASES if case.get("tools") == name]
        assert {len(case.get("calls", [])) for case in ways} >= {0, 1, 2}, name
        assert any(not closed for case in ways for _, _, closed in case.get("calls", [])), name
        assert any(call[1] == "{}" for case in ways for call in case.get("calls", [])), name


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_text(case: dict[str, Any]) -> None:
    """Markers that are plain text."""
    message_format, text, start = of(case), case["text"], case.get("start", "content")
    whole = said(message_format, [text], start=start)
    check(whole, case)
    for _, arguments, closed in whole.calls:
        if closed:
            assert isinstance(json.loads(arguments), dict)
    assert said(message_format, list(text), start=start).shown == whole.shown
    for at in range(len(text)):
        halves = said(message_format, [text[:at], text[at:]], start=start)
        assert halves.shown == whole.shown, at


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_tokens(case: dict[str, Any]) -> None:
    """Markers that are tokens; text comes with its tokens, and late."""
    message_format, start = of(case), case.get("start", "content")
    tokens = Tokens(message_format)
    ids = tokens.encode(case["text"], spelled=case.get("spelled", False))
    pieces = [(tokens.decode([one]), [one]) for one in ids]
    by_one = said(message_format, pieces, start=start, tokens=tokens.special)
    check(by_one, case)
    whole = said(message_format, [(case["text"], ids)], start=start, tokens=tokens.special)
    assert whole.shown == by_one.shown
    for at in range(len(ids)):
        first, second = ids[:at], ids[at:]
        halves = [(tokens.decode(first), first), (tokens.decode(second), second)]
        found = said(message_format, halves, start=start, tokens=tokens.special)
        assert found.shown == by_one.shown, at
    late = [("", ids[:3])] + [
        (tokens.decode([one]), ids[at + 3 : at + 4]) for at, one in enumerate(ids)
    ]
    assert said(message_format, late, start=start, tokens=tokens.special).shown == by_one.shown


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_a_message_that_is_cut_off(case: dict[str, Any]) -> None:
    """Arguments are as they came: markup that was to end them is no part of them."""
    tokens, start = Tokens(of(case)), case.get("start", "content")
    ids = tokens.encode(case["text"], spelled=case.get("spelled", False))
    pieces = [(tokens.decode([one]), [one]) for one in ids]
    for at in range(len(ids)):
        cut = said(of(case), pieces[:at], start=start, tokens=tokens.special)
        calls = case.get("calls", [])[: len(cut.calls)]
        assert [name for name, _, _ in cut.calls] == [name for name, _, _ in calls], at
        for (_, found, closed), (_, whole, ends) in zip(cut.calls, calls, strict=True):
            assert whole.startswith(found) and closed <= ends, at


# -- rules for all formats ------------------------------------------------------------------------


def test_ids() -> None:
    def ids(name: str, text: str) -> list[str]:
        return said(named_format(name, None), [text]).ids

    two = TOOL_FORMATS["hermes"].example.replace('"f"', '"now"') * 2
    found = ids("hermes", two) + ids("hermes", two)
    assert len(set(found)) == 4 and all(re.fullmatch("call_[0-9a-f]{24}", one) for one in found)
    (mistral,) = ids("mistral", "[TOOL_CALLS]now[ARGS]{}")
    assert re.fullmatch("[A-Za-z0-9]{9}", mistral)
    kimi = TOOL_FORMATS["kimi_k2"].example
    assert ids("kimi_k2", kimi) == ["functions.f:0"]
    listed = '[TOOL_CALLS] [{"id": "abc", "name": "now", "arguments": {}}]'
    assert ids("mistral", listed) == ["abc"]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_one_call(case: dict[str, Any]) -> None:
    """Further calls are left out, and nothing else."""
    start = case.get("start", "content")
    all_of = said(of(case), [case["text"]], start=start)
    first = said(of(case), list(case["text"]), start=start, only_one_call=True)
    assert first.calls == all_of.calls[:1]
    assert (first.content, first.reasoning) == (all_of.content, all_of.reasoning)


@pytest.mark.parametrize("name", [*TOOL_FORMATS, HARMONY.name])
def test_without_tools_calls_are_text(name: str) -> None:
    text = TOOL_FORMATS[name].example if name in TOOL_FORMATS else "to=functions.f {}"
    found = said(named_format(name, None), list(text), schemas=None)
    assert (found.content, found.calls) == (text, [])


def test_nothing_waits_but_a_markers_beginning() -> None:
    parser = RegionParser(named_format("hermes", "qwen3"), schemas=SCHEMAS)
    shown = "".join(
        event.text
        for piece in ("A < b", " and <too", " much <tool_", "")
        for event in parser.feed(piece, [])
        if isinstance(event, Content)
    )
    assert shown == "A < b and <too much"
    assert parser.finish() == [Content(" <tool_")]


def test_long_texts_in_small_pieces() -> None:
    """What is held back does not grow with the text: events come while it does."""
    parser = RegionParser(named_format("hermes", None), schemas=SCHEMAS)
    parser.feed('<tool_call>{"name": "now", "arguments": {"a": "', [])
    for _ in range(2000):
        assert parser.feed("abc", []) == [CallArguments(0, "abc")]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_any_text_is_read_alike_in_pieces(data: st.DataObject) -> None:
    """Markup in any order, cut anywhere, raises nothing and says the same."""
    name = data.draw(st.sampled_from([*TOOL_FORMATS, HARMONY.name]))
    message_format = named_format(name, None if name == HARMONY.name else "qwen3")
    markup = [one for one in written_texts(message_format).split("\n") if one]
    words = [*markup, "now", "get_weather", '{"name": "now"', '"arguments": {}}', "{", "}", "("]
    words += [")", '"', "\n", " ", "a", "=", "1", "[", "]", ",", ":", "\\"]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=14)))
    start = data.draw(st.sampled_from(["content", "reasoning"]))
    if name == HARMONY.name:
        start = data.draw(st.sampled_from(["content", "reasoning", "header"]))
    whole = said(message_format, [text], start=start)
    assert said(message_format, list(text), start=start).shown == whole.shown
    cut = data.draw(st.integers(0, len(text)))
    assert said(message_format, [text[:cut], text[cut:]], start=start).shown == whole.shown
    for _, arguments, closed in whole.calls:
        if closed:
            json.loads(arguments)
