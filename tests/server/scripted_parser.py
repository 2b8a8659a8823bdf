"""A message parser that yields events by a script, whatever the text is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hetero_llm.server import chat_requests
from hetero_llm.server.message_events import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    MessageEvent,
    Reasoning,
)

Script = Sequence[Sequence[MessageEvent]]

AGENT: Script = (
    [Reasoning("I ")],
    [Reasoning("look.")],
    [],
    [Content("Two ")],
    [Content("calls"), CallStart(0, "call_a", "weather")],
    [CallArguments(0, '{"city": ')],
    [CallArguments(0, '"Ulm"}'), CallEnd(0)],
    [CallStart(1, "call_b", "time"), CallEnd(1)],
)
"""Reasoning of two tokens, a content of two, a token without text, and two calls."""
CUT: Script = ([Content("a")], [CallStart(0, "call_c", "f")], [CallArguments(0, '{"x": [1,')])
"""A message that ends inside the arguments of a call."""
LEFT_OPEN: Script = (
    [CallStart(0, "call_d", "f"), CallArguments(0, "{x")],
    [Content("So.")],
    [CallStart(1, "call_e", "f")],
    [CallStart(2, "call_f", "f"), CallEnd(2)],
)
"""Calls that the model does not end, and what follows them."""


class ScriptedParser:
    """Yields the lists of a script, one for each feed; at the end nothing is held back."""

    reasoning_tokens: int | None = None

    def __init__(self, script: Script) -> None:
        self._script = iter(script)

    def feed(self, text: str, token_ids: Sequence[int]) -> list[MessageEvent]:
        return list(next(self._script, ()))

    def finish(self) -> list[MessageEvent]:
        return []


def use_script(monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    """Makes the messages of all conversations be read by the script."""
    monkeypatch.setattr(chat_requests, "message_parser", lambda *_: ScriptedParser(script))
