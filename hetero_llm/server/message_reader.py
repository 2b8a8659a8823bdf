"""Reading one generated message: its events, with the tokens and log-probabilities of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from hetero_llm.core.outputs import CompletionOutput, TokenLogprobs
from hetero_llm.server.message_events import (
    CallStart,
    Content,
    MessageEvent,
    MessageParser,
    Reasoning,
)


@runtime_checkable
class CountsReasoning(Protocol):
    """A parser that knows how many tokens of what it was fed are reasoning."""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning so far."""
        ...


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
        # Once: asking a protocol's isinstance takes longer than all else that is done for a token.
        self._counter = parser if isinstance(parser, CountsReasoning) else None
        self._held_ids: list[int] = []
        self._held_logprobs: list[TokenLogprobs] = []
        self.num_tokens = self.reasoning_tokens = 0
        self.has_calls = False

    def read(self, delta: CompletionOutput) -> list[Piece]:
        """The events of a delta; after the sequence's last one also what was held back."""
        self._held_ids += delta.token_ids
        self._held_logprobs += delta.logprobs or ()
        self.num_tokens += len(delta.token_ids)
        events = self._parser.feed(delta.text, delta.token_ids)
        if delta.finish_reason is not None:
            events = [*events, *self._parser.finish()]
        if self._counter is not None:
            self.reasoning_tokens = self._counter.reasoning_tokens
        return self._pieces(events)

    def _pieces(self, events: Sequence[MessageEvent]) -> list[Piece]:
        """Tokens without events wait for the next event: their text lags behind."""
        if len(events) == 1 and type(events[0]) is Content:  # most deltas
            piece = Piece(events[0], self._held_ids, self._held_logprobs)
            self._held_ids, self._held_logprobs = [], []
            return [piece]
        pieces = [Piece(event) for event in events]
        if not pieces:
            return pieces
        self.has_calls = self.has_calls or any(isinstance(event, CallStart) for event in events)
        if self._counter is None:
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
