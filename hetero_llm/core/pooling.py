"""Requests to a pooling model and their results: plain data between front end and engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """The tokens of one input, special tokens included.

    Attributes:
        token_ids: [T] int32.
        types: [T] uint8 segment of each token (1 for the second text of a pair); None: all 0.
    """

    token_ids: np.ndarray
    types: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Finish:
    """What becomes of the pooled values of an input.

    Attributes:
        dimensions: leading entries to keep; 0: all.
        normalize: scale to length 1.
        activation: "sigmoid", "softmax" or "" for none.
    """

    dimensions: int = 0
    normalize: bool = False
    activation: str = ""


@dataclass(frozen=True, slots=True)
class PoolingRequest:
    """Inputs that are answered together. `key` names the request to the engine."""

    key: str
    inputs: Sequence[PoolingInput]
    finish: Finish

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.inputs))


@dataclass(frozen=True, slots=True)
class PoolingResult:
    """A finished request: float32 values [D], one array for each input.

    Attributes:
        scheduled: seconds of the monotonic clock when the first of its inputs was begun.
        error: why the values cannot be used; None: they can.
    """

    key: str
    values: Sequence[np.ndarray]
    scheduled: float
    error: str | None = None
