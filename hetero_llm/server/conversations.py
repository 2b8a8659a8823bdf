"""The messages of a conversation: checked, and as a chat template takes them.

Calls of tools and their results are taken as history where the template knows of them; tools
themselves are another matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from hetero_llm.core.errors import shown
from hetero_llm.server.errors import ApiError, invalid, unsupported
from hetero_llm.server.protocol import ContentPart, ImageUrl, Message, ToolCall
from hetero_llm.server.request_parsing import decode_json
from hetero_llm.server.settings import Limits
from hetero_llm.server.templates import ChatTemplate

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image of a conversation: its URI, and where in the request that is."""

    uri: str
    where: str


def checked_messages(
    messages: Sequence[Message] | None,
    limits: Limits,
    template: ChatTemplate,
    images: list[ImagePart] | None = None,
) -> list[dict[str, Any]]:
    """The messages as the template takes them. Their contents are texts, or, for templates with a
    place for images, lists of parts.

    Args:
        images: the conversation's are appended; None if the model takes none.

    Raises:
        ApiError: a message is not one that the model takes, or that this template knows.
    """
    if messages is None:
        raise invalid("messages", "messages is required", "missing_required_parameter")
    if not messages:
        raise invalid("messages", "messages=[]: is empty")
    if len(messages) > limits.messages:
        raise invalid(
            "messages", f"messages: {len(messages)}, at most {limits.messages} are accepted"
        )
    return [
        _checked(message, f"messages[{index}]", limits, template, images)
        for index, message in enumerate(messages)
    ]


def texts_in(value: Any) -> Iterator[str]:
    """Every text in plain data, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from texts_in(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from texts_in(item)


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Plain data with every text changed, names included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [with_texts(item, change) for item in value]
    if isinstance(value, dict):
        return {change(name): with_texts(item, change) for name, item in value.items()}
    return value


def _checked(
    message: Message,
    where: str,
    limits: Limits,
    template: ChatTemplate,
    images: list[ImagePart] | None,
) -> dict[str, Any]:
    role = message.role
    if role is None:
        raise _required(f"{where}.role")
    if role not in ROLES:
        raise invalid(
            f"{where}.role", f"{where}.role={shown(role)}: must be one of {', '.join(ROLES)}"
        )
    if message.function_call is not None:
        raise unsupported(
            f"{where}.function_call", "the old form of tool calls, before tool_calls,"
        )
    if message.audio is not None:
        raise unsupported(f"{where}.audio", "audio")
    # OpenAI's developer messages are what other models call the system's.
    system = role == "developer" and not template.mentions("developer")
    checked: dict[str, Any] = {"role": "system" if system else role}
    if role == "tool":
        checked["tool_call_id"] = _tool_call_id(message, where, template)
    if message.tool_calls:
        checked["tool_calls"] = _tool_calls(message, where, limits, template)
    if images is None:
        checked["content"] = _content(message, where)
    else:
        checked["content"] = _parts(message, where, template, images)
    if message.name is not None:
        checked["name"] = message.name
    thoughts = message.reasoning_content or message.reasoning
    if thoughts is not None:
        checked["reasoning_content"] = thoughts
    return checked


def _content(message: Message, where: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if not content:
        if message.tool_calls:
            return ""
        raise _required(f"{where}.content")
    texts = []
    for index, part in enumerate(content):
        name = f"{where}.content[{index}]"
        if part.type != "text":
            raise invalid(
                name,
                f"{name}: type {shown(part.type)} is not available, only 'text' is",
                "unsupported_parameter",
            )
        texts.append(_text_of(part, name))
    return "\n".join(texts)


def _text_of(part: ContentPart, where: str) -> str:
    if part.text is None:
        raise invalid(where, f"{where}.text is required", "missing_required_parameter")
    return part.text


def _parts(
    message: Message, where: str, template: ChatTemplate, images: list[ImagePart]
) -> str | list[dict[str, str]]:
    """The content for a model that takes images. A template that knows of them goes through lists
    of parts, and may know nothing else; others write texts."""
    content = message.content
    if not template.mentions("image"):
        if isinstance(content, list) and any(part.type == "image_url" for part in content):
            raise unsupported(f"{where}.content", "an image in this model's chat template")
        return _content(message, where)
    if isinstance(content, str) or not content:
        return [{"type": "text", "text": _content(message, where)}]
    parts: list[dict[str, str]] = []
    for index, part in enumerate(content):
        name = f"{where}.content[{index}]"
        if part.type == "image_url":
            images.append(ImagePart(_uri(part, name), f"{name}.image_url"))
            parts.append({"type": "image"})
        elif part.type == "text":
            parts.append({"type": "text", "text": _text_of(part, name)})
        else:
            raise invalid(
                name,
                f"{name}: type {shown(part.type)} is not available, only 'text' and 'image_url' "
                "are",
                "unsupported_parameter",
            )
    return parts


def _uri(part: ContentPart, where: str) -> str:
    given = part.image_url
    uri = given.url if isinstance(given, ImageUrl) else given
    if not uri:
        raise _required(f"{where}.image_url.url")
    return uri


def _tool_call_id(message: Message, where: str, template: ChatTemplate) -> str:
    if not message.tool_call_id:
        raise invalid(
            f"{where}.tool_call_id",
            f"{where}.tool_call_id is required of a tool's message",
            "missing_required_parameter",
        )
    # As 'tool', the role; a template that writes any role as it comes was not made for tools.
    if not template.mentions("tool"):
        raise unsupported(f"{where}.role", "a tool's message in this model's chat template")
    return message.tool_call_id


def _tool_calls(
    message: Message, where: str, limits: Limits, template: ChatTemplate
) -> list[dict[str, Any]]:
    if message.role != "assistant":
        raise invalid(f"{where}.tool_calls", f"{where}.tool_calls: only assistants call tools")
    if not template.mentions("tool_calls"):
        raise unsupported(f"{where}.tool_calls", "a tool call in this model's chat template")
    calls = message.tool_calls or ()
    if len(calls) > limits.tool_calls:
        raise invalid(
            f"{where}.tool_calls",
            f"{where}.tool_calls: {len(calls)}, at most {limits.tool_calls} are accepted",
        )
    return [_tool_call(call, f"{where}.tool_calls[{i}]", limits) for i, call in enumerate(calls)]


def _tool_call(call: ToolCall, where: str, limits: Limits) -> dict[str, Any]:
    if call.type not in (None, "function"):
        raise invalid(f"{where}.type", f"{where}.type={shown(call.type)}: must be 'function'")
    if call.function is None:
        raise _required(f"{where}.function")
    if not call.function.name:
        raise _required(f"{where}.function.name")
    arguments = _arguments(call.function.arguments, f"{where}.function.arguments", limits)
    function = {"name": call.function.name, "arguments": arguments}
    checked: dict[str, Any] = {"type": "function", "function": function}
    if call.id is not None:
        checked["id"] = call.id
    return checked


def _arguments(value: str | dict[str, Any] | None, where: str, limits: Limits) -> dict[str, Any]:
    """OpenAI sends them as JSON in a text; templates want the object."""
    if isinstance(value, dict):
        return value
    if not value or not value.strip():
        return {}
    try:
        return decode_json(value.encode(), dict[str, Any], limits)
    except (msgspec.MsgspecError, RecursionError, ApiError):
        raise invalid(where, f"{where}: must be a JSON object written as a text") from None


def _required(name: str) -> ApiError:
    return invalid(name, f"{name} is required", "missing_required_parameter")
