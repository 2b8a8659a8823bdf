"""What an assistant's message consists of while it is generated: reasoning, content, tool calls.

A message parser reads one sequence's text and yields these events; the endpoints of all three APIs
(chat completions, responses, messages) write them in their own words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hetero_llm.core.outputs import CompletionOutput, TokenLogprobs


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

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the reasoning so far; None where the parser cannot count them, then always."""
        ...

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

    reasoning_tokens: int | None = None

    def feed(self, text: str, token_ids: Sequence[int]) -> list[MessageEvent]:
        return [Content(text)] if text else []

    def finish(self) -> list[MessageEvent]:
        return []


@dataclass(slots=True)
class Piece:
    """An event; of a content also the tokens and their log-probabilities, if asked for."""

    event: MessageEvent
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class MessageReader:
    """Passes the deltas of one sequence through its parser.

    Attributes:
        num_tokens: read so far.
        reasoning_tokens: those of them that are reasoning, as the parser counts them. Of one that
            does not, each delta's tokens are divided by the lengths of the texts.
        has_calls: the message calls a tool.
    """

    def __init__(self, parser: MessageParser) -> None:
        self._parser = parser
        self._counts = parser.reasoning_tokens is not None
        self._is_plain = isinstance(parser, PlainParser)
        self._is_open = False
        self._held_ids: list[int] = []
        self._held_logprobs: list[TokenLogprobs] = []
        self.num_tokens = self.reasoning_tokens = 0
        self.has_calls = False

    def text_of(self, delta: CompletionOutput) -> str | None:
        """The text of a delta that is more text of the content which `read` has begun, and nothing
        else; None: call `read`."""
        more = delta.text and delta.finish_reason is None and delta.logprobs is None
        if not (self._is_open and more):
            return None
        self.num_tokens += len(delta.token_ids)
        return delta.text

    def read(self, delta: CompletionOutput) -> list[Piece]:
        """The events of a delta; after the sequence's last one also what was held back."""
        self._held_ids += delta.token_ids
        self._held_logprobs += delta.logprobs or ()
        self.num_tokens += len(delta.token_ids)
        events = self._parser.feed(delta.text, delta.token_ids)
        if delta.finish_reason is not None:
            events = [*events, *self._parser.finish()]
        if self._counts:
            self.reasoning_tokens = self._parser.reasoning_tokens or 0
        return self._pieces(events)

    def _pieces(self, events: Sequence[MessageEvent]) -> list[Piece]:
        """Tokens without events wait for the next event: their text lags behind."""
        if len(events) == 1 and type(events[0]) is Content:  # most deltas
            self._is_open = self._is_plain
            piece = Piece(events[0], self._held_ids, self._held_logprobs)
            self._held_ids, self._held_logprobs = [], []
            return [piece]
        pieces = [Piece(event) for event in events]
        if not pieces:
            return pieces
        self.has_calls = self.has_calls or any(isinstance(event, CallStart) for event in events)
        if not self._counts:
            self.reasoning_tokens += _share_of_reasoning(events, len(self._held_ids))
        for piece in pieces:
            if isinstance(piece.event, Content):
                piece.token_ids, piece.logprobs = self._held_ids, self._held_logprobs
                break
        self._held_ids, self._held_logprobs = [], []
        return pieces


def _share_of_reasoning(events: Sequence[MessageEvent], num_tokens: int) -> int:
    thoughts = sum(len(event.text) for event in events if isinstance(event, Reasoning))
    if not thoughts:
        return 0
    every = sum(len(getattr(event, "text", "")) for event in events)
    return round(num_tokens * thoughts / every)
