"""The conversations of `LLM.chat` as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hetero_llm.core.errors import RequestError
from hetero_llm.engine.inputs.image_uri import Fetch, chat_images

FORMATS = ("auto", "string", "openai")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts that are texts, and the key of the text."""


def for_template(
    messages: Any, content_format: str, fetch: Fetch | None, *, template: str
) -> tuple[list[dict[str, Any]], tuple[Any, ...]]:
    """A conversation in the one form that the template sees, and its images.

    As over HTTP, arguments of tool calls become objects, a refusal is a text, and "developer" is
    "system" for a template that does not know it.

    Args:
        messages: of `LLM.chat`; contents are strings or lists of parts. None and no content stay
            as they are, since messages with tool calls have none.
        content_format: "string" joins the texts of parts with newlines, "openai" makes each content
            a list of parts; "auto" is "openai" if the model takes images, else "string".
        fetch: gets an image by its URL; None: the model takes no images.
        template: the text of the chat template.

    Raises:
        RequestError: an unknown format, a part that this model does not take, or calls of tools
            that are malformed or have no place in the template.
    """
    if content_format not in FORMATS:
        reason = "must be auto, string or openai"
        raise RequestError("chat_template_content_format", content_format, reason)
    conversation = [_read(one, f"messages[{i}]", template) for i, one in enumerate(messages)]
    if fetch is not None and content_format != "string":
        return chat_images(conversation, fetch)
    changed = []
    for index, message in enumerate(conversation):
        where = f"messages[{index}]"
        content = message.get("content")
        if content is None:
            changed.append(message)
            continue
        texts = [content] if isinstance(content, str) else _texts_of(content, where)
        parts = [{"type": "text", "text": text} for text in texts]
        changed.append(
            {**message, "content": parts if content_format == "openai" else "\n".join(texts)}
        )
    return changed, ()


def check_place_for_tools(tools: Any, template: str) -> None:
    """Raises:
    RequestError: the template would leave tools out, so that the model would not see them.
    """
    if tools and "tools" not in template:
        raise RequestError("tools", tools, "this chat template has no place for tools")


def _read(message: Any, where: str, template: str) -> dict[str, Any]:
    """A message with its role, tool calls and refusal as the template takes them."""
    if not isinstance(message, Mapping):
        raise RequestError(where, message, "must be a dict with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role", role, "is required: a text that is not empty")
    changed = dict(message)
    if role == "developer" and "developer" not in template:
        changed["role"] = "system"
    if message.get("content") is None and isinstance(message.get("refusal"), str):
        changed["content"] = message["refusal"]
    if calls := message.get("tool_calls"):
        where = f"{where}.tool_calls"
        if "tool_calls" not in template:
            raise RequestError(where, calls, "this chat template has no place for calls of tools")
        if not isinstance(calls, (list, tuple)):
            raise RequestError(where, calls, "must be a list of calls")
        changed["tool_calls"] = [_call(one, f"{where}[{i}]") for i, one in enumerate(calls)]
    return changed


def _call(call: Any, where: str) -> dict[str, Any]:
    """A call whose arguments are an object: OpenAI has them as JSON in a text, templates write
    them as JSON themselves."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(where, call, "must be a dict with function, a dict")
    arguments = function.get("arguments")
    if isinstance(arguments, str) or arguments is None:
        try:
            arguments = json.loads(arguments) if arguments and arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        reason = "must be a dict, or a JSON object written as a text"
        raise RequestError(f"{where}.function.arguments", function.get("arguments"), reason)
    return {**call, "function": {**function, "arguments": dict(arguments)}}


def _texts_of(content: Any, where: str) -> list[str]:
    if not isinstance(content, (list, tuple)):
        raise RequestError(where, content, "needs a content of text or of parts")
    texts = []
    for number, part in enumerate(content):
        text = part
        if isinstance(part, Mapping):
            text = part.get(_TEXT_PARTS.get(part.get("type", "text"), ""))
        if not isinstance(text, str):
            reason = "must be a text: other parts are not taken here"
            raise RequestError(f"{where}.content[{number}]", part, reason)
        texts.append(text)
    return texts
