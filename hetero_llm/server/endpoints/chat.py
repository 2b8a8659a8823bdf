"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import UnsetType
from starlette.requests import Request
from starlette.responses import Response

from hetero_llm.core.outputs import CompletionOutput, RequestOutput
from hetero_llm.server import protocol as wire
from hetero_llm.server.chat_requests import CheckedChat, checked_chat
from hetero_llm.server.context import Context
from hetero_llm.server.logprobs import chat_logprobs, prompt_logprobs
from hetero_llm.server.message_events import (
    CallArguments,
    CallStart,
    Content,
    MessageEvent,
    MessageParser,
    PlainParser,
    Reasoning,
)
from hetero_llm.server.request_parsing import read_generation
from hetero_llm.server.response_builder import ChunkBuilder
from hetero_llm.server.responses import Handler, Responses

_OBJECT, _CHUNK = "chat.completion", "chat.completion.chunk"


def chat_endpoint(context: Context, responses: Responses) -> Handler:
    """The handler of the route."""

    async def chat_completions(request: Request) -> Response:
        body = await read_generation(context, request, wire.ChatRequest)
        chat = await checked_chat(context, request, body, prefix="chatcmpl-")
        builder = _ChatBuilder(context, body, chat)
        return await responses.send(request, chat.request, builder, streamed=bool(body.stream))

    return chat_completions


class _ChatBuilder(ChunkBuilder[wire.ChatRequest]):
    """Builds the response to one conversation."""

    def __init__(self, context: Context, body: wire.ChatRequest, chat: CheckedChat) -> None:
        super().__init__(context, body, chat.request)
        self._new_parser = chat.new_parser
        self._messages: dict[int, MessageWords] = {}

    def _message(self, sequence: int) -> MessageWords:
        """What has been parsed of a sequence."""
        found = self._messages.get(sequence)
        if found is None:
            shows = self._body.include_reasoning is not False
            found = MessageWords(self._new_parser(), with_reasoning=shows)
            self._messages[sequence] = found
        return found

    def _shows_text_only(self) -> bool:
        body = self._body
        return not (body.logprobs or body.return_token_ids) and self._message(0).is_plain

    def _number(self, index: int, one: CompletionOutput) -> int:
        return one.index

    def _text_choice(self, number: int, text: str) -> wire.ChunkChoice:
        return wire.ChunkChoice(number, wire.Delta(content=text), None, None)

    def _note(self, one: CompletionOutput) -> MessageWords:
        """Parses the new text of a sequence."""
        message = self._message(one.index)
        message.add(one.text, one.token_ids, last=one.finish_reason is not None)
        if message.reasoning_tokens is not None:
            self._counter.note_reasoning(one.index, message.reasoning_tokens)
        return message

    def _finish_reason(self, one: CompletionOutput, message: MessageWords) -> str | None:
        reason = self._engine_requests.deadline.reason(one.finish_reason)
        return "tool_calls" if reason == "stop" and message.has_calls else reason

    async def whole(self) -> wire.Chat:
        choices: list[wire.ChatChoice] = []
        likely: list[Any] | None = None
        async for index, output in self._engine_requests.outputs():
            self._counter.note(index, output, output.outputs)
            if output.finished:
                choices = [self._choice(one) for one in output.outputs]
                if self._body.prompt_logprobs is not None:
                    likely = prompt_logprobs(
                        self._tokenizer, output.prompt_logprobs, as_ids=self._as_ids
                    )
        request = self._request
        response = wire.Chat(
            request.id, _OBJECT, request.created, request.model, choices, self._counter.usage()
        )
        response.prompt_logprobs = likely
        if self._body.return_token_ids:
            response.prompt_token_ids = list(request.prompts[0].token_ids or ())
        return response

    def _choice(self, one: CompletionOutput) -> wire.ChatChoice:
        message = self._note(one)
        choice = wire.ChatChoice(
            one.index,
            message.whole(self._role()),
            self._logprobs(one),
            self._finish_reason(one, message),
            one.stop_reason,
            timeout=self._timeout(one),
        )
        if self._body.return_token_ids:
            choice.token_ids = one.token_ids
        return choice

    def _chunk_choice(
        self, index: int, output: RequestOutput, one: CompletionOutput
    ) -> wire.ChunkChoice | None:
        message = self._note(one)
        delta = message.delta()
        shown = self._body.return_token_ids or self._body.logprobs
        if delta is None and one.finish_reason is None and not shown:
            return None
        choice = wire.ChunkChoice(
            one.index,
            wire.Delta() if delta is None else delta,
            self._logprobs(one),
            self._finish_reason(one, message),
        )
        if one.finish_reason is not None:
            choice.stop_reason = one.stop_reason
            choice.timeout = self._timeout(one)
        if self._body.return_token_ids:
            choice.token_ids = one.token_ids
        return choice

    def _opening_chunks(self, usage: wire.Usage | UnsetType | None) -> Iterable[wire.Chunk]:
        """The role of each choice."""
        for number in range(self._request.params[0].n):
            delta = wire.Delta(role=self._role(), content="")
            chunk = self._chunk([wire.ChunkChoice(number, delta, None, None)], usage)
            if self._body.return_token_ids and number == 0:
                chunk.prompt_token_ids = list(self._request.prompts[0].token_ids or ())
            yield chunk

    def _chunk(
        self, choices: Sequence[wire.ChunkChoice], usage: wire.Usage | UnsetType | None
    ) -> wire.Chunk:
        request = self._request
        return wire.Chunk(request.id, _CHUNK, request.created, request.model, list(choices), usage)

    def _logprobs(self, one: CompletionOutput) -> wire.ChatLogprobs | None:
        if not self._body.logprobs or one.logprobs is None:
            return None
        return chat_logprobs(
            self._tokenizer,
            one.token_ids,
            one.logprobs,
            count=self._alternatives(self._body.top_logprobs or 0),
            as_ids=self._as_ids,
        )

    def _role(self) -> str:
        """The role of the last message, unless the template has opened a new one for the answer."""
        body = self._body
        opened = body.add_generation_prompt is not False and not body.continue_final_message
        if not opened and body.messages and body.messages[-1].role:
            return body.messages[-1].role
        return self._settings.response_role


