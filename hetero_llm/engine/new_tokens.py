"""What the tokens of a step do to their sequence. Part of the scheduler, which alone calls it."""

from __future__ import annotations

from collections.abc import Sequence as Items

from hetero_llm.core.request import Sequence
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
            sequence.cumulative_logprob += entry.drawn
            if sequence.logprobs is not None:
                sequence.logprobs.append(entry)


def drop_tokens(sequence: Sequence, count: int) -> None:
    """Takes the last `count` tokens back, which the last step added, as if never drawn."""
    del sequence.token_ids[-count:]
    if sequence.earlier_sums:
        sequence.cumulative_logprob = sequence.earlier_sums[-count]
        if sequence.logprobs is not None:
            del sequence.logprobs[-count:]
