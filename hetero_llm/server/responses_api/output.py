"""From the events of a message to the output items of a response and the events of its stream."""

from __future__ import annotations

from collections.abc import Sequence
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
from hetero_llm.server.protocol import ChatLogprob
from hetero_llm.server.responses_api import protocol as wire

_RUNNING, _COMPLETED, _INCOMPLETE = "in_progress", "completed", "incomplete"
_ASSISTANT = "assistant"


@dataclass(slots=True)
class _OpenText:
    """A message or reasoning that is being written."""

    id: str
    index: int
    is_reasoning: bool
    pieces: list[str] = field(default_factory=list)
    logprobs: list[ChatLogprob] = field(default_factory=list)

    def part(self) -> wire.Part:
        """Its only part as it is now."""
        text = "".join(self.pieces)
        if self.is_reasoning:
            return wire.ReasoningText(text)
        return wire.OutputText(text, [], list(self.logprobs))

    def item(self, status: str, *parts: Any) -> wire.OutputItem:
        if self.is_reasoning:
            return wire.ReasoningItem(self.id, status, [], list(parts))
        return wire.MessageItem(self.id, status, _ASSISTANT, list(parts))


@dataclass(slots=True)
class _OpenCall:
    """A call whose arguments are being written."""

    id: str
    index: int
    call_id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    def item(self, status: str) -> wire.CallItem:
        return wire.CallItem(self.id, status, self.call_id, self.name, "".join(self.pieces))


class OutputWriter:
    """Writes the items of one response; its events have no sequence numbers yet.

    Args:
        suffix: of the ids of the items.
    """

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._items: list[wire.OutputItem | None] = []
        self._text: _OpenText | None = None
        self._calls: dict[int, _OpenCall] = {}

    @property
    def items(self) -> list[wire.OutputItem]:
        """The items that are complete, in their order."""
        return [item for item in self._items if item is not None]

    def write(self, event: MessageEvent, logprobs: Sequence[ChatLogprob] = ()) -> list[wire.Event]:
        """Takes in an event of the message.

        Args:
            logprobs: of the tokens of a content.
        """
        match event:
            case Content(text):
                return self._write_text(text, logprobs, is_reasoning=False)
            case Reasoning(text):
                return self._write_text(text, (), is_reasoning=True)
            case CallStart(index, call_id, name):
                return self._start_call(index, call_id, name)
            case CallArguments(index, text):
                return [self._write_arguments(self._calls[index], text)]
            case CallEnd(index):
                call = self._calls.pop(index)
                # A call without arguments is one of an empty object.
                events: list[wire.Event] = (
                    [] if call.pieces else [self._write_arguments(call, "{}")]
                )
                return events + self._end_call(call, _COMPLETED)

    def more_text(self, text: str) -> tuple[int, str]:
        """Appends to the message that is open; returns the index and the id of its item."""
        assert self._text is not None
        self._text.pieces.append(text)
        return self._text.index, self._text.id

    def finish(self, *, cut: bool) -> list[wire.Event]:
        """Ends the items that are open. `cut`: the message was cut off, not ended by the model."""
        return self._end_text(_INCOMPLETE if cut else _COMPLETED) + self._end_calls()

    # -- messages and reasoning ---------------------------------------------------------------

    def _write_text(
        self, text: str, logprobs: Sequence[ChatLogprob], *, is_reasoning: bool
    ) -> list[wire.Event]:
        events: list[wire.Event] = []
        if self._text is None or self._text.is_reasoning != is_reasoning:
            events = self._end_text(_COMPLETED) + self._end_calls()
            events += self._start_text(is_reasoning=is_reasoning)
        one = self._text
        assert one is not None
        one.pieces.append(text)
        one.logprobs += logprobs
        delta: wire.Event
        if is_reasoning:
            delta = wire.ReasoningDelta(output_index=one.index, item_id=one.id, delta=text)
        else:
            shown = list(logprobs)
            delta = wire.TextDelta(
                output_index=one.index, item_id=one.id, delta=text, logprobs=shown
            )
        return [*events, delta]

    def _start_text(self, *, is_reasoning: bool) -> list[wire.Event]:
        index = len(self._items)
        item_id = self._id("rs" if is_reasoning else "msg", index)
        one = self._text = _OpenText(item_id, index, is_reasoning)
        self._items.append(None)
        return [
            wire.ItemAdded(output_index=index, item=one.item(_RUNNING)),
            wire.PartAdded(output_index=index, item_id=item_id, part=one.part()),
        ]

    def _end_text(self, status: str) -> list[wire.Event]:
        one, self._text = self._text, None
        if one is None:
            return []
        part = one.part()
        item = self._items[one.index] = one.item(status, part)
        ended: wire.Event
        if isinstance(part, wire.ReasoningText):
            ended = wire.ReasoningDone(output_index=one.index, item_id=one.id, text=part.text)
        else:
            ended = wire.TextDone(
                output_index=one.index, item_id=one.id, text=part.text, logprobs=part.logprobs
            )
        return [
            ended,
            wire.PartDone(output_index=one.index, item_id=one.id, part=part),
            wire.ItemDone(output_index=one.index, item=item),
        ]

    # -- calls --------------------------------------------------------------------------------

    def _start_call(self, number: int, call_id: str, name: str) -> list[wire.Event]:
        events = self._end_text(_COMPLETED) + self._end_calls()
        index = len(self._items)
        call = self._calls[number] = _OpenCall(self._id("fc", index), index, call_id, name)
        self._items.append(None)
        events.append(wire.ItemAdded(output_index=index, item=call.item(_RUNNING)))
        return events

    def _write_arguments(self, call: _OpenCall, text: str) -> wire.Event:
        call.pieces.append(text)
        return wire.ArgumentsDelta(output_index=call.index, item_id=call.id, delta=text)

    def _end_calls(self) -> list[wire.Event]:
        """Ends calls that the model has left open: one item ends before the next one begins."""
        found, self._calls = self._calls, {}
        return [event for call in found.values() for event in self._end_call(call, _INCOMPLETE)]

    def _end_call(self, call: _OpenCall, status: str) -> list[wire.Event]:
        item = self._items[call.index] = call.item(status)
        return [
            wire.ArgumentsDone(
                output_index=call.index,
                item_id=call.id,
                name=call.name,
                arguments=item.arguments,
            ),
            wire.ItemDone(output_index=call.index, item=item),
        ]

    def _id(self, prefix: str, index: int) -> str:
        return f"{prefix}_{self._suffix}_{index}"


def response_of_item(item_id: str, prefix: str) -> str:
    """The id of the response that an `OutputWriter` has written an item of; another text for an
    item of someone else's. `prefix`: of the ids of responses."""
    return prefix + item_id.partition("_")[2].rpartition("_")[0]
