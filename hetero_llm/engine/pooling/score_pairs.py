"""Which texts a score compares, and scores of embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hetero_llm.core.errors import PromptError
from hetero_llm.core.pooling import PoolingInput
from hetero_llm.pooling.finish import cosine


def pair_up(first: int, second: int, first_name: str, second_name: str) -> list[tuple[int, int]]:
    """Places of the pairs: one text against each of the others, or as many against as many.

    Args:
        first, second: number of texts on each side.

    Raises:
        PromptError: a side is empty, or the numbers do not fit.
    """
    for name, count in ((first_name, first), (second_name, second)):
        if not count:
            raise PromptError(name, [], "is empty")
    if first == 1:
        return [(0, other) for other in range(second)]
    if first != second:
        reason = f"must be {first}, as many as {first_name} has, unless that is one text"
        raise PromptError(second_name, f"{second} texts", reason)
    return [(place, place) for place in range(first)]


def score_of_vectors(
    inputs: Sequence[PoolingInput],
    values: Sequence[np.ndarray],
    pairs: Sequence[tuple[int, int]],
    first: int,
) -> Iterator[tuple[float, list[int]]]:
    """The cosine of each pair, and the tokens of both texts.

    Args:
        inputs, values: the `first` texts of one side, then those of the other.
    """
    for one, other in pairs:
        tokens = [*inputs[one].token_ids.tolist(), *inputs[first + other].token_ids.tolist()]
        yield cosine(values[one], values[first + other]), tokens
