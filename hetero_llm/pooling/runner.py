"""The protocol of the two runners of pooling models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hetero_llm.pooling.input_queue import InputQueue, QueuedInput


@dataclass(frozen=True, slots=True)
class PooledStep:
    """What a step has done.

    Attributes:
        done: inputs with their pooled values [D] float32; `pooler.finish` is still to come.
        num_tokens: tokens that the model has computed, padding left out.
    """

    done: list[tuple[QueuedInput, np.ndarray]]
    num_tokens: int


class PoolingRunner(Protocol):
    """Runs a model over waiting inputs, a batch a step."""

    @property
    def num_running(self) -> int:
        """Inputs that were begun and are not done."""

    def step(self, queue: InputQueue) -> PooledStep:
        """Takes inputs out of the queue, computes a batch and waits for its results."""

    def drop(self, key: str) -> None:
        """Forgets the begun inputs of a request."""
