"""What the three APIs of conversations (chat completions, responses, messages) share: from a
`ChatRequest` that has passed `check_generation` to tokenized prompt and parser.

Calls of tools, and their results, are accepted in the messages of a conversation where the chat
template handles them, and so are declarations of tools.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request

from hetero_llm.core.errors import shown
from hetero_llm.core.sampling_params import RequestOutputKind
from hetero_llm.engine.inputs.image_uri import is_data_uri, picture_of_uri
from hetero_llm.engine.inputs.input_processor import Prompt
from hetero_llm.server.context import Context
from hetero_llm.server.errors import (
    ApiError,
    empty,
    invalid,
    required,
    too_many,
    unsupported,
    wrong,
    wrong_value,
)
from hetero_llm.server.message_events import MessageParser, PlainParser
from hetero_llm.server.protocol import (
    ChatRequest,
    ContentPart,
    ImageUrl,
    Message,
    TokenizeRequest,
    ToolCall,
)
from hetero_llm.server.request_parsing import (
    CheckedRequest,
    TokenLimit,
    check_max_tokens,
    checked_request,
    decode_json,
    prompt_cut,
    sampling_params,
)
from hetero_llm.server.settings import Limits, ServerSettings
from hetero_llm.server.templates import ChatTemplate
from hetero_llm.server.tokenization import WHOLE, ApiTokenizer, Cut
from hetero_llm.server.tool_requests import ToolRequest

Conversation = ChatRequest | TokenizeRequest
"""Requests with messages for the chat template."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SAY_SOMETHING = frozenset(("system", "developer", "user", "tool"))
"""Roles whose messages need a content; assistants, and roles of a user's own, may have none."""
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts that are texts, and the field that holds the text."""
MAX_ROLE_CHARS = 64
_MAX_KWARG_CHARS = 256
_TEMPLATE_CONTEXTS = 4
"""A template may write this many characters per token of the context, besides users' texts."""


@dataclass(frozen=True, slots=True)
class CheckedChat:
    """A conversation that is ready for the engine.

    Attributes:
        new_parser: makes the parser of one message that answers it.
    """

    request: CheckedRequest
    new_parser: Callable[[], MessageParser]


async def checked_chat(
    context: Context,
    request: Request,
    body: ChatRequest,
    *,
    prefix: str,
    cut_max_tokens: bool = False,
) -> CheckedChat:
    """Renders and tokenizes the conversation and makes the checks that need its length.

    Args:
        prefix: of the response's id, with what separates it.
        cut_max_tokens: lower the tokens to generate to what the context has room for, instead of
            refusing the request.

    Raises:
        ApiError: the conversation is wrong, or does not fit.
        SamplingError: a field is out of range or contradicts another one.
    """
    tools = context.parsers.requested(body, context.settings.limits)
    wanted, name = _max_tokens(body)
    defaults = context.client.info.default_sampling
    limit = TokenLimit(wanted, defaults.get("max_tokens"), name)
    if cut_max_tokens and wanted is not None:
        limit = TokenLimit(None, wanted)
    params = sampling_params(context, body, limit, defaults=defaults)
    prompt = await conversation_prompt(context, body, tools, cut=prompt_cut(body, params))
    params = context.parsers.constrained(params, tools, prompt)
    params = context.parsers.sampling(params, tools)
    checked = checked_request(context, request, body, [prompt], params, prefix=prefix, limit=limit)
    return CheckedChat(checked, partial(message_parser, context, body, checked, tools))


def message_parser(
    context: Context, body: ChatRequest, checked: CheckedRequest, tools: ToolRequest
) -> MessageParser:
    """A new parser for one message that answers this conversation."""
    return context.parsers.new(
        checked.prompts[0],
        tools,
        checked.params[0],
        skip_special=body.skip_special_tokens is not False,
    )


def read_by_deltas(checked: CheckedRequest, parser: MessageParser) -> CheckedRequest:
    """The request with outputs that come as deltas, also for a whole response: only then is it
    known which tokens are reasoning. A message that is all content needs no deltas, nor does a
    parser that counts them itself."""
    if isinstance(parser, PlainParser) or parser.reasoning_tokens is not None:
        return checked
    kind = RequestOutputKind.DELTA
    return replace(checked, params=[replace(one, output_kind=kind) for one in checked.params])


