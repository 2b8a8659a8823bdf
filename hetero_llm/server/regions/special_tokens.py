"""What a parser has to know about the model's tokens and the prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Start = Literal["content", "reasoning", "header"]
"""The region in which a message begins, which the prompt decides."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What a parser has to know about the model's tokens.

    Attributes:
        marker_ids: the token of each marker of the format that has one.
        dropped: special tokens whose text is left out of messages, by id.
        decode: token ids to text, special tokens included.
    """

    marker_ids: Mapping[str, int]
    dropped: Mapping[int, str]
    decode: Callable[[Sequence[int]], str]


NO_TOKENS = SpecialTokens({}, {}, lambda token_ids: "")
"""Of a model whose markers are plain text."""
