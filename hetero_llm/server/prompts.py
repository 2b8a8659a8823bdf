"""The prompts of a request as token ids: a completion's forms, and conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetero_llm.core.errors import shown
from hetero_llm.engine.input_processor import Prompt
from hetero_llm.server.errors import invalid, without_paths
from hetero_llm.server.protocol import (
    CompletionRequest,
    Conversation,
    Message,
    refuse_unsupported,
    refused_template,
)
from hetero_llm.server.settings import Limits, ServerSettings
from hetero_llm.server.texts import SpecialGuard, Texts, guard_for, last_tokens, plain_ids

_ROLES = ("system", "developer", "user", "assistant", "tool")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_MAX_KWARG_CHARS = 256


# completions


def parse_prompts(value: Any, limits: Limits) -> list[str | list[int]]:
    """A text, token ids, or a list of either.

    Raises:
        ApiError: anything else, an empty list, or too many.
    """
    if value is None:
        raise invalid("prompt", "prompt is required", "missing_required_parameter")
    if isinstance(value, str):
        return [value]
    if not value:
        raise invalid("prompt", "prompt=[]: is empty")
    if type(value[0]) is int:
        _check_ids(value, "prompt")
        return [value]
    if len(value) > limits.prompts:
        raise invalid("prompt", f"prompt: {len(value)} prompts, at most {limits.prompts} a request")
    for index, item in enumerate(value):
        if isinstance(item, list):
            if not item:
                raise invalid("prompt", f"prompt[{index}]=[]: is empty")
            _check_ids(item, f"prompt[{index}]")
        elif not isinstance(item, str):
            raise invalid(
                "prompt",
                f"prompt[{index}]={shown(item)}: must be a text or a list of token ids",
                "invalid_type",
            )
    return value


def _check_ids(ids: list[Any], where: str) -> None:
    if plain_ids(ids):
        return
    wrong = next(item for item in ids if type(item) is not int)
    raise invalid(
        "prompt", f"{where}: holds {shown(wrong)}; token ids are integers", "invalid_type"
    )


async def completion_prompts(
    request: CompletionRequest, parsed: Sequence[str | list[int]], texts: Texts
) -> list[Prompt]:
    """Parsed prompts with their token ids, cut as the request wants.

    Raises:
        ApiError: a text is empty, or cannot fit.
    """
    cut = request.truncate_prompt_tokens
    special = request.add_special_tokens is not False
    prompts = []
    for item in parsed:
        if not isinstance(item, str):
            prompts.append(Prompt(None, last_tokens(item, cut)))
            continue
        ids = await texts.encode(item, add_special_tokens=special, truncated=cut is not None)
        kept = last_tokens(ids, cut)
        prompts.append(Prompt(item if len(kept) == len(ids) else None, kept))
    return prompts


# conversations


async def chat_prompt(
    request: Conversation,
    texts: Texts,
    settings: ServerSettings,
    *,
    add_special_tokens: bool = False,
    cut: int | None = None,
) -> Prompt:
    """The conversation as the chat template writes it, and its token ids.

    Args:
        add_special_tokens: add those that the template should already have written.
        cut: keep only this many last tokens.

    Raises:
        ApiError: a message is wrong, the template refuses it, or it cannot fit.
    """
    refuse_unsupported(request)
    if request.chat_template is not None:
        raise refused_template()
    hf = texts.need("messages").hf
    template = settings.chat_template or getattr(hf, "chat_template", None)
    if not template:
        raise invalid(
            "messages",
            "messages: the model has no chat template; use completions, or let the server's "
            "operator set one",
        )
    messages = checked_messages(request.messages, settings.limits)
    kwargs = _template_kwargs(request, settings) | _openings(request)
    user_texts = [text for message in messages for text in message.values()]
    user_texts += [value for value in kwargs.values() if isinstance(value, str)]
    truncated = cut is not None
    size = sum(map(len, user_texts))
    texts.check_length(size, truncated=truncated, param="messages")
    knows_developer = "developer" in str(template)

    def render_and_encode() -> tuple[str, list[int]]:
        guard = guard_for(texts.special_tokens, user_texts)
        hidden = [_for_template(message, guard, knows_developer) for message in messages]
        text = _rendered(hf, hidden, settings.chat_template, _hidden_kwargs(kwargs, guard))
        texts.check_length(len(text), truncated=truncated, param="messages")
        ids = texts.encode_rendered(text, guard)
        if add_special_tokens:
            ids = texts.with_special_tokens(ids)
        return guard.restored(text) if guard else text, ids

    text, ids = await texts.in_thread(render_and_encode, size=size)
    if not ids:
        raise invalid("messages", "messages: the chat template makes no tokens of them")
    return Prompt(text, last_tokens(ids, cut))


def checked_messages(messages: Sequence[Message] | None, limits: Limits) -> list[dict[str, str]]:
    """Role, content as one text, and name of each message.

    Raises:
        ApiError: a message is not one that text models take.
    """
    if messages is None:
        raise invalid("messages", "messages is required", "missing_required_parameter")
    if not messages:
        raise invalid("messages", "messages=[]: is empty")
    if len(messages) > limits.messages:
        raise invalid(
            "messages", f"messages: {len(messages)}, at most {limits.messages} are accepted"
        )
    return [_checked(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _checked(message: Message, where: str) -> dict[str, str]:
    role = message.role
    if role is None:
        raise invalid(f"{where}.role", f"{where}.role is required", "missing_required_parameter")
    if role not in _ROLES:
        raise invalid(
            f"{where}.role", f"{where}.role={shown(role)}: must be one of {', '.join(_ROLES)}"
        )
    if role == "tool" and not message.tool_call_id:
        raise invalid(
            f"{where}.tool_call_id",
            f"{where}.tool_call_id is required of a tool's message",
            "missing_required_parameter",
        )
    if role == "tool" or message.tool_calls or message.function_call:
        raise invalid(
            f"{where}.role" if role == "tool" else f"{where}.tool_calls",
            f"{where}: tool calling is not available",
            "unsupported_parameter",
        )
    checked = {"role": role, "content": _content(message, where)}
    if message.name is not None:
        checked["name"] = message.name
    return checked


def _content(message: Message, where: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if not content:
        raise invalid(
            f"{where}.content", f"{where}.content is required", "missing_required_parameter"
        )
    for index, part in enumerate(content):
        name = f"{where}.content[{index}]"
        if part.type != "text":
            raise invalid(
                name,
                f"{name}: type {shown(part.type)} is not available, only 'text' is",
                "unsupported_parameter",
            )
        if part.text is None:
            raise invalid(name, f"{name}.text is required", "missing_required_parameter")
    return "\n".join(part.text or "" for part in content)


def _template_kwargs(request: Conversation, settings: ServerSettings) -> dict[str, Any]:
    kwargs = dict(request.chat_template_kwargs or {})
    for name, value in kwargs.items():
        if name not in settings.chat_template_kwargs:
            known = ", ".join(settings.chat_template_kwargs) or "none"
            raise invalid(
                "chat_template_kwargs",
                f"chat_template_kwargs: {shown(name)} cannot be set by a request; allowed: {known}",
            )
        short = not isinstance(value, str) or len(value) <= _MAX_KWARG_CHARS
        if not (isinstance(value, (bool, int, float, str)) and short):
            raise invalid(
                "chat_template_kwargs",
                f"chat_template_kwargs: {name} must be a number, a boolean or a text of at most "
                f"{_MAX_KWARG_CHARS} characters",
            )
    effort = request.reasoning_effort
    if effort is not None:
        if effort not in _EFFORTS:
            raise invalid(
                "reasoning_effort",
                f"reasoning_effort={shown(effort)}: must be one of {', '.join(_EFFORTS)}",
            )
        kwargs["reasoning_effort"] = effort
    return kwargs


def _openings(request: Conversation) -> dict[str, bool]:
    """Whether the answer is a new message, or goes on with the last one."""
    continued = bool(request.continue_final_message)
    opened = request.add_generation_prompt
    opened = not continued if opened is None else opened
    if continued and opened:
        raise invalid(
            "continue_final_message",
            "continue_final_message: contradicts add_generation_prompt, which opens a new message",
        )
    return {"add_generation_prompt": opened, "continue_final_message": continued}


def _for_template(
    message: Mapping[str, str], guard: SpecialGuard | None, knows_developer: bool
) -> dict[str, str]:
    """OpenAI's developer messages are what other models call the system's."""
    result = dict(message)
    if result["role"] == "developer" and not knows_developer:
        result["role"] = "system"
    return {name: guard.hide(text) for name, text in result.items()} if guard else result


def _hidden_kwargs(kwargs: Mapping[str, Any], guard: SpecialGuard | None) -> dict[str, Any]:
    if guard is None:
        return dict(kwargs)
    return {
        name: guard.hide(value) if isinstance(value, str) else value
        for name, value in kwargs.items()
    }


def _rendered(
    hf: Any, messages: list[dict[str, str]], template: str | None, kwargs: Mapping[str, Any]
) -> str:
    """transformers renders in a sandbox that can change nothing."""
    try:
        text = hf.apply_chat_template(messages, chat_template=template, tokenize=False, **kwargs)
    except Exception as error:
        reason = without_paths(str(error)) or type(error).__name__
        raise invalid("messages", f"messages: the chat template refuses them: {reason}") from error
    assert isinstance(text, str)
    return text
