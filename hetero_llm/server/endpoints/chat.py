"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from msgspec import UnsetType
from starlette.requests import Request
from starlette.responses import Response

from hetero_llm.core.outputs import CompletionOutput, RequestOutput
from hetero_llm.server.context import Context
from hetero_llm.server.errors import invalid
from hetero_llm.server.logprobs import chat_logprobs, prompt_logprobs
from hetero_llm.server.message_words import MessageWords
from hetero_llm.server.prompts import chat_prompt
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
from hetero_llm.server.request_parsing import (
    CheckedRequest,
    check_max_tokens,
    checked_request,
    prompt_cut,
    read_generation,
    sampling_params,
)
from hetero_llm.server.response_builder import ChunkBuilder
from hetero_llm.server.responses import Responses
from hetero_llm.server.tool_requests import ToolRequest

_OBJECT, _CHUNK = "chat.completion", "chat.completion.chunk"


def chat_endpoint(
    context: Context, responses: Responses
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """The handler of the route."""

    async def chat_completions(request: Request) -> Response:
        body = await read_generation(context, request, ChatRequest)
        tools = context.parsers.requested(body, context.settings.limits)
        checked = await _checked(context, request, body, tools)
        builder = _ChatBuilder(context, body, checked, tools)
        return await responses.send(request, checked, builder, streamed=bool(body.stream))

    return chat_completions


async def _checked(
    context: Context, request: Request, body: ChatRequest, tools: ToolRequest
) -> CheckedRequest:
    wanted, name = _max_tokens(body)
    defaults = context.client.info.default_sampling
    default = defaults.get("max_tokens")
    params = sampling_params(
        body,
        max_tokens=default if wanted is None else wanted,
        max_model_len=context.client.info.max_model_len,
        limits=context.settings.limits,
        defaults=defaults,
    )
    prompt = await chat_prompt(
        body,
        context.tokenizer,
        context.settings,
        add_special_tokens=bool(body.add_special_tokens),
        cut=prompt_cut(body, params),
        tools=tools.tools,
    )
    return checked_request(
        context,
        request,
        body,
        [prompt],
        context.parsers.sampling(params, tools),
        prefix="chatcmpl",
        wanted=wanted,
        default=default,
        name=name,
    )


def _max_tokens(body: ChatRequest) -> tuple[int | None, str]:
    """The limit, and the name of the field that sets it: OpenAI has a new and an old one."""
    old, new = body.max_tokens, body.max_completion_tokens
    check_max_tokens(old, "max_tokens", lowest=1)
    check_max_tokens(new, "max_completion_tokens", lowest=1)
    if old is not None and new is not None and old != new:
        raise invalid(
            "max_tokens", f"max_tokens={old}: contradicts max_completion_tokens={new}; send one"
        )
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


class _ChatBuilder(ChunkBuilder[ChatRequest]):
    """Builds the response to one conversation."""

    def __init__(
        self, context: Context, body: ChatRequest, request: CheckedRequest, tools: ToolRequest
    ) -> None:
        super().__init__(context, body, request)
        self._parsers = context.parsers
        self._tools = tools
        self._messages: dict[int, MessageWords] = {}

    def _message(self, sequence: int) -> MessageWords:
        """What has been parsed of a sequence."""
        found = self._messages.get(sequence)
        if found is None:
            body, request = self._body, self._request
            parser = self._parsers.new(
                request.prompts[0],
                self._tools,
                request.params[0],
                skip_special=body.skip_special_tokens is not False,
            )
            found = MessageWords(parser, with_reasoning=body.include_reasoning is not False)
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
