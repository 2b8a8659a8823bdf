"""The inputs that wait for a pooling model, those of all requests together."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from hetero_llm.core.pooling import PoolingInput, PoolingRequest

_WINDOW = 4096
"""Waiting inputs, the oldest first, among which inputs of like length are looked for."""
_LIKE_TOKENS, _LIKE_SHARE = 16, 0.8
"""Inputs of one batch differ by this many tokens at most, or the shortest has this share of the
longest one's: the rest of a batch is padding."""


@dataclass(slots=True)
class RunningRequest:
    """A request and the results of its inputs so far. `left`: inputs without a result."""

    request: PoolingRequest
    left: int
    values: list[np.ndarray | None] = field(default_factory=list)
    scheduled: float = 0.0

    @staticmethod
    def of(request: PoolingRequest) -> RunningRequest:
        count = len(request.inputs)
        return RunningRequest(request, count, [None] * count)


@dataclass(frozen=True, slots=True)
class QueuedInput:
    """Input `index` of a request."""

    owner: RunningRequest
    index: int
    input: PoolingInput

    @property
    def key(self) -> str:
        return self.owner.request.key

    def __len__(self) -> int:
        return len(self.input)


class InputQueue:
    """Inputs in the order of their arrival."""

    def __init__(self) -> None:
        self._waiting: list[QueuedInput] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: RunningRequest) -> None:
        for index, one in enumerate(request.request.inputs):
            self._waiting.append(QueuedInput(request, index, one))

    def remove(self, key: str) -> None:
        """Removes the inputs of a request."""
        self._waiting = [one for one in self._waiting if one.key != key]

    def take_first(self, most: int) -> list[QueuedInput]:
        """Takes the oldest inputs, `most` at most."""
        taken, self._waiting = self._waiting[:most], self._waiting[most:]
        return self._begun(taken)

    def put_back(self, inputs: list[QueuedInput]) -> None:
        """Returns inputs of the last `take_first` that were not begun."""
        self._waiting[:0] = inputs

    def take_alike(self, tokens: int, most: int) -> list[QueuedInput]:
        """Takes the oldest input and others of like length, to be padded to the longest.

        Each batch has the oldest input, so none waits for ever.

        Args:
            tokens: maximum of inputs times the longest one's length; the oldest input is taken
                even if it is longer.
            most: maximum inputs.
        """
        window = self._waiting[:_WINDOW]
        if not window:
            return []
        lengths = np.fromiter(map(len, window), np.int64, len(window))
        order = np.argsort(lengths, kind="stable")
        ordered = lengths[order]
        low = high = int(np.flatnonzero(order == 0)[0])
        while high - low + 1 < most:
            below = ordered[low - 1] if low else None
            above = ordered[high + 1] if high + 1 < len(order) else None
            fits_below = below is not None and _alike(below, ordered[high])
            fits_below &= (high - low + 2) * ordered[high] <= tokens
            fits_above = above is not None and _alike(ordered[low], above)
            fits_above &= above is not None and (high - low + 2) * above <= tokens
            nearer_below = fits_below and (
                not fits_above or ordered[low] - below <= above - ordered[high]
            )
            if nearer_below:
                low -= 1
            elif fits_above:
                high += 1
            else:
                break
        chosen = set(order[low : high + 1].tolist())
        taken = [window[place] for place in sorted(chosen)]
        rest = [one for place, one in enumerate(window) if place not in chosen]
        self._waiting[: len(window)] = rest
        return self._begun(taken)

    @staticmethod
    def _begun(taken: list[QueuedInput]) -> list[QueuedInput]:
        now = time.monotonic()
        for one in taken:
            one.owner.scheduled = one.owner.scheduled or now
        return taken


def _alike(shorter: int, longer: int) -> bool:
    return bool(longer - shorter <= _LIKE_TOKENS or shorter >= _LIKE_SHARE * longer)
