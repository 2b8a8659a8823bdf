"""Log-probabilities as OpenAI's two APIs show them, and vLLM's form for prompts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from hetero_llm.core.outputs import Logprob, TokenLogprobs
from hetero_llm.server.protocol import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob
from hetero_llm.server.tokenization import ApiTokenizer, TextOffsets, token_label

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot express; vLLM's value."""


class CompletionLogprobWriter:
    """Makes the parallel lists of one choice. Text offsets continue from chunk to chunk.

    Args:
        count: most likely alternatives at each position; the token itself is added if it is none of
            them.
    """

    def __init__(
        self, tokenizer: ApiTokenizer, *, count: int, as_ids: bool, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._count = count
        self._as_ids = as_ids
        self._offsets = TextOffsets(tokenizer, skip_special_tokens=skip_special_tokens)

    def write(
        self,
        token_ids: Iterable[int],
        positions: Iterable[TokenLogprobs | None],
        *,
        into: CompletionLogprobs | None = None,
        shown_in: str | None = None,
    ) -> CompletionLogprobs:
        """Appends these tokens. A position of None is a prompt's first token; `shown_in` is the
        prompt's text."""
        result = CompletionLogprobs([], [], [], []) if into is None else into
        for token_id, position in zip(token_ids, positions, strict=True):
            result.text_offset.append(self._offsets.next(token_id, shown_in))
            result.tokens.append(self._label(token_id))
            if position is None:
                result.token_logprobs.append(None)
                result.top_logprobs.append(None)
                continue
            result.token_logprobs.append(finite(position[token_id].logprob))
            # The token itself, then the most likely ones. Different tokens may look alike: the
            # first one keeps the name.
            tops = {self._label(token_id): finite(position[token_id].logprob)}
            for other, entry in _ranked(position)[: self._count]:
                tops.setdefault(self._label(other), finite(entry.logprob))
            result.top_logprobs.append(tops)
        return result

    def _label(self, token_id: int) -> str:
        label = token_label(self._tokenizer, token_id, as_id=self._as_ids)
        whole = self._as_ids or self._tokenizer.is_whole(token_id)
        return label if whole else f"bytes:{label}"


def chat_logprobs(
    tokenizer: ApiTokenizer,
    token_ids: Iterable[int],
    positions: Iterable[TokenLogprobs],
    *,
    count: int,
    as_ids: bool,
) -> ChatLogprobs:
    """Each token with the `count` most likely alternatives, the likeliest first."""

    def shown(token_id: int, position: TokenLogprobs) -> tuple[str, float, list[int]]:
        label = token_label(tokenizer, token_id, as_id=as_ids)
        return label, finite(position[token_id].logprob), list(tokenizer.token(token_id)[1])

    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        likeliest = _ranked(position)[:count]
        tops = [TopLogprob(*shown(other, position)) for other, _ in likeliest]
        content.append(ChatLogprob(*shown(token_id, position), tops))
    return ChatLogprobs(content)


def prompt_logprobs(
    tokenizer: ApiTokenizer, positions: Sequence[TokenLogprobs | None] | None, *, as_ids: bool
) -> list[Any] | None:
    """vLLM's form: for each prompt token, the token and its alternatives, by token id."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": _decoded(tokenizer, token_id, entry, as_ids),
            }
            for token_id, entry in position.items()
        }
        for position in positions
    ]


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST


def _decoded(tokenizer: ApiTokenizer, token_id: int, entry: Logprob, as_ids: bool) -> str:
    """vLLM shows a part of a character by what it adds to the text."""
    if as_ids or entry.decoded_token is None or tokenizer.is_whole(token_id):
        return token_label(tokenizer, token_id, as_id=as_ids)
    return entry.decoded_token


def _ranked(position: TokenLogprobs) -> list[tuple[int, Logprob]]:
    return sorted(position.items(), key=lambda item: (-item[1].logprob, item[0]))
