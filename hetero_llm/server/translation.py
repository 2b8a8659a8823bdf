"""Requests of other APIs in the words of a chat request; `errors.FieldNames` names their fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from hetero_llm.server.errors import ApiError, FieldNames, invalid, wrong
from hetero_llm.server.protocol import ChatRequest, Message, ResponseFormat
from hetero_llm.server.request_parsing import converted

T = TypeVar("T", bound=msgspec.Struct)


@dataclass(slots=True)
class Conversation:
    """The messages of a chat request while they are collected, and where each came from."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def add(self, message: dict[str, Any], where: str) -> str:
        """Appends a message that stands at `where` in the client's request; returns its path."""
        path = f"messages[{len(self.messages)}]"
        self.messages.append(message)
        self.names[path] = where
        return path

    def call(self, call: dict[str, Any], where: str) -> None:
        """Appends a call of a tool, which stands at `where`, to the last message."""
        calls = self.messages[-1].setdefault("tool_calls", [])
        path = f"messages[{len(self.messages) - 1}].tool_calls"
        self.names.setdefault(path, where)
        self.names[f"{path}[{len(calls)}]"] = self.names[f"{path}[{len(calls)}].function"] = where
        calls.append(call)


class _Made(msgspec.Struct, kw_only=True):
    """The fields that translations make; all others have the types of the client's own."""

    messages: list[Message] | None = None
    response_format: ResponseFormat | None = None


_MADE = _Made.__struct_fields__


def chat_request(
    fields: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[ChatRequest, FieldNames]:
    """The chat request of these fields, and what the client calls them; None stands for a field
    that was not given.

    Args:
        fields: with messages and a response format as JSON data, all others as the client's request
            was checked to have them.

    Raises:
        ApiError: a field has the wrong type; the error has the client's name of it.
    """
    client_names = FieldNames(names)
    given = without_nulls(fields)
    with client_names.in_errors():
        made = converted({name: given[name] for name in _MADE if name in given}, _Made)
    if made.messages is not None:
        given["messages"] = made.messages
    if made.response_format is not None:
        given["response_format"] = made.response_format
    return ChatRequest(**given), client_names


def without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def function_tool(
    name: str | None, description: str | None, parameters: Any, *, strict: bool | None
) -> dict[str, Any]:
    """A tool as a chat request declares it."""
    function = {
        "name": name,
        "description": description,
        "parameters": parameters,
        "strict": strict,
    }
    return {"type": "function", "function": without_nulls(function)}


def part_of(value: Any, kind: type[T], where: str) -> T:
    """A JSON object inside of a request as `kind`.

    Raises:
        ApiError: it is none; the error's path begins with `where`.
    """
    if not isinstance(value, dict):
        raise wrong(where, "must be an object", "invalid_type")
    try:
        return converted(value, kind)
    except ApiError as error:
        inner = error.param or ""
        path = f"{where}.{inner}" if inner else where
        message = f"{path}{error.message.removeprefix(inner)}" if inner else error.message
        raise invalid(path, message, error.code) from None