def _max_tokens(body: ChatRequest) -> tuple[int | None, str]:
    """The limit, and the name of the field that sets it: OpenAI has a new and an old one."""
    old, new = body.max_tokens, body.max_completion_tokens
    check_max_tokens(old, "max_tokens", lowest=1)
    check_max_tokens(new, "max_completion_tokens", lowest=1)
    if old is not None and new is not None and old != new:
        reason = f"contradicts max_completion_tokens={new}; send one"
        raise wrong_value("max_tokens", old, reason)
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


# -- the prompt ------------------------------------------------------------------------------


async def conversation_prompt(
    context: Context, request: Conversation, tools: ToolRequest, *, cut: Cut = WHOLE
) -> Prompt:
    """Renders a conversation with the chat template and tokenizes the result.

    Args:
        tools: checked ones, which the template describes to the model.
        cut: which tokens are kept.

    Raises:
        ApiError: a message is wrong, the template refuses it, or it cannot fit.
    """
    tokenizer, settings = context.tokenizer, context.settings
    tokenizer.require("messages")
    template = tokenizer.chat_template
    if template is None:
        raise wrong(
            "messages",
            "the model has no chat template; use completions, or let the server's operator set one",
        )
    reader = _MessageReader(settings.limits, template, takes_images=tokenizer.images is not None)
    messages: Any = reader.read_all(request.messages)
    if reader.images and cut.count is not None:
        reason = "a conversation with images cannot be cut"
        raise wrong_value("truncate_prompt_tokens", cut.count, reason)
    kwargs = _template_kwargs(request, settings) | _opening_kwargs(request)
    if tools.tools:
        if not template.mentions("tools"):
            raise _no_place("tools", "tools, so the model would not see them")
        kwargs["tools"] = list(tools.tools)
    user_texts: list[str] = []
    for value in (messages, *kwargs.values()):
        add_texts(value, user_texts)
    truncated = cut.count is not None
    size = sum(map(len, user_texts))
    tokenizer.check_length(size, truncated=truncated, param="messages")
    guard = tokenizer.guard(user_texts)
    if guard is not None:
        messages, kwargs = with_texts([messages, kwargs], guard.hide)
    # Enough for the users' texts and for more than a context of the template's own.
    most = size + _TEMPLATE_CONTEXTS * tokenizer.max_model_len
    text = await template.render(messages, kwargs, most_chars=most)
    tokenizer.check_length(len(text), truncated=truncated, param="messages")

    def encode() -> tuple[str, list[int]]:
        ids = tokenizer.encode_rendered(text, guard)
        if request.add_special_tokens:  # besides those that the template has written
            ids = tokenizer.with_special_tokens(ids)
        return guard.restored(text) if guard else text, ids

    text, ids = await tokenizer.threads.run(encode, size=len(text))
    if not ids:
        raise wrong("messages", "the chat template makes no tokens of them")
    if reader.images:
        return await _with_images(Prompt(text, ids), reader.images, tokenizer, settings.limits)
    return Prompt(text, cut.apply(ids))


async def _with_images(
    prompt: Prompt, parts: Sequence[ImagePart], tokenizer: ApiTokenizer, limits: Limits
) -> Prompt:
    """Prepares the images of a prompt and replaces each image token by as many as it needs.

    Raises:
        ApiError: there are too many images, or the template wrote another number of image tokens.
        PromptError: an image cannot be read, or is too large.
    """
    images = tokenizer.images
    assert images is not None
    if len(parts) > images.limit:
        message = f"messages: {len(parts)} images, at most {images.limit} are accepted"
        raise invalid(parts[images.limit].where, message)
    ids = prompt.token_ids or []
    places = ids.count(images.token_id)
    if places != len(parts):
        raise wrong("messages", f"the chat template makes {places} places for {len(parts)} images")

    remote = [part for part in parts if not is_data_uri(part.uri)]
    fetched = await asyncio.gather(
        *(images.fetcher.fetch_beside(one.uri, one.where, limits.image_bytes) for one in remote)
    )
    contents = {part.where: content for part, content in zip(remote, fetched, strict=True)}

    def prepare() -> Prompt:
        pictures = [
            picture_of_uri(
                part.uri,
                part.where,
                most_bytes=limits.image_bytes,
                most_pixels=limits.image_pixels,
                fetch=lambda uri, where, most_bytes: contents[where],
            )
            for part in parts
        ]
        token_ids, prepared = images.prepare(ids, pictures)
        return Prompt(prompt.text, token_ids, prepared=prepared)

    return await tokenizer.threads.run_on_images(prepare)


