"""Golden transcripts of every format, whole and cut at every character and every token.

`transcripts.json` has one message a line: the names of its formats, its text, and what it says:
content, reasoning and calls, each with its arguments and whether it was closed. The markers of one
that is "spelled" are no tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero_llm.server.regions.formats import (
    HARMONY,
    REASONING_FORMATS,
    TOOL_FORMATS,
    MessageFormat,
    named_format,
)
from tests.server.regions.reading_aloud import Said, Tokens, said

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
