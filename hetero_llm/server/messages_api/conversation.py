"""From a request of /v1/messages to the chat request that it is for the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from hetero_llm.server.messages_api import protocol as wire
from hetero_llm.server.protocol import ChatRequest
from hetero_llm.server.settings import Limits
from hetero_llm.server.templates import ChatTemplate
from hetero_llm.server.translation import Conversation, chat_request, function_tool, part_of

_ROLES = ("user", "assistant", "system")
_THINKING = ("enabled", "disabled", "adaptive", "between_tools")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = {"max": "xhigh"}
"""Anthropic's names of efforts that have another one in a chat."""
_NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "prompt": "messages",
    "tool_choice.function": "tool_choice",
}
_BILLING = "x-anthropic-billing-header:"
"""Begins a block of Claude Code's system prompt that differs in each request and says nothing to
the model. Without it prompts share their prefix."""


def translated(
    body: wire.MessagesRequest, template: ChatTemplate | None, limits: Limits, *, takes_images: bool
) -> tuple[ChatRequest, FieldNames]:
    """The chat request, and what the client calls its fields.

    Args:
        template: the model's, which decides whether the model can be told to think or not.
        takes_images: the model does.

    Raises:
        ApiError: a message, a tool or an option is wrong or not available.
    """
    for name, feature in wire.UNAVAILABLE.items():
        if getattr(body, name) not in (None, False, [], {}):
            raise _not_available(name, feature)
    if body.max_tokens is not None and body.max_tokens < 1:
        raise wrong_value("max_tokens", body.max_tokens, "must be at least 1")
    conversation = _conversation(body, limits, takes_images=takes_images)
    fields: dict[str, Any] = {name: getattr(body, name) for name in wire.PASSED_ON}
    fields |= {
        "messages": conversation.messages,
        "stop": body.stop_sequences,
        "chat_template_kwargs": _template_kwargs(body, template),
    }
    if _is_continued(conversation, f"messages[{len(body.messages or ()) - 1}]"):
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    config = body.output_config
    if config is not None and config.effort is not None:
        fields["reasoning_effort"] = _EFFORTS.get(config.effort, config.effort)
    names = _NAMES | conversation.names
    form, where = (config.format if config else None), "output_config.format"
    if form is None:
        form, where = body.output_format, "output_format"
    if form is not None:
        fields["response_format"] = _response_format(form, where)
        names["response_format"] = names["response_format.json_schema"] = where
    tools = _tools(body.tools or ())
    if tools:
        fields |= {"tools": tools, **_tool_choice(body.tool_choice)}
        for index in range(len(tools)):
            function = f"tools[{index}].function"
            names[function] = f"tools[{index}]"
            names[f"{function}.parameters"] = f"tools[{index}].input_schema"
    elif body.tool_choice is not None and body.tool_choice.type not in ("auto", "none"):
        raise wrong("tool_choice", "needs tools")
    return chat_request(fields, names)


def _not_available(name: str, feature: str) -> ApiError:
    """The refusal of a field. The tool runner of Anthropic's client asks for a thread, and sends
    whole conversations instead if the error has this code."""
    error = unsupported(name, feature)
    if name == "thread":
        error.details = {"error_code": "thread_unsupported_request", "unsupported": [name]}
    return error


# -- messages -------------------------------------------------------------------------------


def _conversation(
    body: wire.MessagesRequest, limits: Limits, *, takes_images: bool
) -> Conversation:
    if body.messages is None:
        raise required("messages")
    if not body.messages:
        raise empty("messages")
    if len(body.messages) > limits.messages:
        raise too_many("messages", len(body.messages), limits.messages)
    reader = _BlockReader(takes_images=takes_images)
    system = _system_text(body.system)
    if system:
        reader.conversation.add({"role": "system", "content": system}, "system")
    for index, message in enumerate(body.messages):
        reader.read(message, f"messages[{index}]")
    return reader.conversation


def _system_text(system: str | list[Any] | None) -> str | None:
    if system is None or isinstance(system, str):
        return system
    texts = []
    for index, value in enumerate(system):
        where = f"system[{index}]"
        block = part_of(value, wire.InputBlock, where)
        if block.type != "text":
            raise _no_such_block(where, block.type, "only 'text' is")
        texts.append(_text(block, where))
    return "\n".join(text for text in texts if not text.startswith(_BILLING))


