"""What the tokens of a step do to their sequence. Part of the scheduler, which alone calls it."""

from __future__ import annotations

from collections.abc import Sequence as Items

from hetero_llm.core.request import FinishReason, Sequence
from hetero_llm.core.step import SampleLogprobs


def append_tokens(
    sequence: Sequence, token_ids: list[int], logprobs: Items[SampleLogprobs | None] | None
) -> None:
    """Adds drawn tokens, and their log-probabilities if the request wants some."""
    sequence.token_ids.extend(token_ids)
    if logprobs is None:
        return
    sequence.earlier_sums.clear()
    for entry in logprobs:
        if entry is not None:
            sequence.earlier_sums.append(sequence.cumulative_logprob)
            sequence.cumulative_logprob += entry.sampled
            if sequence.logprobs is not None:
                sequence.logprobs.append(entry)


def drop_tokens(sequence: Sequence, count: int) -> None:
    """Takes the last `count` tokens back, which the last step added, as if never drawn."""
    del sequence.token_ids[-count:]
    if sequence.earlier_sums:
        sequence.cumulative_logprob = sequence.earlier_sums[-count]
        if sequence.logprobs is not None:
            del sequence.logprobs[-count:]


def copy_of(parent: Sequence, index: int) -> Sequence:
    """The `index`-th sequence of a request, with all that `parent` has by now, but no slot yet."""
    return Sequence(
        parent.request,
        index,
        parent.token_ids[:],
        parent.num_prompt_tokens,
        num_computed_tokens=parent.num_computed_tokens,
        cumulative_logprob=parent.cumulative_logprob,
        logprobs=None if parent.logprobs is None else list(parent.logprobs),
    )


def end_of(sequence: Sequence, token: int) -> tuple[FinishReason, int | None] | None:
    """Why a sequence is over, if its last token, `token`, or its length says so, and the token that
    a user named for it."""
    request = sequence.request
    length = len(sequence.token_ids)
    if token in request.end_ids and sequence.may_end(length):
        return FinishReason.STOP, None if token in request.eos_ids else token
    if length >= request.max_total_tokens:
        return FinishReason.LENGTH, None
    return None
