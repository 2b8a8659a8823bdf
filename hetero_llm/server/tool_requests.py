"""The tools of a request, and which of them the model may or has to call.

The form is OpenAI's chat completions'; endpoints of other APIs translate theirs into it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from hetero_llm.server.errors import ApiError, required, too_many, wrong, wrong_value
from hetero_llm.server.regions.call_readers import declared_schemas
from hetero_llm.server.settings import Limits

Tool = dict[str, Any]
"""{"type": "function", "function": {"name", "description", "parameters", "strict"}}."""

TOOL_NAME = r"[A-Za-z0-9_.\-]{1,64}"
"""The pattern of functions' names."""
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True)
class ToolRequest:
    """Checked tools.

    Attributes:
        tools: as the request sent them.
        choice: "none", "auto", "required" or "named".
        name: of the function that has to be called, if it is "named".
        parallel: one message may hold several calls.
    """

    tools: tuple[Tool, ...] = ()
    choice: str = "none"
    name: str | None = None
    parallel: bool = True

    @cached_property
    def is_on(self) -> bool:
        """Whether the model's calls are parsed."""
        return bool(self.tools) and self.choice != "none"

    @property
    def needs_grammar(self) -> bool:
        """Whether the model is not free in what it writes: it has to call a function, or the
        arguments have to match a schema."""
        return self.is_on and (self.choice != "auto" or any(map(_is_strict, self.tools)))

    @cached_property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The schema of each function's parameters."""
        return declared_schemas(self.tools)


NO_TOOLS = ToolRequest()


def checked_tools(
    tools: Any, tool_choice: Any, limits: Limits, *, parallel: bool | None = None
) -> ToolRequest:
    """Checks the fields `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        ApiError: names the field, with the tool's index.
    """
    checked = _tools(tools, limits)
    choice, name = _choice(tool_choice, checked)
    if not checked:
        return NO_TOOLS
    return ToolRequest(checked, choice, name, parallel is not False)


def _is_strict(tool: Tool) -> bool:
    return tool["function"].get("strict") is True


def _tools(tools: Any, limits: Limits) -> tuple[Tool, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise wrong("tools", "must be a list", "invalid_type")
    if len(tools) > limits.tools:
        raise too_many("tools", len(tools), limits.tools)
    names: dict[str, int] = {}
    for index, tool in enumerate(tools):
        name = _checked_tool(tool, f"tools[{index}]", limits)
        if name in names:
            raise wrong_value(
                f"tools[{index}].function.name", name, f"tools[{names[name]}] has this name"
            )
        names[name] = index
    return tuple(tools)


def _checked_tool(tool: Any, where: str, limits: Limits) -> str:
    """Checks a tool; returns its function's name."""
    if not isinstance(tool, dict):
        raise wrong(where, "must be an object", "invalid_type")
    if tool.get("type") != "function":
        raise wrong_value(f"{where}.type", tool.get("type"), "must be 'function'")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise wrong(f"{where}.function", "must be an object", "invalid_type")
    where += ".function"
    name = function.get("name")
    if not isinstance(name, str) or not re.fullmatch(TOOL_NAME, name):
        raise wrong_value(f"{where}.name", name, "must be 1 to 64 letters, digits, '_', '-' or '.'")
    for field, kind, words in (
        ("description", str, "a text"),
        ("strict", bool, "a boolean"),
        ("parameters", dict, "an object, a JSON schema"),
    ):
        value = function.get(field)
        if value is not None and not isinstance(value, kind):
            raise wrong(f"{where}.{field}", f"must be {words}", "invalid_type")
    _check_schema(function.get("parameters") or {}, f"{where}.parameters")
    size = len(msgspec.json.encode(tool))
    if size > limits.tool_bytes:
        raise too_many(where, f"{size} bytes of JSON", limits.tool_bytes)
    return name


def _check_schema(schema: Mapping[str, Any], where: str) -> None:
    """Checks what a function's parameters have to be: the schema of an object. What a grammar can
    express is checked where a grammar is needed."""
    if schema.get("type", "object") != "object":
        raise wrong_value(f"{where}.type", schema["type"], "must be 'object'")
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise wrong(f"{where}.properties", "must be an object", "invalid_type")
    for name, one in properties.items():
        if not isinstance(one, (dict, bool)):
            field = f"{where}.properties.{name}"
            raise wrong(field, "must be a JSON schema, an object", "invalid_type")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise wrong(f"{where}.required", "must be a list of names", "invalid_type")


def _choice(choice: Any, tools: tuple[Tool, ...]) -> tuple[str, str | None]:
    """The choice and the name of the function, if one is named."""
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        if choice not in _CHOICES:
            raise _no_choice(choice)
        if choice == "required" and not tools:
            raise wrong_value("tool_choice", choice, "needs tools")
        return choice, None
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise _no_choice(choice)
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise required("tool_choice.function.name")
    if name not in (tool["function"]["name"] for tool in tools):
        raise wrong_value("tool_choice.function.name", name, "is none of the tools")
    return "named", name


def _no_choice(choice: Any) -> ApiError:
    return wrong_value(
        "tool_choice",
        choice,
        "must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}",
    )