def _is_continued(conversation: Conversation, where: str) -> bool:
    """Whether the last message, which stands at `where`, is the beginning of the answer."""
    last = conversation.messages[-1]
    if last["role"] != "assistant":
        return False
    if "tool_calls" in last:
        raise wrong(where, "after a 'tool_use' its 'tool_result' has to come")
    if not last["content"]:
        raise wrong(where, "the beginning of an answer needs a text")
    return True


class _BlockReader:
    """Collects the messages of a conversation: a tool's result, a block inside of a user's message
    here, is a message of its own in a chat."""

    def __init__(self, *, takes_images: bool) -> None:
        self.conversation = Conversation()
        self._takes_images = takes_images
        self._calls: set[str] = set()

    def read(self, message: wire.InputMessage, where: str) -> None:
        """Adds a message that stands at `where` in the request."""
        role, content = message.role, message.content
        if role not in _ROLES:
            known = ", ".join(_ROLES)
            raise wrong_value(f"{where}.role", role, f"must be one of {known}")
        if content is None:
            raise required(f"{where}.content")
        if isinstance(content, str):
            self.conversation.add({"role": role, "content": content}, where)
            return
        if not content:
            raise empty(f"{where}.content")
        blocks = [
            (
                part_of(block, wire.InputBlock, f"{where}.content[{index}]"),
                f"{where}.content[{index}]",
            )
            for index, block in enumerate(content)
        ]
        if role == "assistant":
            self._assistant(blocks, where)
        else:
            self._others(role, blocks, where)

    def _assistant(self, blocks: Sequence[tuple[wire.InputBlock, str]], where: str) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        path = self.conversation.add(message, where)
        thoughts: list[str] = []
        parts: list[dict[str, Any]] = []
        for block, name in blocks:
            if block.type == "text":
                self.conversation.names[f"{path}.content[{len(parts)}]"] = name
                parts.append({"type": "text", "text": _text(block, name)})
            elif block.type == "thinking":
                if block.thinking is None:
                    raise required(f"{name}.thinking")
                thoughts.append(block.thinking)
            elif block.type == "tool_use":
                self._call(block, name)
            elif block.type == "redacted_thinking":
                raise unsupported(name, "reading 'redacted_thinking', which is encrypted,")
            else:
                raise _no_such_block(name, block.type, "only 'text', 'thinking' and 'tool_use' are")
        if parts:
            message["content"] = parts
        if any(thoughts):
            message["reasoning_content"] = "\n".join(filter(None, thoughts))

    def _call(self, block: wire.InputBlock, where: str) -> None:
        for field in ("id", "name", "input"):
            if getattr(block, field) in (None, ""):
                raise required(f"{where}.{field}")
        assert block.id is not None
        self._calls.add(block.id)
        function = {"name": block.name, "arguments": block.input}
        self.conversation.call({"id": block.id, "type": "function", "function": function}, where)

    def _others(self, role: str, blocks: Sequence[tuple[wire.InputBlock, str]], where: str) -> None:
        """A message of the user's, or a system message between others."""
        parts: list[tuple[dict[str, Any], str]] = []
        for block, name in blocks:
            if block.type == "tool_result" and role == "user":
                self._say(role, parts, where)
                parts = []
                self._result(block, name)
            else:
                parts.append((self._part(block, name), name))
        self._say(role, parts, where)

    def _result(self, block: wire.InputBlock, where: str) -> None:
        if not block.tool_use_id:
            raise required(f"{where}.tool_use_id")
        if block.tool_use_id not in self._calls:
            raise wrong_value(
                f"{where}.tool_use_id", block.tool_use_id, "no 'tool_use' before it has this id"
            )
        content: Any = block.content
        if isinstance(content, list):
            content = [
                self._part(part_of(value, wire.InputBlock, name), name)
                for index, value in enumerate(content)
                for name in [f"{where}.content[{index}]"]
            ]
        message = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content or ""}
        self.conversation.add(message, where)

    def _part(self, block: wire.InputBlock, where: str) -> dict[str, Any]:
        """A text or an image as a chat request has it."""
        if block.type == "text":
            return {"type": "text", "text": _text(block, where)}
        if block.type != "image":
            raise _no_such_block(where, block.type, "only 'text', 'image' and 'tool_result' are")
        if not self._takes_images:
            raise unsupported(where, "an image for this model")
        return {"type": "image_url", "image_url": {"url": _image_uri(block.source, where)}}

    def _say(self, role: str, parts: Sequence[tuple[dict[str, Any], str]], where: str) -> None:
        if not parts:
            return
        content = [part for part, _ in parts]
        path = self.conversation.add({"role": role, "content": content}, where)
        for index, (_, name) in enumerate(parts):
            self.conversation.names[f"{path}.content[{index}]"] = name


