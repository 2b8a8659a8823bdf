"""From a request of /v1/responses to the chat request that it is for the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hetero_llm.server.errors import (
    ApiError,
    FieldNames,
    empty,
    required,
    too_many,
    unsupported,
    wrong,
    wrong_value,
)
from hetero_llm.server.protocol import ChatRequest
from hetero_llm.server.responses_api import protocol as wire
from hetero_llm.server.settings import Limits
from hetero_llm.server.translation import (
    Conversation,
    chat_request,
    function_tool,
    part_of,
    without_nulls,
)

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {
    "input_text": "text", "output_text": "text", "text": "text", "reasoning_text": "text",
    "summary_text": "text", "refusal": "refusal",
}  # fmt: skip
"""Types of parts that are texts, and the field that holds the text."""
_CHOICES = ("none", "auto", "required")
_FORMATS = ("text", "json_object", "json_schema")
LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (LOGPROBS, "reasoning.encrypted_content", "message.input_image.image_url")
"""What `include` may ask for. Reasoning is in the response as text, images are in the input items
as they were sent."""
_OF_TOOLS = ("file_search_call.", "web_search_call.", "computer_call_output.",
             "code_interpreter_call.")  # fmt: skip
_MOST_METADATA, _METADATA_NAME, _METADATA_CHARS = 16, 64, 512
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "verbosity": "text.verbosity",
    "logprobs": "top_logprobs",
    "prompt": "input",
    "tool_choice.function": "tool_choice",
}


def check_fields(body: wire.ResponsesRequest, limits: Limits) -> None:
    """Checks those fields that a chat request does not have.

    Raises:
        ApiError: names the field.
    """
    for name, feature in wire.UNAVAILABLE.items():
        if getattr(body, name) not in (None, False, [], {}):
            raise unsupported(name, feature)
    if body.truncation not in (None, "disabled"):
        if body.truncation == "auto":
            raise unsupported("truncation", "leaving out items that do not fit ('auto')")
        raise wrong_value("truncation", body.truncation, "must be 'disabled'")
    if body.stream_options is not None:
        if not body.stream:
            raise wrong("stream_options", "needs stream=true")
        if body.stream_options.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation", "obfuscation of streams")
    for index, name in enumerate(body.include or ()):
        if name.startswith(_OF_TOOLS):
            raise unsupported(f"include[{index}]", f"{name}: a built-in tool")
        if name not in _INCLUDED:
            known = ", ".join(_INCLUDED)
            raise wrong_value(f"include[{index}]", name, f"must be one of {known}")
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise wrong_value("max_output_tokens", body.max_output_tokens, "must be at least 1")
    _check_metadata(body.metadata or {})
    if isinstance(body.input, list) and len(body.input) > limits.messages:
        raise too_many("input", f"{len(body.input)} items", limits.messages)


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > _MOST_METADATA:
        raise too_many("metadata", f"{len(metadata)} entries", _MOST_METADATA)
    for name, value in metadata.items():
        for what, text, most in (("name", name, _METADATA_NAME), ("value", value, _METADATA_CHARS)):
            if len(text) > most:
                raise too_many("metadata", f"a {what} of {len(text)} characters", most)


def new_items(body: wire.ResponsesRequest) -> list[Any]:
    """The input as items; a text is a message of the user's.

    Raises:
        ApiError: there is none.
    """
    if body.input is None:
        raise required("input")
    if not body.input:
        raise empty("input")
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": body.input}]
    return body.input


def translated(
    body: wire.ResponsesRequest, items: Sequence[Any], earlier: Sequence[Any], *, takes_images: bool
) -> tuple[ChatRequest, FieldNames]:
    """The chat request, and what the client calls its fields.

    Args:
        items: see `new_items`.
        earlier: items of the previous response and of its input, which stand before them.
        takes_images: the model does.

    Raises:
        ApiError: an item, a tool or an option is wrong or not available.
    """
    reader = _ItemReader(takes_images=takes_images)
    if body.instructions is not None:
        reader.say("system", body.instructions, "instructions")
    for item in earlier:
        reader.read(item, "previous_response_id")
    for index, item in enumerate(items):
        where = "input" if isinstance(body.input, str) else f"input[{index}]"
        reader.read(item, where)
    reader.close()
    text = body.text.format if body.text else None
    tools = tools_of(body)
    fields: dict[str, Any] = {name: getattr(body, name) for name in wire.PASSED_ON}
    fields |= {
        "messages": reader.conversation.messages,
        "max_completion_tokens": body.max_output_tokens,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "verbosity": body.text.verbosity if body.text else None,
        "response_format": None if text is None else _response_format(text),
    }
    if body.top_logprobs is not None or LOGPROBS in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    names = dict(_NAMES)
    if tools:
        kept, fields["tool_choice"] = _allowed(tools, body.tool_choice)
        fields["tools"] = [
            function_tool(one.name, one.description, one.parameters, strict=one.strict)
            for one in (tools[index] for index in kept)
        ]
        for position, index in enumerate(kept):
            names[f"tools[{position}]"] = names[f"tools[{position}].function"] = f"tools[{index}]"
    elif body.tool_choice not in (None, "none", "auto"):
        raise wrong("tool_choice", "needs tools")
    names |= reader.conversation.names
    return chat_request(fields, names)


def tools_of(body: wire.ResponsesRequest) -> list[wire.FunctionTool]:
    """The declared functions.

    Raises:
        ApiError: a tool is built in, or has no name.
    """
    tools = []
    for index, tool in enumerate(body.tools or ()):
        where = f"tools[{index}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise _no_such_tool(f"{where}.type", kind)
        found = part_of(tool, wire.FunctionTool, where)
        if kind is None:
            raise required(f"{where}.type")
        if not found.name:
            raise required(f"{where}.name")
        tools.append(found)
    return tools


def tool_choice_of(body: wire.ResponsesRequest) -> Any:
    """The choice as the response repeats it."""
    return "auto" if body.tool_choice is None else body.tool_choice


def _allowed(tools: list[wire.FunctionTool], choice: Any) -> tuple[list[int], Any]:
    """The indexes of the tools that the model gets, and the choice among them as a chat request has
    it."""
    all_of_them = list(range(len(tools)))
    if choice is None or (isinstance(choice, str) and choice in _CHOICES):
        return all_of_them, choice
    if not isinstance(choice, dict):
        known = ", ".join(_CHOICES)
        raise wrong_value("tool_choice", choice, f"must be one of {known}, or an object")
    kind = choice.get("type")
    if kind == "function":
        name = _chosen_name(tools, choice.get("name"), "tool_choice.name")
        return all_of_them, {"type": "function", "function": {"name": name}}
    if kind != "allowed_tools":
        raise _no_such_tool("tool_choice.type", kind)
    mode, listed = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise wrong_value("tool_choice.mode", mode, "must be 'auto' or 'required'")
    if not isinstance(listed, list) or not listed:
        raise required("tool_choice.tools")
    allowed = set()
    for index, tool in enumerate(listed):
        where = f"tool_choice.tools[{index}]"
        if not isinstance(tool, dict):
            raise wrong(where, "must be an object", "invalid_type")
        if tool.get("type") != "function":
            raise _no_such_tool(f"{where}.type", tool.get("type"))
        allowed.add(_chosen_name(tools, tool.get("name"), f"{where}.name"))
    return [index for index, tool in enumerate(tools) if tool.name in allowed], mode


def _chosen_name(tools: Sequence[wire.FunctionTool], name: Any, where: str) -> str:
    if not isinstance(name, str):
        raise required(where)
    if all(tool.name != name for tool in tools):
        raise wrong_value(where, name, "is none of the tools")
    return name


def _no_such_tool(where: str, kind: Any) -> ApiError:
    return wrong_value(
        where,
        kind,
        "built-in and MCP tools are not available, only 'function' is",
        "unsupported_parameter",
    )


def _response_format(given: wire.TextFormat) -> dict[str, Any] | None:
    kind = given.type
    if kind not in _FORMATS:
        raise wrong_value("text.format.type", kind, f"must be one of {', '.join(_FORMATS)}")
    if kind != "json_schema":
        return {"type": kind}
    for name in ("name", "schema"):
        if getattr(given, name) is None:
            raise required(f"text.format.{name}")
    schema = without_nulls(msgspec.structs.asdict(given))
    del schema["type"]
    return {"type": kind, "json_schema": schema}


class _ItemReader:
    """Collects the messages of a conversation from its items.

    An assistant's reasoning, its text and its calls are items of their own; what follows each other
    becomes one message.
    """

    def __init__(self, *, takes_images: bool) -> None:
        self.conversation = Conversation()
        self._takes_images = takes_images
        self._assistant: dict[str, Any] | None = None
        self._calls: set[str] = set()

    def read(self, item: Any, where: str) -> None:
        """Adds an item that stands at `where` in the request."""
        if not isinstance(item, dict):
            raise wrong(where, "must be an object", "invalid_type")
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            self._message(part_of(item, wire.InputMessage, where), where)
        elif kind == "function_call":
            self._call(part_of(item, wire.InputCall, where), where)
        elif kind == "function_call_output":
            self._output(part_of(item, wire.InputCallOutput, where), where)
        elif kind == "reasoning":
            self._reasoning(part_of(item, wire.InputReasoning, where), where)
        elif kind is None:
            raise required(f"{where}.type")
        else:
            raise wrong_value(
                f"{where}.type",
                kind,
                "such items are not available, only 'message', 'function_call', "
                "'function_call_output' and 'reasoning' are",
                "unsupported_parameter",
            )

    def say(self, role: str, content: Any, where: str) -> str:
        """Adds a message; returns its path in the chat request."""
        self._assistant = None
        message = {"role": role, "content": content}
        if role == "assistant":
            self._assistant = message
        return self.conversation.add(message, where)

    def close(self) -> None:
        """Ends the conversation."""
        if not self.conversation.messages:
            raise wrong("input", "has no messages")

    def _message(self, message: wire.InputMessage, where: str) -> None:
        role = message.role
        if role not in _ROLES:
            known = ", ".join(_ROLES)
            raise wrong_value(f"{where}.role", role, f"must be one of {known}")
        if message.content is None:
            raise required(f"{where}.content")
        parts = message.content
        content = parts if isinstance(parts, str) else self._parts(parts, f"{where}.content")
        open_one = self._assistant
        if role == "assistant" and open_one is not None and _only_reasoning(open_one):
            open_one["content"] = content
            return
        self.say(role, content, where)

    def _reasoning(self, item: wire.InputReasoning, where: str) -> None:
        parts, name = item.content, "content"
        if not parts:
            parts, name = item.summary, "summary"
        texts = []
        for index, part in enumerate(parts or ()):
            if part.text is None:
                raise required(f"{where}.{name}[{index}].text")
            texts.append(part.text)
        if not texts:
            if item.encrypted_content is not None:
                raise unsupported(
                    f"{where}.encrypted_content", "reading reasoning that another server encrypted"
                )
            return
        if self._assistant is None or not _only_reasoning(self._assistant):
            self.say("assistant", None, where)
        assert self._assistant is not None
        before = self._assistant.get("reasoning_content")
        self._assistant["reasoning_content"] = "\n".join([before, *texts] if before else texts)

    def _call(self, item: wire.InputCall, where: str) -> None:
        for name in ("call_id", "name"):
            if not getattr(item, name):
                raise required(f"{where}.{name}")
        if self._assistant is None:
            self.say("assistant", None, where)
        assert item.call_id is not None
        self._calls.add(item.call_id)
        function = {"name": item.name, "arguments": item.arguments or ""}
        self.conversation.call(
            {"id": item.call_id, "type": "function", "function": function}, where
        )

    def _output(self, item: wire.InputCallOutput, where: str) -> None:
        if not item.call_id:
            raise required(f"{where}.call_id")
        if item.output is None:
            raise required(f"{where}.output")
        if item.call_id not in self._calls:
            raise wrong_value(
                f"{where}.call_id", item.call_id, "no 'function_call' before it has this id"
            )
        output = item.output
        content = output if isinstance(output, str) else self._parts(output, f"{where}.output")
        path = self.say("tool", content, where)
        self.conversation.messages[-1]["tool_call_id"] = item.call_id
        self.conversation.names[f"{path}.content"] = f"{where}.output"

    def _parts(self, parts: Sequence[Any], where: str) -> list[dict[str, Any]]:
        """The parts of a content as a chat request has them, each at the same index."""
        found: list[dict[str, Any]] = []
        for index, value in enumerate(parts):
            name = f"{where}[{index}]"
            part = part_of(value, wire.InputPart, name)
            field = _TEXTS.get(part.type or "")
            if field is not None:
                text = getattr(part, field)
                if text is None:
                    raise required(f"{name}.{field}")
                found.append({"type": "text", "text": text})
            elif part.type == "input_image":
                if not self._takes_images:
                    raise unsupported(name, "an image for this model")
                if part.file_id is not None:
                    raise unsupported(f"{name}.file_id", "a file that the server keeps")
                if not part.image_url:
                    raise required(f"{name}.image_url")
                found.append({"type": "image_url", "image_url": {"url": part.image_url}})
            else:
                raise wrong_value(
                    f"{name}.type",
                    part.type,
                    "such parts are not available, only 'input_text', 'output_text', "
                    "'refusal' and 'input_image' are",
                    "unsupported_parameter",
                )
        return found


def _only_reasoning(message: Mapping[str, Any]) -> bool:
    return message["content"] is None and "tool_calls" not in message
