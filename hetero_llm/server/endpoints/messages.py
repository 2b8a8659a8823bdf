"""/v1/messages: Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from hetero_llm.core.outputs import CompletionOutput
from hetero_llm.server.chat_requests import checked_chat, conversation_prompt, read_by_deltas
from hetero_llm.server.context import Context
from hetero_llm.server.errors import ApiError, FieldNames, required
from hetero_llm.server.message_events import MessageReader, Piece
from hetero_llm.server.messages_api import protocol as wire
from hetero_llm.server.messages_api.conversation import translated
from hetero_llm.server.messages_api.output import BlockWriter
from hetero_llm.server.protocol import ChatRequest
from hetero_llm.server.request_parsing import CheckedRequest, check_generation, read_known
from hetero_llm.server.response_builder import (
    TEXT_MARK,
    Envelope,
    EventBuilder,
    Written,
    aborted,
)
from hetero_llm.server.responses import MESSAGE_EVENTS, Responses, json_response

_PREFIX = "msg_"


class MessagesApi:
    """Handlers of /v1/messages and of what counts its tokens."""

    def __init__(self, context: Context, responses: Responses) -> None:
        self._context = context
        self._responses = responses

    async def create(self, request: Request) -> Response:
        """POST /v1/messages"""
        context = self._context
        body, chat, names = await self._read(request)
        if body.max_tokens is None:
            raise required("max_tokens")
        with _said_as_anthropic(names):
            check_generation(context, chat)
            found = await checked_chat(context, request, chat, prefix=_PREFIX, cut_max_tokens=True)
        parser = found.new_parser()
        checked = read_by_deltas(found.request, parser)
        hidden = body.thinking is not None and body.thinking.display == "omitted"
        builder = _Builder(
            context,
            chat,
            checked,
            names,
            reader=MessageReader(parser),
            writer=BlockWriter(shows_thinking=not hidden),
        )
        return await self._responses.send(
            request, checked, builder, streamed=bool(body.stream), framing=MESSAGE_EVENTS
        )

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens"""
        context = self._context
        _, chat, names = await self._read(request)
        with _said_as_anthropic(names):
            check_generation(context, chat)
            tools = context.parsers.requested(chat, context.settings.limits)
            prompt = await conversation_prompt(context, chat, tools)
        return json_response(wire.TokenCount(len(prompt.token_ids or ())))

    async def _read(self, request: Request) -> tuple[wire.MessagesRequest, ChatRequest, FieldNames]:
        context = self._context
        body = await read_known(context, request, wire.MessagesRequest)
        chat, names = translated(
            body,
            context.tokenizer.chat_template,
            context.settings.limits,
            takes_images=context.client.images is not None,
        )
        return body, chat, names


@contextmanager
def _said_as_anthropic(names: FieldNames) -> Iterator[None]:
    """Errors inside name the client's fields. Of a prompt that is too long clients want to read
    these words: Claude Code then shortens the conversation."""
    try:
        with names.in_errors():
            yield
    except ApiError as error:
        if error.code != "context_length_exceeded":
            raise
        message = f"prompt is too long: {error.message}"
        raise ApiError(error.status, error.code, message, param=error.param) from None


class _Builder(EventBuilder):
    """Builds the message that answers one request."""

    def __init__(
        self,
        context: Context,
        body: ChatRequest,
        request: CheckedRequest,
        names: FieldNames,
        *,
        reader: MessageReader,
        writer: BlockWriter,
    ) -> None:
        super().__init__(context, body, request, reader)
        self._names = names
        self._writer = writer
        self._envelope: Envelope | None = None  # of more text
        self._message = wire.MessageObject(
            request.id, "assistant", request.model, [], None, None, self._usage()
        )

    def failure(self, error: ApiError) -> wire.ErrorEvent:
        return wire.ErrorEvent(wire.ErrorDetails(error.anthropic_kind, error.message))

    def _naming_errors(self) -> AbstractContextManager[None]:
        return _said_as_anthropic(self._names)

    def _response(self) -> wire.MessageObject:
        self._message.content = self._writer.blocks
        return self._message

    def _first_events(self) -> Sequence[wire.Event]:
        self._message.usage = self._usage()
        return [wire.MessageStart(self._message)]

    def _events_of(self, piece: Piece) -> Sequence[wire.Event]:
        return self._writer.write(piece.event)

    def _text_event(self, text: str) -> Written:
        index = self._writer.more_text(text)
        if self._envelope is None:
            self._envelope = Envelope(wire.BlockDelta(index, wire.TextDelta(TEXT_MARK)))
        return self._envelope.write(text)

    def _last_events(self, one: CompletionOutput) -> Sequence[wire.Event]:
        closed = self._writer.close()
        stopped = self._stopped(one)
        return [
            *closed,
            wire.MessageDelta(stopped, self._message.usage),
            wire.MessageStop(),
        ]

    def _stopped(self, one: CompletionOutput) -> wire.Stopped:
        """How the message ended; `_message` gets it, too."""
        message = self._message
        reason = self._engine_requests.deadline.reason(one.finish_reason)
        if reason == "length":
            full = self._reader.num_tokens < (self._body.max_tokens or 0)
            message.timeout = self._timeout(one)
            window = full and message.timeout is UNSET
            message.stop_reason = "model_context_window_exceeded" if window else "max_tokens"
        elif reason != "stop":
            raise aborted()
        elif isinstance(one.stop_reason, str):
            message.stop_reason, message.stop_sequence = "stop_sequence", one.stop_reason
        else:
            message.stop_reason = "tool_use" if self._writer.has_calls else "end_turn"
        message.usage = self._usage()
        return wire.Stopped(message.stop_reason, message.stop_sequence, message.timeout)

    def _usage(self) -> wire.MessageUsage:
        usage, cached = self._counter.usage(), self._counter.cached
        thinking = wire.OutputTokensDetails(self._reader.reasoning_tokens)
        return wire.MessageUsage(
            usage.prompt_tokens - cached, 0, cached, usage.completion_tokens, thinking
        )
