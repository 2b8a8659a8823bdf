"""Requests of other APIs in the words of a chat request, and its errors in the words of theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from hetero_llm.core.errors import RequestError
from hetero_llm.server.errors import ApiError, as_api_error, invalid
from hetero_llm.server.protocol import ChatRequest
from hetero_llm.server.request_parsing import converted

T = TypeVar("T", bound=msgspec.Struct)


class FieldNames:
    """What the client calls the fields of the chat request that its own request became.

    Args:
        names: paths such as "messages[2].content" to paths in the client's request. A path that is
            not in it has the name of the longest one that it begins with, and its own rest.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = dict(names)

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Errors of a chat request that are raised inside name the client's fields."""
        try:
            yield
        except (ApiError, RequestError) as error:
            raise self._renamed(as_api_error(error, "")) from None

    def _renamed(self, error: ApiError) -> ApiError:
        param = None if error.param is None else self.of(error.param)
        return ApiError(
            error.status,
            error.code,
            self.of(error.message),
            param=param,
            headers=error.headers,
        )

    def of(self, text: str) -> str:
        """A path, or a message that begins with one, with the client's name for it."""
        end = _path_end(text)
        path = text[:end]
        while path:
            if path in self._names:
                return self._names[path] + text[len(path) :]
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return text


def _path_end(text: str) -> int:
    """How far a text is a path: names, dots and indexes in brackets."""
    end = 0
    while end < len(text) and (text[end].isalnum() or text[end] in "_.[]"):
        end += 1
    return end


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


def chat_request(fields: Mapping[str, Any]) -> ChatRequest:
    """The chat request of these fields; None stands for a field that was not given.

    Raises:
        ApiError: a field has the wrong type; the error names it as a chat request does.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    return converted(given, ChatRequest)


def part_of(value: Any, kind: type[T], where: str) -> T:
    """A JSON object inside of a request as `kind`.

    Raises:
        ApiError: it is none; the error's path begins with `where`.
    """
    if not isinstance(value, dict):
        raise invalid(where, f"{where}: must be an object", "invalid_type")
    try:
        return converted(value, kind)
    except ApiError as error:
        inner = error.param or ""
        path = f"{where}.{inner}" if inner else where
        message = f"{path}{error.message.removeprefix(inner)}" if inner else error.message
        raise invalid(path, message, error.code) from None


def required(where: str) -> ApiError:
    return invalid(where, f"{where} is required", "missing_required_parameter")
