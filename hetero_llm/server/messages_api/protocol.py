"""The JSON objects of /v1/messages.

Every field of a request may be null, which means that it was not given. Objects whose type decides
about their fields (blocks, tools) are decoded in two steps, so that an unknown type is refused by
its name and not by its fields. What has a `tag` writes it as its field "type".
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

# requests


class InputMessage(msgspec.Struct, kw_only=True):
    role: str | None = None
    content: str | list[Any] | None = None


class Thinking(msgspec.Struct, kw_only=True):
    type: str | None = None
    budget_tokens: int | None = None
    display: str | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    type: str | None = None
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    type: str | None = None
    schema: Any = None


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: OutputFormat | None = None


# large: one field for each parameter of the public API.
class MessagesRequest(msgspec.Struct, kw_only=True):
    """The request of /v1/messages, and of /v1/messages/count_tokens without what generates."""

    model: str | None = None
    messages: list[InputMessage] | None = None
    max_tokens: int | None = None
    system: str | list[Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[Any] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    # vLLM's, with the meaning that they have in a chat.
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    priority: int | None = None
    # Hints and labels that change no token.
    metadata: Any = None
    cache_control: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    service_tier: Any = None
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None
    # Not available.
    mcp_servers: Any = None
    container: Any = None
    thread: Any = None


PASSED_ON = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed",
    "ignore_eos", "min_tokens", "cache_salt", "request_id", "priority", "metadata", "max_tokens",
)  # fmt: skip
"""Fields with the same name and meaning in a chat request."""

UNAVAILABLE = {
    "mcp_servers": "an MCP server",
    "container": "a container",
    "thread": "a conversation that the server keeps",
}
"""Request fields of features that are not available, and what messages call the feature."""


class ImageSource(msgspec.Struct, kw_only=True):
    type: str | None = None
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class InputBlock(msgspec.Struct, kw_only=True):
    """A block of a message's content; its type says which of the fields it has."""

    type: str | None = None
    text: str | None = None
    source: ImageSource | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Any] | None = None


class Tool(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


# responses


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """The signature is empty: nothing checks it when the block is sent back."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(msgspec.Struct):
    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """`input_tokens` are those of the prompt that no cache had."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class MessageObject(msgspec.Struct, tag_field="type", tag="message"):
    """`timeout`: the request's deadline ended the message, not a number of tokens."""

    id: str
    role: str
    model: str
    content: list[Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    timeout: bool | UnsetType = UNSET


class TokenCount(msgspec.Struct):
    input_tokens: int


# events of a stream


class Event(msgspec.Struct, tag_field="type"):
    pass


class MessageStart(Event, tag="message_start"):
    message: MessageObject


class BlockStart(Event, tag="content_block_start"):
    index: int
    content_block: Block


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(Event, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(Event, tag="content_block_stop"):
    index: int


class Stopped(msgspec.Struct):
    stop_reason: str | None
    stop_sequence: str | None
    timeout: bool | UnsetType = UNSET


class MessageDelta(Event, tag="message_delta"):
    delta: Stopped
    usage: MessageUsage


class MessageStop(Event, tag="message_stop"):
    pass


class ErrorDetails(msgspec.Struct):
    type: str
    message: str


class ErrorEvent(Event, tag="error"):
    error: ErrorDetails
