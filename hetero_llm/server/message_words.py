"""A message's events in the words of chat completions: a whole message, or deltas of one."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_llm.server.message_events import (
    CallArguments,
    CallStart,
    Content,
    MessageEvent,
    MessageParser,
    PlainParser,
    Reasoning,
)
from hetero_llm.server.protocol import (
    CalledFunction,
    Delta,
    FunctionDelta,
    ResponseMessage,
    ResponseToolCall,
    ToolCallDelta,
)
from hetero_llm.server.regions.region_parser import RegionParser


class MessageWords:
    """One sequence's message.

    Args:
        with_reasoning: show the reasoning.

    Attributes:
        has_calls: a call of a tool has begun.
    """

    def __init__(self, parser: MessageParser, *, with_reasoning: bool = True) -> None:
        self._parser = parser
        self._with_reasoning = with_reasoning
        self._is_plain = isinstance(parser, PlainParser)
        self._new: list[MessageEvent] = []
        self.has_calls = False

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the reasoning up to now; None where they are not counted."""
        parser = self._parser
        return parser.reasoning_tokens if isinstance(parser, RegionParser) else None

    def add(self, text: str, token_ids: Sequence[int], *, last: bool) -> None:
        """Takes in new text and tokens of the sequence; `last`: there will be no more."""
        self._new += self._parser.feed(text, token_ids)
        if last:
            self._new += self._parser.finish()

    def whole(self, role: str) -> ResponseMessage:
        """The message, of all events."""
        delta = self.delta() or Delta()
        message = ResponseMessage(role, delta.content or None)
        message.reasoning = message.reasoning_content = delta.reasoning or None
        if delta.tool_calls:
            message.tool_calls = [_call(one) for one in delta.tool_calls]
        if message.content is None and not delta.tool_calls and not message.reasoning:
            message.content = ""
        return message

    def delta(self) -> Delta | None:
        """What is new since the last call; None if that is nothing."""
        events, self._new = self._new, []
        if self._is_plain:
            return Delta(content="".join(one.text for one in events if isinstance(one, Content)))
        content: list[str] = []
        reasoning: list[str] = []
        calls: dict[int, ToolCallDelta] = {}
        for event in events:
            if isinstance(event, Content):
                content.append(event.text)
            elif isinstance(event, Reasoning):
                reasoning.append(event.text)
            elif isinstance(event, CallStart):
                self.has_calls = True
                function = FunctionDelta(event.name, "")
                calls[event.index] = ToolCallDelta(event.index, event.id, "function", function)
            elif isinstance(event, CallArguments):
                _add_arguments(calls, event)
        delta = Delta()
        if content:
            delta.content = "".join(content)
        if reasoning and self._with_reasoning:
            delta.reasoning = delta.reasoning_content = "".join(reasoning)
        if calls:
            delta.tool_calls = list(calls.values())
        return delta if content or calls or (reasoning and self._with_reasoning) else None


def _add_arguments(calls: dict[int, ToolCallDelta], event: CallArguments) -> None:
    """Adds arguments to the delta of their call: clients join deltas of one index over chunks, not
    all of them within a chunk."""
    call = calls.get(event.index)
    if call is None:
        calls[event.index] = ToolCallDelta(
            event.index, function=FunctionDelta(arguments=event.text)
        )
    else:
        assert isinstance(call.function, FunctionDelta)
        call.function.arguments = (call.function.arguments or "") + event.text


def _call(delta: ToolCallDelta) -> ResponseToolCall:
    """A whole call."""
    function = delta.function
    assert isinstance(function, FunctionDelta) and isinstance(delta.id, str)
    return ResponseToolCall(
        delta.id, CalledFunction(str(function.name), str(function.arguments or ""))
    )
