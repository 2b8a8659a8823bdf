"""The JSON objects of /v1/responses.

Every field of a request may be null, which means that it was not given. Objects whose type decides
about their fields (items, parts, tools) are decoded in two steps, so that an unknown type is
refused by its name and not by its fields. What has a `tag` writes it as its field "type".
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from hetero_llm.server.protocol import ChatLogprob

# requests


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """`summary` and `generate_summary` have no effect: the reasoning is given in full."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    type: str | None = None
    name: str | None = None
    schema: Any = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True):
    include_obfuscation: bool | None = None


# large: one field for each parameter of the public API.
class ResponsesRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    # vLLM's, with the meaning that they have in a chat.
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, float] | None = None
    structured_outputs: Any = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    priority: int | None = None
    # Hints and labels that change no token.
    user: str | None = None
    service_tier: Any = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    # Not available.
    background: bool | None = None
    background_options: Any = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    access_programs: Any = None
    image: Any = None


PASSED_ON = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "seed", "stop",
    "include_stop_str_in_output", "logit_bias", "structured_outputs", "ignore_eos", "min_tokens",
    "skip_special_tokens", "chat_template_kwargs", "cache_salt", "request_id", "priority", "user",
    "parallel_tool_calls", "metadata",
)  # fmt: skip
"""Fields with the same name and meaning in a chat request."""

UNAVAILABLE = {
    "background": "running in the background",
    "background_options": "running in the background",
    "conversation": "a conversation that the server keeps",
    "prompt": "a prompt that the server keeps",
    "context_management": "shortening of the conversation by the server",
    "moderation": "moderation",
    "access_programs": "an access program",
    "image": "image compression",
}
"""Request fields of features that are not available, and what messages call the feature."""


class InputMessage(msgspec.Struct, kw_only=True):
    role: str | None = None
    content: str | list[Any] | None = None


class InputPart(msgspec.Struct, kw_only=True):
    """A part of a message, of a tool's output or of reasoning."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: str | None = None


class InputCall(msgspec.Struct, kw_only=True):
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class InputCallOutput(msgspec.Struct, kw_only=True):
    call_id: str | None = None
    output: str | list[Any] | None = None


class InputReasoning(msgspec.Struct, kw_only=True):
    content: list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


# responses


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[ChatLogprob]


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: str
    role: str
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    status: str
    summary: list[Any]
    content: list[ReasoningText]
    encrypted_content: None = None


class CallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str


OutputItem = MessageItem | ReasoningItem | CallItem
Part = OutputText | ReasoningText


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """`timeout`: the request's deadline ended it, not a number of tokens."""

    reason: str
    timeout: bool | UnsetType = UNSET


class ReasoningSettings(msgspec.Struct):
    effort: str | None
    summary: str | None = None


class TextSettings(msgspec.Struct):
    format: dict[str, Any]
    verbosity: str | None


# large: one field for each field of the public API.
class ResponseObject(msgspec.Struct, kw_only=True):
    id: str
    object: str = "response"
    created_at: int
    status: str
    background: bool = False
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningSettings
    safety_identifier: str | None
    service_tier: None = None
    store: bool
    temperature: float
    text: TextSettings
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


# events of a stream


class Event(msgspec.Struct, tag_field="type", kw_only=True):
    """`sequence_number`: its place in the stream, set when it is sent."""

    sequence_number: int = 0


class Created(Event, tag="response.created", kw_only=True):
    response: ResponseObject


class InProgress(Event, tag="response.in_progress", kw_only=True):
    response: ResponseObject


class Completed(Event, tag="response.completed", kw_only=True):
    response: ResponseObject


class Incomplete(Event, tag="response.incomplete", kw_only=True):
    response: ResponseObject


class Failed(Event, tag="response.failed", kw_only=True):
    response: ResponseObject


class ErrorEvent(Event, tag="error", kw_only=True):
    """An error before `Created`."""

    code: str
    message: str
    param: str | None


class ItemEvent(Event, kw_only=True):
    output_index: int


class ItemAdded(ItemEvent, tag="response.output_item.added", kw_only=True):
    item: OutputItem


class ItemDone(ItemEvent, tag="response.output_item.done", kw_only=True):
    item: OutputItem


class ItemPartEvent(ItemEvent, kw_only=True):
    item_id: str


class PartEvent(ItemPartEvent, kw_only=True):
    content_index: int = 0


class PartAdded(PartEvent, tag="response.content_part.added", kw_only=True):
    part: Part


class PartDone(PartEvent, tag="response.content_part.done", kw_only=True):
    part: Part


class TextDelta(PartEvent, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: list[ChatLogprob]


class TextDone(PartEvent, tag="response.output_text.done", kw_only=True):
    text: str
    logprobs: list[ChatLogprob]


class ReasoningDelta(PartEvent, tag="response.reasoning_text.delta", kw_only=True):
    delta: str


class ReasoningDone(PartEvent, tag="response.reasoning_text.done", kw_only=True):
    text: str


class ArgumentsDelta(ItemPartEvent, tag="response.function_call_arguments.delta", kw_only=True):
    delta: str


class ArgumentsDone(ItemPartEvent, tag="response.function_call_arguments.done", kw_only=True):
    name: str
    arguments: str


class InputTokens(msgspec.Struct):
    """How many tokens a request would give the model."""

    input_tokens: int
    object: str = "response.input_tokens"


# the store


class ItemList(msgspec.Struct):
    """A page of the items that a response was made from."""

    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class Deleted(msgspec.Struct):
    id: str
    object: str = "response"
    deleted: bool = True
