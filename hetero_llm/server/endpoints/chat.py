"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import UnsetType
from starlette.requests import Request
from starlette.responses import Response

from hetero_llm.core.outputs import CompletionOutput, RequestOutput
from hetero_llm.server.chat_requests import CheckedChat, checked_chat
from hetero_llm.server.context import Context
from hetero_llm.server.logprobs import chat_logprobs, prompt_logprobs
from hetero_llm.server.message_words import MessageWords
from hetero_llm.server.protocol import (
    Chat,
    ChatChoice,
    ChatLogprobs,
    ChatRequest,
    Chunk,
    ChunkChoice,
    Delta,
    Usage,
)
from hetero_llm.server.request_parsing import read_generation
from hetero_llm.server.response_builder import ChunkBuilder
from hetero_llm.server.responses import Handler, Responses

_OBJECT, _CHUNK = "chat.completion", "chat.completion.chunk"


def chat_endpoint(context: Context, responses: Responses) -> Handler:
    """The handler of the route."""

    async def chat_completions(request: Request) -> Response:
        body = await read_generation(context, request, ChatRequest)
        chat = await checked_chat(context, request, body, prefix="chatcmpl-")
        builder = _ChatBuilder(context, body, chat)
        return await responses.send(request, chat.request, builder, streamed=bool(body.stream))

    return chat_completions


class _ChatBuilder(ChunkBuilder[ChatRequest]):
    """Builds the response to one conversation."""

    def __init__(self, context: Context, body: ChatRequest, chat: CheckedChat) -> None:
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

    async def whole(self) -> Chat:
        choices: list[ChatChoice] = []
        likely: list[Any] | None = None
        async for index, output in self._engine_requests.outputs():
            self._counter.note(index, output, output.outputs)
            if output.finished:
                choices = [self._choice(one) for one in output.outputs]
                likely = prompt_logprobs(
                    self._tokenizer, output.prompt_logprobs, as_ids=self._as_ids
                )
        request = self._request
        response = Chat(
            request.id, _OBJECT, request.created, request.model, choices, self._counter.usage()
        )
        if self._body.prompt_logprobs is not None:
            response.prompt_logprobs = likely
        if self._body.return_token_ids:
            response.prompt_token_ids = list(request.prompts[0].token_ids or ())
        return response

    def _choice(self, one: CompletionOutput) -> ChatChoice:
        deadline = self._engine_requests.deadline
        message = self._note(one)
        choice = ChatChoice(
            one.index,
            message.whole(self._role()),
            self._logprobs(one),
            self._finish_reason(one, message),
            one.stop_reason,
        )
        if deadline.cut(one.finish_reason):
            choice.timeout = True
        if self._body.return_token_ids:
            choice.token_ids = one.token_ids
        return choice

    def _chunk_choice(
        self, index: int, output: RequestOutput, one: CompletionOutput
    ) -> ChunkChoice | None:
        deadline = self._engine_requests.deadline
        message = self._note(one)
        delta = message.delta()
        shown = self._body.return_token_ids or self._body.logprobs
        if delta is None and one.finish_reason is None and not shown:
            return None
        choice = ChunkChoice(
            one.index,
            Delta() if delta is None else delta,
            self._logprobs(one),
            self._finish_reason(one, message),
        )
        if one.finish_reason is not None:
            choice.stop_reason = one.stop_reason
            if deadline.cut(one.finish_reason):
                choice.timeout = True
        if self._body.return_token_ids:
            choice.token_ids = one.token_ids
        return choice

    def _opening_chunks(self, usage: Usage | UnsetType | None) -> Iterable[Chunk]:
        """The role of each choice."""
        for number in range(self._request.params[0].n):
            delta = Delta(role=self._role(), content="")
            chunk = self._chunk([ChunkChoice(number, delta, None, None)], usage)
            if self._body.return_token_ids and number == 0:
                chunk.prompt_token_ids = list(self._request.prompts[0].token_ids or ())
            yield chunk

    def _chunk(self, choices: Sequence[ChunkChoice], usage: Usage | UnsetType | None) -> Chunk:
        request = self._request
        return Chunk(request.id, _CHUNK, request.created, request.model, list(choices), usage)

    def _logprobs(self, one: CompletionOutput) -> ChatLogprobs | None:
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