def _template_kwargs(request: Conversation, settings: ServerSettings) -> dict[str, Any]:
    kwargs = dict(request.chat_template_kwargs or {})
    for name, value in kwargs.items():
        if name not in settings.chat_template_kwargs:
            known = ", ".join(settings.chat_template_kwargs) or "none"
            raise wrong(
                "chat_template_kwargs",
                f"{shown(name)} cannot be set by a request; allowed: {known}",
            )
        short = not isinstance(value, str) or len(value) <= _MAX_KWARG_CHARS
        if not (isinstance(value, (bool, int, float, str)) and short):
            raise wrong(
                "chat_template_kwargs",
                f"{name} must be a number, a boolean or a text of at most {_MAX_KWARG_CHARS} "
                "characters",
            )
    effort = request.reasoning_effort
    if effort is not None:
        if effort not in EFFORTS:
            raise wrong_value("reasoning_effort", effort, f"must be one of {', '.join(EFFORTS)}")
        kwargs["reasoning_effort"] = effort
    return kwargs


def _opening_kwargs(request: Conversation) -> dict[str, bool]:
    """The template's switches: the model writes a new message, or continues the last one."""
    continued = bool(request.continue_final_message)
    opened = request.add_generation_prompt
    opened = not continued if opened is None else opened
    if continued and opened:
        raise wrong(
            "continue_final_message", "contradicts add_generation_prompt, which opens a new message"
        )
    return {"add_generation_prompt": opened, "continue_final_message": continued}


# -- messages -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ImagePart:
    """The URI of an image of a conversation, and the path of its field in the request."""

    uri: str
    where: str


def add_texts(value: Any, to: list[str]) -> None:
    """Appends every string in JSON data, names included."""
    if isinstance(value, str):
        to.append(value)
    elif isinstance(value, list):
        for item in value:
            add_texts(item, to)
    elif isinstance(value, dict):
        for name, item in value.items():
            to.append(name)
            add_texts(item, to)


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of JSON data with every string changed, names included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [with_texts(item, change) for item in value]
    if isinstance(value, dict):
        return {change(name): with_texts(item, change) for name, item in value.items()}
    return value


