"""Counts the tokens of a message's reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_llm.server.regions.formats import MessageFormat
from hetero_llm.server.regions.special_tokens import SpecialTokens, Start


class ReasoningCounter:
    """Counts the tokens of reasoning by the tokens of its markers.

    Attributes:
        count: None where the markers are no tokens.
    """

    def __init__(self, message_format: MessageFormat, tokens: SpecialTokens, start: Start) -> None:
        channels, reasoning = message_format.channels, message_format.reasoning
        ids = tokens.marker_ids
        self._decode = tokens.decode
        self._regions = {} if channels is None else channels.regions
        self._header: list[int] | None = None
        self._message = None
        begins: tuple[str, ...] = ()
        opens: tuple[str, ...] = ()
        closes: tuple[str, ...] = ()
        known = False
        if channels is not None:
            begins, closes = (channels.channel,), (channels.part, *channels.ends)
            self._message = ids.get(channels.message)
            known = {channels.channel, channels.message} <= ids.keys()
        elif reasoning is not None:
            opens, closes = reasoning.opens, reasoning.closes
            known = all(one in ids for one in closes)
        if known and message_format.tools is not None and message_format.tools.in_reasoning:
            closes = (*closes, message_format.tools.opens[0])
        self._begins = frozenset(ids[one] for one in begins if one in ids)
        self._opens = frozenset(ids[one] for one in opens if one in ids)
        self._closes = frozenset(ids[one] for one in closes if one in ids)
        self._markers = self._begins | self._opens | self._closes
        self._inside = start == "reasoning"
        self.count: int | None = 0 if known else None

    def note(self, token_ids: Sequence[int]) -> None:
        """Counts new tokens."""
        if self.count is None:
            return
        if self._header is None and self._markers.isdisjoint(token_ids):
            self.count += len(token_ids) if self._inside else 0
            return
        for token in token_ids:
            if token in self._opens:
                self._inside = True
            elif token in self._begins:
                self._inside, self._header = False, []
            elif self._header is not None and token == self._message:
                name = self._decode(self._header).split(maxsplit=1)
                self._inside = bool(name) and self._regions.get(name[0]) == "reasoning"
                self._header = None
            elif token in self._closes:
                self._inside = False
            elif self._header is not None:
                self._header.append(token)
            elif self._inside:
                self.count += 1
