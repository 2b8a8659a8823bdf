"""The forms of a prompt, by vLLM's names; all are plain dictionaries and lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text.

    `multi_modal_data` is {"image": an image or a list of images}; `cache_salt` names a prefix
    cache that only prompts of the same salt share.
    """

    prompt: str
    multi_modal_data: NotRequired[Mapping[str, Any]]
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is the text to show with them."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    cache_salt: NotRequired[str]


PromptType = str | TextPrompt | TokensPrompt | Sequence[int]
