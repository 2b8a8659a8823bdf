"""Writes the events of one message: joins texts, strips them where regions meet, numbers calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from uuid import uuid4

from hetero_llm.server.message_events import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    MessageEvent,
    Reasoning,
)

_ALPHANUMERIC = string.ascii_letters + string.digits


def new_call_id() -> str:
    return f"call_{uuid4().hex[:24]}"


def new_mistral_id() -> str:
    """Mistral's templates refuse ids of any other form."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


class MessageWriter:
    """Collects events until `take`.

    White space between two regions belongs to the markup, so texts lose it there; at the ends of a
    message that does not reason it stays.

    Args:
        new_id: makes ids of calls.
        only_one_call: further calls are left out.

    Attributes:
        num_calls: that have begun, those left out included.
        is_empty: there was nothing but white space up to now.
    """

    def __init__(self, new_id: Callable[[], str], *, only_one_call: bool) -> None:
        self._new_id = new_id
        self._most_calls = 1 if only_one_call else None
        self._events: list[MessageEvent] = []
        self._kind: type[Content] | type[Reasoning] = Content
        self._at_border = False
        self._space = ""
        self._had_arguments = False
        self.num_calls = 0
        self.is_empty = True

    def take(self) -> list[MessageEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def border(self) -> None:
        """A region ends and another one begins."""
        self._space = ""
        self._at_border = True

    def text(self, kind: type[Content] | type[Reasoning], text: str, *, may_end: bool) -> None:
        """More text of the region; `may_end`: a border may follow, so white space waits."""
        if self._at_border:
            text = text.lstrip()
            if not text:
                return
            self._at_border = False
        bare = text.rstrip() if may_end else text
        self._kind = kind
        if bare:
            self.is_empty = False
            self._add_text(kind, self._space + bare)
            self._space = text[len(bare) :]
        else:
            self._space += text

    def end(self) -> None:
        """The message ends."""
        if self._space:
            self._add_text(self._kind, self._space)
            self._space = ""

    def _add_text(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        last = self._events[-1] if self._events else None
        if type(last) is kind:
            text = last.text + text
            self._events.pop()
        self._events.append(kind(text))

    # -- calls --------------------------------------------------------------------------------

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        self.border()
        self.is_empty = False
        self.num_calls += 1
        self._had_arguments = False
        if self._is_wanted():
            self._events.append(CallStart(self.num_calls - 1, call_id or self._new_id(), name))

    def arguments(self, text: str) -> None:
        if not text:
            return
        self._had_arguments = True
        if not self._is_wanted():
            return
        last = self._events[-1] if self._events else None
        if type(last) is CallArguments:
            text = last.text + text
            self._events.pop()
        self._events.append(CallArguments(self.num_calls - 1, text))

    def end_call(self) -> None:
        if not self._had_arguments:
            self.arguments("{}")
        if self._is_wanted():
            self._events.append(CallEnd(self.num_calls - 1))

    def _is_wanted(self) -> bool:
        return self._most_calls is None or self.num_calls <= self._most_calls
