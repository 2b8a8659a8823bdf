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
from hetero_llm.server.messages_api.protocol import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Event,
    InputDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)


@dataclass(slots=True)
class _OpenBlock:
    """A block that is being written: the block without its text, and the text so far."""

    block: Block
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
        self.blocks: list[Block] = []

    def write(self, event: MessageEvent) -> Sequence[Event]:
        """Takes in an event of the message."""
        block = None if self._open is None else self._open.block
        if type(event) is Content and type(block) is TextBlock:  # most events
            return self._delta(event.text, TextDelta(event.text))
        match event:
            case Content(text):
                return [*self._open_as(TextBlock), *self._delta(text, TextDelta(text))]
            case Reasoning(text):
                opened = self._open_as(ThinkingBlock)
                if not self._shows_thinking:
                    return opened
                return [*opened, *self._delta(text, ThinkingDelta(text))]
            case CallStart(_, call_id, name):
                return [*self.close(), self._start(ToolUseBlock(call_id, name, {}))]
            case CallArguments(_, text):
                return self._delta(text, InputDelta(text))
            case CallEnd():
                return self.close()

    def close(self) -> list[Event]:
        """Ends the open block, if there is one."""
        if self._open is None:
            return []
        block, text = self._open.block, "".join(self._open.pieces)
        self._open = None
        match block:
            case TextBlock():
                self.blocks.append(TextBlock(text))
            case ThinkingBlock():
                self.blocks.append(ThinkingBlock(text))
            case ToolUseBlock(call_id, name):
                arguments = _as_object(text)
                if arguments is not None:
                    self.blocks.append(ToolUseBlock(call_id, name, arguments))
        self._index += 1
        return [BlockStop(self._index - 1)]

    def _open_as(self, kind: type[TextBlock] | type[ThinkingBlock]) -> list[Event]:
        if self._open is not None and isinstance(self._open.block, kind):
            return []
        return [*self.close(), self._start(kind(""))]

    def _start(self, block: Block) -> Event:
        self._open = _OpenBlock(block)
        return BlockStart(self._index, block)

    def _delta(self, text: str, delta: TextDelta | ThinkingDelta | InputDelta) -> list[Event]:
        assert self._open is not None
        self._open.pieces.append(text)
        return [BlockDelta(self._index, delta)]


def _as_object(text: str) -> dict[str, Any] | None:
    """The arguments of a call; None if they are no JSON object, because they were cut off."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return None