def _text(block: wire.InputBlock, where: str) -> str:
    if block.text is None:
        raise required(f"{where}.text")
    return block.text


def _image_uri(source: wire.ImageSource | None, where: str) -> str:
    if source is None:
        raise required(f"{where}.source")
    wanted = {"base64": ("media_type", "data"), "url": ("url",)}.get(source.type or "")
    if wanted is None:
        raise wrong_value(f"{where}.source.type", source.type, "must be 'base64' or 'url'")
    for field in wanted:
        if not getattr(source, field):
            raise required(f"{where}.source.{field}")
    return source.url or f"data:{source.media_type};base64,{source.data}"


def _no_such_block(where: str, kind: str | None, available: str) -> ApiError:
    if kind is None:
        return required(f"{where}.type")
    return wrong_value(
        f"{where}.type",
        kind,
        f"such blocks are not available here, {available}",
        "unsupported_parameter",
    )


# -- options --------------------------------------------------------------------------------


def _template_kwargs(
    body: wire.MessagesRequest, template: ChatTemplate | None
) -> dict[str, Any] | None:
    """The request's own switches of the template, and those that `thinking` stands for."""
    own = body.chat_template_kwargs
    thinking = body.thinking
    if thinking is None:
        return own
    _check_thinking(thinking)
    if thinking.type not in ("enabled", "disabled") or template is None:
        return own
    switches: dict[str, Any] = {
        name: thinking.type == "enabled"
        for name in ("enable_thinking", "thinking")
        if template.mentions(name)
    }
    if thinking.budget_tokens is not None and template.mentions("thinking_budget"):
        switches["thinking_budget"] = thinking.budget_tokens
    return {**switches, **(own or {})} or None


def _check_thinking(thinking: wire.Thinking) -> None:
    if thinking.type not in _THINKING:
        known = ", ".join(_THINKING)
        raise wrong_value("thinking.type", thinking.type, f"must be one of {known}")
    budget = thinking.budget_tokens
    if budget is not None and budget < 1:
        raise wrong_value("thinking.budget_tokens", budget, "must be at least 1")
    if thinking.display not in (None, "summarized", "omitted"):
        raise wrong_value("thinking.display", thinking.display, "must be 'summarized' or 'omitted'")


def _response_format(form: wire.OutputFormat, where: str) -> dict[str, Any]:
    if form.type != "json_schema":
        raise wrong_value(f"{where}.type", form.type, "must be 'json_schema'")
    if form.schema is None:
        raise required(f"{where}.schema")
    schema = {"name": "answer", "schema": form.schema, "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    found = []
    for index, value in enumerate(tools):
        where = f"tools[{index}]"
        kind = value.get("type") if isinstance(value, dict) else None
        if kind not in (None, "custom"):
            raise wrong_value(
                f"{where}.type",
                kind,
                "Anthropic's own tools are not available, only 'custom' ones are",
                "unsupported_parameter",
            )
        tool = part_of(value, wire.Tool, where)
        if not tool.name:
            raise required(f"{where}.name")
        if tool.input_schema is None:
            raise required(f"{where}.input_schema")
        schema = tool.input_schema
        found.append(function_tool(tool.name, tool.description, schema, strict=tool.strict))
    return found


def _tool_choice(choice: wire.ToolChoice | None) -> dict[str, Any]:
    """The fields of a chat request that a choice among tools becomes."""
    if choice is None:
        return {}
    fields: dict[str, Any] = {}
    if choice.type == "tool":
        if not choice.name:
            raise required("tool_choice.name")
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice.type in _CHOICES:
        fields["tool_choice"] = _CHOICES[choice.type]
    else:
        known = ", ".join((*_CHOICES, "tool"))
        raise wrong_value("tool_choice.type", choice.type, f"must be one of {known}")
    if choice.disable_parallel_tool_use is not None:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields
