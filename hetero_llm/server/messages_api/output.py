"""From the events of a message to content blocks and the events of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hetero_llm.server.message_events import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    MessageEvent,
    Reasoning,
)
from hetero_llm.server.messages_api import protocol as wire


@dataclass(slots=True)
class _OpenBlock:
    """A block that is being written: the block without its text, and the text so far."""

    block: wire.Block
    pieces: list[str] = field(default_factory=list)


class BlockWriter:
    """Writes the blocks of one message, one after the other.

    Args:
        shows_thinking: False leaves the blocks of thinking empty.

    Attributes:
        blocks: those that are complete. A call whose arguments were cut off is not among them.
    """

    def __init__(self, *, shows_thinking: bool = True) -> None:
        self._shows_thinking = shows_thinking
        self._open: _OpenBlock | None = None
        self._index = 0
        self.blocks: list[wire.Block] = []

    def write(self, event: MessageEvent) -> Sequence[wire.Event]:
        """Takes in an event of the message."""
        block = None if self._open is None else self._open.block
        if type(event) is Content and type(block) is wire.TextBlock:  # most events
            return self._delta(event.text, wire.TextDelta(event.text))
        match event:
            case Content(text):
                return [*self._open_as(wire.TextBlock), *self._delta(text, wire.TextDelta(text))]
            case Reasoning(text):
                opened = self._open_as(wire.ThinkingBlock)
                if not self._shows_thinking:
                    return opened
                return [*opened, *self._delta(text, wire.ThinkingDelta(text))]
            case CallStart(_, call_id, name):
                return [*self.close(), self._start(wire.ToolUseBlock(call_id, name, {}))]
            case CallArguments(_, text):
                return self._delta(text, wire.InputDelta(text))
            case CallEnd():
                return self.close()

    def more_text(self, text: str) -> int:
        """Appends to the text that is open; returns the index of its block."""
        assert self._open is not None
        self._open.pieces.append(text)
        return self._index

    @property
    def has_calls(self) -> bool:
        """Whether a call is complete."""
        return any(type(block) is wire.ToolUseBlock for block in self.blocks)

    def close(self) -> list[wire.Event]:
        """Ends the open block, if there is one."""
        if self._open is None:
            return []
        block, text = self._open.block, "".join(self._open.pieces)
        self._open = None
        match block:
            case wire.TextBlock():
                self.blocks.append(wire.TextBlock(text))
            case wire.ThinkingBlock():
                self.blocks.append(wire.ThinkingBlock(text))
            case wire.ToolUseBlock(call_id, name):
                arguments = _as_object(text)
                if arguments is not None:
                    self.blocks.append(wire.ToolUseBlock(call_id, name, arguments))
        self._index += 1
        return [wire.BlockStop(self._index - 1)]

    def _open_as(self, kind: type[wire.TextBlock] | type[wire.ThinkingBlock]) -> list[wire.Event]:
        if self._open is not None and isinstance(self._open.block, kind):
            return []
        return [*self.close(), self._start(kind(""))]

    def _start(self, block: wire.Block) -> wire.Event:
        self._open = _OpenBlock(block)
        return wire.BlockStart(self._index, block)

    def _delta(
        self, text: str, delta: wire.TextDelta | wire.ThinkingDelta | wire.InputDelta
    ) -> list[wire.Event]:
        assert self._open is not None
        self._open.pieces.append(text)
        return [wire.BlockDelta(self._index, delta)]


def _as_object(text: str) -> dict[str, Any] | None:
    """The arguments of a call; None if they are no JSON object, because they were cut off."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return None
