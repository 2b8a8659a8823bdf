"""What an assistant's message consists of while it is generated: reasoning, content, tool calls.

A message parser reads one sequence's text and yields these events; the endpoints of all three APIs
(chat completions, responses, messages) write them in their own words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More text of the reasoning before or between answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call whose function's name is known.

    Attributes:
        index: of the call within the message, from 0.
        id: of the call, unique among all responses of the server.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More text of the arguments of call `index`: joined they are one JSON object, unless the
    message was cut off."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """Call `index` is complete: its arguments were closed."""

    index: int


MessageEvent = Content | Reasoning | CallStart | CallArguments | CallEnd


class MessageParser(Protocol):
    """Parses the text of one sequence as it comes."""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[MessageEvent]:
        """Takes in more text.

        Args:
            text: new text, special tokens included if the parser asked for them.
            token_ids: the new tokens. Text may lag behind tokens, never the other way round.
        """
        ...

    def finish(self) -> list[MessageEvent]:
        """Yields what was held back. Call it once, at the end of the sequence."""
        ...


class PlainParser:
    """The parser of a request without tools and of a model without reasoning: all is content."""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[MessageEvent]:
        return [Content(text)] if text else []

    def finish(self) -> list[MessageEvent]:
        return []