class MessageWords:
    """One sequence's message in the words of chat completions.

    Args:
        with_reasoning: show the reasoning.

    Attributes:
        is_plain: all text is content.
        has_calls: a call of a tool has begun.
    """

    def __init__(self, parser: MessageParser, *, with_reasoning: bool = True) -> None:
        self._parser = parser
        self._with_reasoning = with_reasoning
        self.is_plain = isinstance(parser, PlainParser)
        self._new: list[MessageEvent] = []
        self._content: list[str] = []  # new, of a plain message
        self.has_calls = False

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the reasoning up to now; None where they are not counted."""
        return self._parser.reasoning_tokens

    def add(self, text: str, token_ids: Sequence[int], *, last: bool) -> None:
        """Takes in new text and tokens of the sequence; `last`: there will be no more."""
        if self.is_plain:
            self._content.append(text)
            return
        self._new += self._parser.feed(text, token_ids)
        if last:
            self._new += self._parser.finish()

    def whole(self, role: str) -> wire.ResponseMessage:
        """The message, of all events."""
        delta = self.delta() or wire.Delta()
        message = wire.ResponseMessage(role, delta.content or None)
        message.reasoning = message.reasoning_content = delta.reasoning or None
        if delta.tool_calls:
            message.tool_calls = [_call(one) for one in delta.tool_calls]
        if message.content is None and not delta.tool_calls and not message.reasoning:
            message.content = ""
        return message

    def delta(self) -> wire.Delta | None:
        """What is new since the last call; None if that is nothing."""
        if self.is_plain:
            plain, self._content = "".join(self._content), []
            return wire.Delta(content=plain)
        events, self._new = self._new, []
        content: list[str] = []
        reasoning: list[str] = []
        calls: dict[int, wire.ToolCallDelta] = {}
        for event in events:
            if isinstance(event, Content):
                content.append(event.text)
            elif isinstance(event, Reasoning):
                reasoning.append(event.text)
            elif isinstance(event, CallStart):
                self.has_calls = True
                function = wire.FunctionDelta(event.name, "")
                calls[event.index] = wire.ToolCallDelta(event.index, event.id, "function", function)
            elif isinstance(event, CallArguments):
                _add_arguments(calls, event)
        delta = wire.Delta()
        if content:
            delta.content = "".join(content)
        if reasoning and self._with_reasoning:
            delta.reasoning = delta.reasoning_content = "".join(reasoning)
        if calls:
            delta.tool_calls = list(calls.values())
        return delta if content or calls or (reasoning and self._with_reasoning) else None


def _add_arguments(calls: dict[int, wire.ToolCallDelta], event: CallArguments) -> None:
    """Adds arguments to the delta of their call: clients join deltas of one index over chunks, not
    all of them within a chunk."""
    call = calls.get(event.index)
    if call is None:
        calls[event.index] = wire.ToolCallDelta(
            event.index, function=wire.FunctionDelta(arguments=event.text)
        )
    else:
        assert isinstance(call.function, wire.FunctionDelta)
        call.function.arguments = (call.function.arguments or "") + event.text


def _call(delta: wire.ToolCallDelta) -> wire.ResponseToolCall:
    """A whole call."""
    function = delta.function
    assert isinstance(function, wire.FunctionDelta) and isinstance(delta.id, str)
    return wire.ResponseToolCall(
        delta.id, wire.CalledFunction(str(function.name), str(function.arguments or ""))
    )