class _MessageReader:
    """Checks the messages of a conversation and converts them into what a template takes: contents
    are texts, or lists of parts for templates that handle images.

    Attributes:
        images: of the messages that were read.
    """

    def __init__(self, limits: Limits, template: ChatTemplate, *, takes_images: bool) -> None:
        self._limits = limits
        self._template = template
        self._takes_images = takes_images
        self.images: list[ImagePart] = []

    def read_all(self, messages: Sequence[Message] | None) -> list[dict[str, Any]]:
        """The messages as the template takes them.

        Raises:
            ApiError: one is malformed, or has a part that model or template cannot handle.
        """
        if messages is None:
            raise required("messages")
        if not messages:
            raise empty("messages")
        if len(messages) > self._limits.messages:
            raise too_many("messages", len(messages), self._limits.messages)
        return [self._read(one, f"messages[{index}]") for index, one in enumerate(messages)]

    def _read(self, message: Message, where: str) -> dict[str, Any]:
        role = message.role
        if not role:
            raise required(f"{where}.role")
        if len(role) > MAX_ROLE_CHARS:
            raise too_many(f"{where}.role", f"{len(role)} characters", MAX_ROLE_CHARS)
        if message.function_call is not None:
            old = "the old form of tool calls, before tool_calls,"
            raise unsupported(f"{where}.function_call", old)
        if message.audio is not None:
            raise unsupported(f"{where}.audio", "audio")
        # OpenAI's developer messages are what other models call the system's.
        system = role == "developer" and not self._template.mentions("developer")
        checked: dict[str, Any] = {"role": "system" if system else role}
        if role == "tool":
            checked["tool_call_id"] = self._tool_call_id(message, where)
        if message.tool_calls:
            checked["tool_calls"] = self._tool_calls(message, message.tool_calls, where)
        checked["content"] = self._content(message, where)
        if message.name is not None:
            checked["name"] = message.name
        thoughts = message.reasoning_content or message.reasoning
        if thoughts is not None:
            checked["reasoning_content"] = thoughts
        return checked

    def _content(self, message: Message, where: str) -> str | list[dict[str, str]]:
        """The content. A template that handles images iterates over parts, maybe over nothing else,
        so it gets lists from a model that takes images; other templates get texts."""
        content = message.content
        parts = content if isinstance(content, list) else []
        if not self._takes_images:
            return _plain_content(message, where)
        if not self._template.mentions("image"):
            if any(map(_is_image, parts)):
                raise _no_place(f"{where}.content", "images")
            return _plain_content(message, where)
        if not parts:
            return [{"type": "text", "text": _plain_content(message, where)}]
        found: list[dict[str, str]] = []
        for index, part in enumerate(parts):
            name = f"{where}.content[{index}]"
            if _is_image(part):
                self.images.append(ImagePart(_uri(part, name), f"{name}.image_url"))
                found.append({"type": "image"})
            else:
                text = _text_of(part, name, "only 'text' and 'image_url' are")
                found.append({"type": "text", "text": text})
        return found

    def _tool_call_id(self, message: Message, where: str) -> str:
        if not message.tool_call_id:
            name = f"{where}.tool_call_id"
            text = f"{name} is required of a tool's message"
            raise invalid(name, text, "missing_required_parameter")
        # The role 'tool': a template that writes any role unchanged was not made for tools.
        if not self._template.mentions("tool"):
            raise _no_place(f"{where}.role", "messages of tools")
        return message.tool_call_id

    def _tool_calls(
        self, message: Message, calls: Sequence[ToolCall], where: str
    ) -> list[dict[str, Any]]:
        where, most = f"{where}.tool_calls", self._limits.tool_calls
        if message.role != "assistant":
            raise wrong(where, "only assistants call tools")
        if not self._template.mentions("tool_calls"):
            raise _no_place(where, "calls of tools")
        if len(calls) > most:
            raise too_many(where, len(calls), most)
        return [self._tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]

    def _tool_call(self, call: ToolCall, where: str) -> dict[str, Any]:
        if call.type not in (None, "function"):
            raise wrong_value(f"{where}.type", call.type, "must be 'function'")
        if call.function is None:
            raise required(f"{where}.function")
        if not call.function.name:
            raise required(f"{where}.function.name")
        arguments = self._arguments(call.function.arguments, f"{where}.function.arguments")
        function = {"name": call.function.name, "arguments": arguments}
        checked: dict[str, Any] = {"type": "function", "function": function}
        if call.id is not None:
            checked["id"] = call.id
        return checked

    def _arguments(self, value: str | dict[str, Any] | None, where: str) -> dict[str, Any]:
        """The object: OpenAI sends it as JSON in a text, templates take it as an object."""
        if isinstance(value, dict):
            return value
        if not value or not value.strip():
            return {}
        try:
            return decode_json(value.encode(), dict[str, Any], self._limits)
        except (msgspec.MsgspecError, RecursionError, ApiError):
            raise wrong(where, "must be a JSON object written as a text") from None


def _plain_content(message: Message, where: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content:
        texts = [
            _text_of(part, f"{where}.content[{index}]", "only 'text' is")
            for index, part in enumerate(content)
        ]
        return "\n".join(texts)
    if message.role in _SAY_SOMETHING:
        raise required(f"{where}.content")
    return message.refusal or ""


def _text_of(part: ContentPart | str, where: str, available: str) -> str:
    """The text of a part. `available`: which types of parts are, for the error."""
    if isinstance(part, str):
        return part
    field = _TEXT_PARTS.get(part.type or "")
    if field is None:
        reason = f"type {shown(part.type)} is not available, {available}"
        raise wrong(where, reason, "unsupported_parameter")
    text: str | None = getattr(part, field)
    if text is None:
        raise invalid(where, f"{where}.{field} is required", "missing_required_parameter")
    return text


def _no_place(param: str, what: str) -> ApiError:
    """A field that the chat template would leave out."""
    reason = f"this model's chat template has no place for {what}"
    return wrong(param, reason, "unsupported_parameter")


def _is_image(part: ContentPart | str) -> bool:
    return isinstance(part, ContentPart) and part.type == "image_url"


def _uri(part: ContentPart | str, where: str) -> str:
    given = None if isinstance(part, str) else part.image_url
    uri = given.url if isinstance(given, ImageUrl) else given
    if not uri:
        raise required(f"{where}.image_url.url")
    return uri
