"""Feeds texts to region parsers in pieces, and joins what they say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetero_llm.server.message_events import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    MessageEvent,
    Reasoning,
)
from hetero_llm.server.message_parsers import markers_of
from hetero_llm.server.regions.formats import MessageFormat
from hetero_llm.server.regions.region_parser import RegionParser
from hetero_llm.server.regions.special_tokens import NO_TOKENS, SpecialTokens, Start

SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "options": {"type": "object"},
            "tags": {"type": "array"},
            "exact": {"type": "boolean"},
            "note": {"type": ["string", "null"]},
            "unit": {"$ref": "#/$defs/Unit"},
            "step": {"anyOf": [{"$ref": "#/$defs/Step"}, {"type": "null"}]},
            "rank": {"const": 1},
        },
        "$defs": {"Unit": {"enum": ["1", "2"]}, "Step": {"$ref": "#/$defs/Unit"}},
    },
    "now": {},
}


@dataclass
class Said:
    """A message: its texts, and its calls as [name, arguments, whether they were closed]."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[Any]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def note(self, event: MessageEvent) -> None:
        if isinstance(event, Content):
            self.content += event.text
        elif isinstance(event, Reasoning):
            self.reasoning += event.text
        elif isinstance(event, CallStart):
            assert event.index == len(self.calls)
            self.calls.append([event.name, "", False])
            self.ids.append(event.id)
        elif isinstance(event, CallArguments):
            call = self.calls[event.index]
            assert event.text and not call[2]
            call[1] += event.text
        else:
            assert isinstance(event, CallEnd)
            self.calls[event.index][2] = True

    @property
    def shown(self) -> tuple[str, str, list[list[Any]]]:
        """All but the ids, which are random."""
        return self.content, self.reasoning, self.calls


class Tokens:
    """A tokenizer of one token for each marker and each other character."""

    def __init__(self, message_format: MessageFormat, others: Sequence[str] = ()) -> None:
        self._markers = [*dict.fromkeys(markers_of(message_format)), *others]
        found = sorted(self._markers, key=len, reverse=True)
        self._pattern = re.compile("|".join([*map(re.escape, found), "."]), re.DOTALL)
        self._ids = {marker: 0x110000 + n for n, marker in enumerate(self._markers)}
        self._texts = {token: text for text, token in self._ids.items()}
        self.special = SpecialTokens(
            {one: self._ids[one] for one in self._markers if one not in others},
            {self._ids[one]: one for one in others},
            self.decode,
        )

    def encode(self, text: str, *, spelled: bool = False) -> list[int]:
        """`spelled`: markers, too, have one token a character."""
        pieces = self._pattern.findall(text)
        return [
            token
            for piece in pieces
            for token in (
                [self._ids[piece]]
                if piece in self._ids and not spelled
                else [ord(char) for char in piece]
            )
        ]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self._texts.get(token) or chr(token) for token in token_ids)


def said(
    message_format: MessageFormat,
    pieces: Iterable[str | tuple[str, Sequence[int]]],
    *,
    start: Start = "content",
    schemas: Any = SCHEMAS,
    tokens: SpecialTokens = NO_TOKENS,
    only_one_call: bool = False,
) -> Said:
    """What a message says; a piece is text, or text with its tokens."""
    parser = RegionParser(
        message_format, start, schemas=schemas, tokens=tokens, only_one_call=only_one_call
    )
    found = Said()
    for piece in pieces:
        text, token_ids = (piece, []) if isinstance(piece, str) else piece
        for event in parser.feed(text, token_ids):
            found.note(event)
    for event in parser.finish():
        found.note(event)
    return found
