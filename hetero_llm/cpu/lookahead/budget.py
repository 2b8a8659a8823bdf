"""How many draft nodes a step should hold: as many as make tokens come fastest.

Goodput as in SmartSpec (Liu et al., arXiv 2406.14066) and vLLM's adaptive verification: with B
sequences and nodes of survival s_1 >= s_2 >= ..., a step with the first b nodes yields B + s_1 +
... + s_b tokens and takes T(rows + b) seconds, which is learned from the steps that ran.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_FASTER, _SLOWER = 0.3, 0.1  # weight of a new time below and above the known one
_OUTLIER = 4.0  # times the known one: something else happened
_UNKNOWN_SLOPE = 0.004  # per row, of a step larger than any seen: cheap, so that it is tried
_EDGES = np.array(
    [*range(9), *range(16, 65, 8), *range(80, 129, 16), *range(160, 257, 32), *range(320, 8193, 64)]
)
"""Step sizes that differ: steps between two of them take as long as the larger (a CUDA graph's)."""


class StepCosts:
    """Seconds of steps by their rows, as lately observed."""

    def __init__(self) -> None:
        self._seconds = np.zeros(len(_EDGES))
        self._table: NDArray[np.float64] | None = None

    @property
    def known(self) -> bool:
        return bool(self._seconds.any())

    def observe(self, num_rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        if num_rows > _EDGES[-1]:
            return
        at = int(np.searchsorted(_EDGES, num_rows))
        before = self._seconds[at]
        if before == 0.0:
            self._seconds[at] = seconds
        elif seconds < _OUTLIER * before:
            weight = _FASTER if seconds < before else _SLOWER
            self._seconds[at] = before + weight * (seconds - before)
        self._table = None

    def of(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds of steps of so many rows, each at most the last edge. Larger steps never take
        less; between known sizes they are interpolated."""
        if self._table is None:
            known = np.flatnonzero(self._seconds)
            seconds = np.maximum.accumulate(self._seconds[known])
            table = np.interp(_EDGES, _EDGES[known], seconds)
            beyond = np.maximum(_EDGES - _EDGES[known[-1]], 0)
            self._table = table * (1.0 + _UNKNOWN_SLOPE * beyond)
        return self._table[np.searchsorted(_EDGES, rows)]


def best_count(
    survival: NDArray[np.float32], num_sequences: int, num_rows: int, costs: StepCosts, turn: float
) -> int:
    """How many of the likeliest nodes to verify.

    Args:
        survival: [N] of all nodes, the likeliest first.
        num_sequences: that decode; each yields a token without drafts, too.
        num_rows: of the step without drafts.
        turn: seconds that the device waits for the next drafts after a step with drafts.
    """
    room = int(_EDGES[-1]) - num_rows
    most = min(len(survival), max(room, 0))
    if most == 0 or not costs.known:
        return most
    edges = _EDGES[np.searchsorted(_EDGES, num_rows) :] - num_rows
    counts = np.unique(np.append(edges[(edges > 0) & (edges < most)], most)).astype(np.int64)
    gained = np.cumsum(survival[:most], dtype=np.float64)[counts - 1]
    rate = (num_sequences + gained) / (costs.of(num_rows + counts) + turn)
    best = int(rate.argmax())
    plain = num_sequences / float(costs.of(np.array([num_rows]))[0])
    return int(counts[best]) if rate[best] > plain else 0


def keep_likeliest(
    survival: NDArray[np.float32], counts: NDArray[np.int32], total: int
) -> NDArray[np.int32]:
    """[S] nodes of each draft that are among the `total` likeliest of all.

    Args:
        survival: [S, most] of each draft's nodes, no node likelier than those before it, so that
            the kept ones are each draft's first.
        counts: [S] nodes of each draft.
    """
    held = np.arange(survival.shape[1]) < counts[:, None]
    rows = np.repeat(np.arange(len(counts)), counts)
    order = np.argsort(-survival[held], kind="stable")[:total]
    return np.bincount(rows[order], minlength=len(counts)).astype(np.int32)
