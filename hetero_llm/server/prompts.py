"""The prompts of a request as token ids: a completion's forms, and conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetero_llm.core.errors import shown
from hetero_llm.engine.image_uri import picture_of_uri
from hetero_llm.engine.input_processor import Prompt
from hetero_llm.server.conversations import (
    ImagePart,
    checked_messages,
    texts_in,
    with_texts,
)
from hetero_llm.server.errors import invalid
from hetero_llm.server.protocol import (
    CompletionRequest,
    Conversation,
    refuse_unsupported,
    refused_template,
)
from hetero_llm.server.settings import Limits, ServerSettings
from hetero_llm.server.tokenization import Texts, guard_for, last_tokens, plain_ids

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_MAX_KWARG_CHARS = 256
_TEMPLATE_CONTEXTS = 4
"""A template may write this many characters per token of the context, besides users' texts."""


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
    texts.need("messages")
    template = texts.chat_template
    if template is None:
        raise invalid(
            "messages",
            "messages: the model has no chat template; use completions, or let the server's "
            "operator set one",
        )
    found: list[ImagePart] | None = None if texts.images is None else []
    messages = checked_messages(request.messages, settings.limits, template, found)
    if found and cut is not None:
        raise invalid(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens={cut}: a conversation with images cannot be cut",
        )
    kwargs = _template_kwargs(request, settings) | _openings(request)
    user_texts = [*texts_in(messages), *filter(_is_text, kwargs.values())]
    truncated = cut is not None
    size = sum(map(len, user_texts))
    texts.check_length(size, truncated=truncated, param="messages")
    guard = guard_for(texts.special_tokens, user_texts)
    if guard is not None:
        messages, kwargs = with_texts([messages, kwargs], guard.hide)
    # What users wrote may be there once, and as much again as no context holds.
    most = size + _TEMPLATE_CONTEXTS * texts.max_model_len
    text = await template.render(messages, kwargs, most_chars=most)
    texts.check_length(len(text), truncated=truncated, param="messages")

    def encode() -> tuple[str, list[int]]:
        ids = texts.encode_rendered(text, guard)
        if add_special_tokens:
            ids = texts.with_special_tokens(ids)
        return guard.restored(text) if guard else text, ids

    text, ids = await texts.in_thread(encode, size=len(text))
    if not ids:
        raise invalid("messages", "messages: the chat template makes no tokens of them")
    if found:
        return await _with_images(Prompt(text, ids), found, texts, settings.limits)
    return Prompt(text, last_tokens(ids, cut))


async def _with_images(
    prompt: Prompt, parts: Sequence[ImagePart], texts: Texts, limits: Limits
) -> Prompt:
    """The prompt with its images prepared, and with all their tokens.

    Raises:
        ApiError: there are too many images, or not one place for each.
        PromptError: an image is none, or too large.
    """
    images = texts.images
    assert images is not None
    if len(parts) > images.limit:
        raise invalid(
            parts[images.limit].where,
            f"messages: {len(parts)} images, at most {images.limit} are accepted",
        )
    ids = prompt.token_ids or []
    places = ids.count(images.token_id)
    if places != len(parts):
        raise invalid(
            "messages",
            f"messages: the chat template makes {places} places for {len(parts)} images",
        )

    def prepare() -> Prompt:
        pictures = [
            picture_of_uri(
                part.uri,
                part.where,
                most_bytes=limits.image_bytes,
                most_pixels=limits.image_pixels,
            )
            for part in parts
        ]
        token_ids, prepared = images.prepare(ids, pictures)
        return Prompt(prompt.text, token_ids, prepared=prepared)

    return await texts.in_image_thread(prepare)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


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
        if effort not in EFFORTS:
            raise invalid(
                "reasoning_effort",
                f"reasoning_effort={shown(effort)}: must be one of {', '.join(EFFORTS)}",
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
