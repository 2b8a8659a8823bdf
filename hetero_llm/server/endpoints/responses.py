"""/v1/responses: OpenAI's Responses API."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from typing import Any
from uuid import uuid4

import msgspec
from msgspec.structs import asdict
from starlette.requests import Request
from starlette.responses import Response

from hetero_llm.core.errors import shown
from hetero_llm.core.outputs import CompletionOutput
from hetero_llm.server.chat_requests import checked_chat, conversation_prompt, read_by_deltas
from hetero_llm.server.context import Context, key_digest
from hetero_llm.server.errors import (
    ApiError,
    FieldNames,
    required,
    unsupported,
    wrong,
    wrong_value,
)
from hetero_llm.server.logprobs import chat_logprobs
from hetero_llm.server.message_events import MessageReader, Piece
from hetero_llm.server.protocol import ChatLogprob, ChatRequest
from hetero_llm.server.request_parsing import CheckedRequest, check_generation, read_known
from hetero_llm.server.response_builder import (
    NUMBER_MARK,
    TEXT_MARK,
    Envelope,
    EventBuilder,
    Written,
    aborted,
)
from hetero_llm.server.responses import RESPONSE_EVENTS, Responses, json_response
from hetero_llm.server.responses_api import protocol as wire
from hetero_llm.server.responses_api.conversation import (
    check_fields,
    new_items,
    tool_choice_of,
    tools_of,
    translated,
)
from hetero_llm.server.responses_api.output import OutputWriter, response_of_item
from hetero_llm.server.responses_api.store import ResponseStore, StoredResponse
from hetero_llm.server.translation import without_nulls

logger = logging.getLogger(__name__)

_PREFIX = "resp_"
_PAGE, _LARGEST_PAGE = 20, 100


@dataclass(frozen=True, slots=True)
class _Conversation:
    """A request, the chat request that it became, and what the client calls the latter's fields.

    Attributes:
        items: those of the input, and of the previous response before them.
        owner: whose clients may see what is stored: the digest of the API key.
        stored: the response is kept.
    """

    body: wire.ResponsesRequest
    chat: ChatRequest
    names: FieldNames
    items: list[Any]
    owner: str
    stored: bool


class ResponsesApi:
    """Handlers of /v1/responses and of what is kept of it."""

    def __init__(self, context: Context, responses: Responses) -> None:
        settings = context.settings
        self._context = context
        self._responses = responses
        self._store = ResponseStore(settings.stored_responses, settings.stored_response_bytes)

    async def create(self, request: Request) -> Response:
        """POST /v1/responses"""
        context = self._context
        body = await read_known(context, request, wire.ResponsesRequest)
        conversation = self._conversation(body, key_digest(request))
        with conversation.names.in_errors():
            check_generation(context, conversation.chat)
            chat = await checked_chat(context, request, conversation.chat, prefix=_PREFIX)
        parser = chat.new_parser()
        checked = read_by_deltas(chat.request, parser)
        builder = _Builder(
            context, conversation, checked, reader=MessageReader(parser), store=self._store
        )
        return await self._responses.send(
            request, checked, builder, streamed=bool(body.stream), framing=RESPONSE_EVENTS
        )

    async def input_tokens(self, request: Request) -> Response:
        """POST /v1/responses/input_tokens"""
        context = self._context
        body = await read_known(context, request, wire.ResponsesRequest)
        conversation = self._conversation(body, key_digest(request))
        with conversation.names.in_errors():
            check_generation(context, conversation.chat)
            tools = context.parsers.requested(conversation.chat, context.settings.limits)
            prompt = await conversation_prompt(context, conversation.chat, tools)
        return json_response(wire.InputTokens(len(prompt.token_ids or ())))

    async def cancel(self, request: Request) -> Response:
        """POST /v1/responses/{response_id}/cancel: of a response in the background, and none is."""
        self._stored(request)
        raise wrong(
            "response_id", "only responses in the background can be cancelled, and this is none"
        )

    def _conversation(self, body: wire.ResponsesRequest, owner: str) -> _Conversation:
        check_fields(body, self._context.settings.limits)
        if body.store and not self._store:
            raise unsupported("store", "storing responses (--max-stored-responses)")
        earlier = self._earlier(owner, body.previous_response_id)
        items = [
            self._resolved(owner, item, f"input[{index}]")
            for index, item in enumerate(new_items(body))
        ]
        takes_images = self._context.client.images is not None
        chat, names = translated(body, items, earlier, takes_images=takes_images)
        stored = bool(self._store) and body.store is not False
        return _Conversation(body, chat, names, [*earlier, *items], owner, stored)

    def _earlier(self, owner: str, response_id: str | None) -> list[Any]:
        """The items of a previous response and of its input."""
        if response_id is None:
            return []
        if not self._store:
            raise unsupported(
                "previous_response_id", "continuing a stored response (--max-stored-responses)"
            )
        found = self._store.get(owner, response_id)
        if found is None:
            raise wrong_value(
                "previous_response_id",
                response_id,
                "no such response is stored, or no longer; send the whole conversation",
                "previous_response_not_found",
            )
        items: list[Any] = msgspec.json.decode(found.items)
        output: list[Any] = msgspec.json.decode(found.response)["output"]
        return items + output

    def _resolved(self, owner: str, item: Any, where: str) -> Any:
        """The item itself, or the one of a stored response that it refers to."""
        if not isinstance(item, dict) or item.get("type") != "item_reference":
            return item
        if not self._store:
            raise unsupported(
                f"{where}.type", "'item_reference', to a stored response (--max-stored-responses),"
            )
        item_id = item.get("id")
        if not isinstance(item_id, str):
            raise required(f"{where}.id")
        found = self._store.get(owner, response_of_item(item_id, _PREFIX))
        output: list[Any] = [] if found is None else msgspec.json.decode(found.response)["output"]
        for one in output:
            if one["id"] == item_id:
                return one
        raise wrong_value(f"{where}.id", item_id, "no such item is stored, or no longer")

    # -- what is stored -----------------------------------------------------------------------

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/responses/{response_id}"""
        if request.query_params.get("stream") == "true":
            raise unsupported("stream", "streaming a stored response")
        found = self._stored(request)
        return Response(found.response, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/responses/{response_id}"""
        self._stored(request)
        response_id = request.path_params["response_id"]
        self._store.delete(key_digest(request), response_id)
        return json_response(wire.Deleted(response_id))

    async def input_items(self, request: Request) -> Response:
        """GET /v1/responses/{response_id}/input_items: newest first, unless `order` is asc."""
        stored = self._stored(request)
        items: list[Any] = msgspec.json.decode(stored.items)
        limit, order, after = _page(request.query_params)
        if order == "desc":
            items.reverse()
        if after is not None:
            places = [index for index, item in enumerate(items) if item["id"] == after]
            if not places:
                raise wrong_value("after", after, "is none of the items")
            items = items[places[0] + 1 :]
        page = items[:limit]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return json_response(wire.ItemList(page, first, last, len(items) > limit))

    def _stored(self, request: Request) -> StoredResponse:
        response_id = request.path_params["response_id"]
        found = self._store.get(key_digest(request), response_id)
        if found is None:
            why = "" if self._store else "; this server stores none (--max-stored-responses)"
            raise ApiError(
                404,
                "response_not_found",
                f"no response {shown(response_id)} is stored{why}",
                param="response_id",
            )
        return found


def _page(query: Mapping[str, str]) -> tuple[int, str, str | None]:
    """The parameters of a list: its length, its order, and the id before its first item."""
    limit, order = query.get("limit", str(_PAGE)), query.get("order", "desc")
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= _LARGEST_PAGE):
        raise wrong_value("limit", limit, f"must be 1 to {_LARGEST_PAGE}")
    if order not in ("asc", "desc"):
        raise wrong_value("order", order, "must be 'asc' or 'desc'")
    return int(limit), order, query.get("after")


class _Builder(EventBuilder):
    """Builds the response to one request."""

    def __init__(
        self,
        context: Context,
        conversation: _Conversation,
        request: CheckedRequest,
        *,
        reader: MessageReader,
        store: ResponseStore,
    ) -> None:
        super().__init__(context, conversation.chat, request, reader)
        self._conversation = conversation
        self._store = store
        self._writer = OutputWriter(request.id.removeprefix(_PREFIX))
        self._sequence_numbers = count()
        self._envelope: Envelope | None = None  # of more text
        self._object = _empty_response(conversation, request)

    def failure(self, error: ApiError) -> wire.Event:
        response = self._object
        if self.opened:
            response.status = "failed"
            response.error = wire.ResponseError(error.code, error.message)
            response.output = self._writer.items
            return self._numbered([wire.Failed(response=response)])[0]
        event = wire.ErrorEvent(code=error.code, message=error.message, param=error.param)
        return self._numbered([event])[0]

    def _naming_errors(self) -> AbstractContextManager[None]:
        return self._conversation.names.in_errors()

    def _response(self) -> wire.ResponseObject:
        return self._object

    def _first_events(self) -> Sequence[wire.Event]:
        return self._numbered(
            [wire.Created(response=self._object), wire.InProgress(response=self._object)]
        )

    def _events_of(self, piece: Piece) -> Sequence[wire.Event]:
        return self._numbered(self._writer.write(piece.event, self._logprobs(piece)))

    def _text_event(self, text: str) -> Written:
        index, item_id = self._writer.more_text(text)
        if self._envelope is None:
            sample = wire.TextDelta(
                sequence_number=NUMBER_MARK,
                output_index=index,
                item_id=item_id,
                delta=TEXT_MARK,
                logprobs=[],
            )
            self._envelope = Envelope(sample, numbered=True)
        return self._envelope.write_numbered(next(self._sequence_numbers), text)

    def _last_events(self, one: CompletionOutput) -> Sequence[wire.Event]:
        response = self._object
        reason = self._engine_requests.deadline.reason(one.finish_reason)
        if reason not in ("stop", "length"):
            raise aborted()
        events = self._writer.finish(cut=reason == "length")
        response.output = self._writer.items
        response.usage = self._usage()
        response.completed_at = int(time.time())
        response.status = "completed"
        if reason == "length":
            response.status, response.completed_at = "incomplete", None
            details = wire.IncompleteDetails("max_output_tokens", self._timeout(one))
            response.incomplete_details = details
        if response.store:
            self._keep()
        last = wire.Completed if reason == "stop" else wire.Incomplete
        return self._numbered([*events, last(response=response)])

    def _numbered(self, events: Sequence[wire.Event]) -> Sequence[wire.Event]:
        for event in events:
            event.sequence_number = next(self._sequence_numbers)
        return events

    def _keep(self) -> None:
        """Stores the response; one that is larger than the store says that it was not stored."""
        conversation = self._conversation
        items = msgspec.json.encode([_with_id(item) for item in conversation.items])
        entry = StoredResponse(msgspec.json.encode(self._object), items)
        if not self._store.put(conversation.owner, self._object.id, entry):
            self._object.store = False
            logger.warning(
                "request %s: the response, %d bytes with its input, is too large to be stored",
                self._request.http_id,
                entry.size,
            )

    def _usage(self) -> wire.ResponseUsage:
        usage = self._counter.usage()
        return wire.ResponseUsage(
            usage.prompt_tokens,
            wire.InputTokensDetails(self._counter.cached),
            usage.completion_tokens,
            wire.OutputTokensDetails(self._reader.reasoning_tokens),
            usage.total_tokens,
        )

    def _logprobs(self, piece: Piece) -> list[ChatLogprob]:
        if not piece.logprobs:
            return []
        return chat_logprobs(
            self._tokenizer,
            piece.token_ids,
            piece.logprobs,
            count=self._alternatives(self._body.top_logprobs or 0),
            as_ids=self._as_ids,
        ).content


def _with_id(item: dict[str, Any]) -> dict[str, Any]:
    """An input item as lists of items show it: with an id, and with the parts of a message."""
    kind = item.get("type") or "message"
    given = without_nulls(item)
    if kind == "message" and isinstance(given.get("content"), str):
        part = "output_text" if given.get("role") == "assistant" else "input_text"
        given["content"] = [{"type": part, "text": given["content"]}]
    prefix = "msg" if kind == "message" else "item"
    return {"id": f"{prefix}_{uuid4().hex}", "type": kind, **given}


def _empty_response(conversation: _Conversation, request: CheckedRequest) -> wire.ResponseObject:
    """The response before its first token."""
    body, params = conversation.body, request.params[0]
    text, reasoning = body.text, body.reasoning
    form = (
        {"type": "text"}
        if text is None or text.format is None
        else without_nulls(asdict(text.format))
    )
    return wire.ResponseObject(
        id=request.id,
        created_at=request.created,
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        model=request.model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=wire.ReasoningSettings(reasoning.effort if reasoning else None),
        safety_identifier=body.safety_identifier,
        store=conversation.stored,
        temperature=params.temperature,
        text=wire.TextSettings(form, text.verbosity if text else None),
        tool_choice=tool_choice_of(body),
        tools=[{"type": "function", **without_nulls(asdict(tool))} for tool in tools_of(body)],
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        user=body.user,
        metadata=body.metadata or {},
    )
