"""Logits processors of one row, float32 [vocab]; most change it in place. -inf forbids a token."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hetero_llm.core.sampling_params import SamplingParams

NEVER = float("-inf")


class ProcessorError(Exception):
    """A sequence cannot be sampled any further."""


class UserProcessorError(ProcessorError):
    """A user's logits processor raised or returned something that is not logits."""


class GrammarError(ProcessorError):
    """The grammar cannot be followed any further, or other settings forbid what it allows."""


def apply_user_processors(
    logits: torch.Tensor,
    processors: Sequence[Callable[..., Any]],
    prompt_ids: list[int],
    output_ids: list[int],
) -> torch.Tensor:
    """Runs `f(output_ids, logits)`, or `f(prompt_ids, output_ids, logits)` if it takes three. Each
    processor gets lists of its own, which it may change.

    Returns:
        The last processor's logits.

    Raises:
        UserProcessorError: a processor raised, or returned no logits of the same shape.
    """
    shape = logits.shape
    for processor in processors:
        try:
            if takes_prompt(processor):
                logits = processor(list(prompt_ids), list(output_ids), logits)
            else:
                logits = processor(list(output_ids), logits)
        except Exception as error:
            name = getattr(processor, "__name__", type(processor).__name__)
            raise UserProcessorError(
                f"logits processor {name} raised {type(error).__name__}: {error}"
            ) from error
        if not isinstance(logits, torch.Tensor) or logits.shape != shape:
            raise UserProcessorError("a logits processor must return logits of the same shape")
    return logits


def takes_prompt(processor: Callable[..., Any]) -> bool:
    """Whether a user's processor wants the prompt as its first of three arguments."""
    try:
        parameters = inspect.signature(processor).parameters.values()
    except (TypeError, ValueError):  # builtins without a signature
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in parameters) == 3


def forbid_tokens(logits: torch.Tensor, token_ids: Sequence[int]) -> None:
    logits[list(token_ids)] = NEVER


def keep_only(logits: torch.Tensor, token_ids: Sequence[int]) -> None:
    kept = torch.tensor(token_ids, device=logits.device)
    values = logits[kept]
    logits.fill_(NEVER)
    logits[kept] = values


def unpack_mask(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[..., vocab_size] bool, whether each token is allowed.

    Args:
        words: [..., ceil(vocab_size / 32)] int32 token masks: bit `token % 32` of word
            `token // 32` is 1 where the token is allowed.
    """
    bits = torch.arange(32, device=words.device, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> bits) & 1).flatten(-2)[..., :vocab_size].bool()


def keep_allowed(logits: torch.Tensor, mask: NDArray[np.int32]) -> None:
    """Forbids the tokens whose bit is 0.

    Args:
        mask: [ceil(vocab / 32)] int32, bit i of word w stands for token 32 w + i.
    """
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(logits)]
    logits[torch.from_numpy(bits == 0).to(logits.device)] = NEVER


def add_bias(logits: torch.Tensor, bias: dict[int, float]) -> None:
    ids = torch.tensor(list(bias), device=logits.device)
    logits[ids] += torch.tensor(list(bias.values()), device=logits.device)


def forbid_bad_words(
    logits: torch.Tensor, words: Sequence[tuple[int, ...]], output_ids: list[int]
) -> None:
    """Forbids the last token of every word whose other tokens are the end of the output."""
    last = [
        word[-1]
        for word in words
        if len(word) == 1 or tuple(output_ids[-(len(word) - 1) :]) == word[:-1]
    ]
    if last:
        forbid_tokens(logits, last)


def forbid_repeated_ngrams(logits: torch.Tensor, size: int, token_ids: list[int]) -> None:
    """Forbids every token that would complete an n-gram seen before in prompt or output."""
    if len(token_ids) < size:
        return
    prefix = token_ids[len(token_ids) - size + 1 :] if size > 1 else []
    banned = [
        token_ids[i + size - 1]
        for i in range(len(token_ids) - size + 1)
        if token_ids[i : i + size - 1] == prefix
    ]
    if banned:
        forbid_tokens(logits, banned)


def apply_penalties(
    logits: torch.Tensor,
    params: SamplingParams,
    seen: torch.Tensor,
    output_counts: torch.Tensor,
) -> None:
    """Repetition, frequency and presence penalties.

    Args:
        seen: [vocab] bool, whether the token is in the prompt or the output.
        output_counts: [vocab] float32, occurrences in the output.
    """
    if params.repetition_penalty != 1.0:
        factor = params.repetition_penalty
        scaled = torch.where(logits > 0, logits / factor, logits * factor)
        torch.where(seen, scaled, logits, out=logits)
    if params.frequency_penalty:
        logits -= params.frequency_penalty * output_counts
    if params.presence_penalty:
        logits -= params.presence_penalty * (output_counts > 0)


def restrict_support(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """min-p, then top-k, then top-p, on rows already divided by their temperature.

    Args:
        logits: [R, vocab] float32.
        top_k: [R] int64, vocab where off.
        top_p: [R] float32, at least 1 where off.
        min_p: [R] float32, 0 where off.

    Returns:
        Logits with -inf outside the support. Ties at the top-k threshold all stay; top-p keeps
        the smallest set, in order of probability and then of token id, that reaches it.
    """
    highest = logits.max(dim=-1, keepdim=True).values
    logits = logits.masked_fill(logits < highest + torch.log(min_p).unsqueeze(1), NEVER)
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    kth = ordered.gather(1, (top_k - 1).unsqueeze(1))
    outside_k = ordered < kth
    ordered = ordered.masked_fill(outside_k, NEVER)
    probs = ordered.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    outside = outside_k | (before >= top_p.unsqueeze(1))
    outside[:, 0] = False
    return logits.masked_fill(torch.zeros_like(outside).scatter_(1, order, outside), NEVER)
