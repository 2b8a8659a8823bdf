"""How many draft nodes a step should hold: as many as make tokens come fastest.

Goodput as in SmartSpec (Liu et al., arXiv 2406.14066) and vLLM's adaptive verification: with B
sequences and nodes of survival s_1 >= s_2 >= ..., a step with the first b nodes yields B + s_1 +
... + s_b tokens and takes T(rows + b) seconds, which is learned from the steps that ran.
"""

from __future__ import annotations

import numpy as np
from numba import njit
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

    def table(self) -> NDArray[np.float64]:
        """Seconds of steps of each edge's size. Larger steps never take less; between known sizes
        they are interpolated. All 0 as long as nothing is known."""
        return _table(self._seconds, _EDGES)

    def choose(
        self,
        survival: NDArray[np.float32],
        counts: NDArray[np.int32],
        trust: NDArray[np.float32],
        num_rows: int,
        turn: float,
    ) -> NDArray[np.int32]:
        """How many nodes of each draft to verify, its first ones. None of any means that the plain
        step yields tokens faster.

        Args:
            survival: [S, most] estimates of each draft's nodes. Scaled in place, to at most 1, and
                so that no node is likelier than those before it.
            counts: [S] nodes of each draft.
            trust: [S] what to scale the estimates by.
            num_rows: of the step without drafts; each sequence yields a token without them, too.
            turn: seconds that the device waits for the next drafts after a step with drafts.
        """
        kept = np.zeros(len(counts), np.int32)
        _choose(survival, counts, trust, self.table(), _EDGES, num_rows, turn, kept)
        return kept


@njit(cache=True, nogil=True)
def _table(seconds: np.ndarray, edges: np.ndarray) -> np.ndarray:
    table = np.zeros(len(edges))
    last = -1
    for i in range(len(edges)):
        if seconds[i] == 0.0:
            continue
        now = max(seconds[i], table[last]) if last >= 0 else seconds[i]
        for k in range(last + 1, i + 1):
            part = (edges[k] - edges[last]) / (edges[i] - edges[last]) if last >= 0 else 1.0
            before = table[last] if last >= 0 else now
            table[k] = before + part * (now - before)
        last = i
    for k in range(last + 1, len(edges) if last >= 0 else 0):
        table[k] = table[last] * (1.0 + _UNKNOWN_SLOPE * (edges[k] - edges[last]))
    return table


@njit(cache=True, nogil=True)
def _choose(
    survival: np.ndarray,
    counts: np.ndarray,
    trust: np.ndarray,
    table: np.ndarray,
    edges: np.ndarray,
    num_rows: int,
    turn: float,
    kept: np.ndarray,
) -> None:
    """See `StepCosts.choose`; writes `kept`."""
    likeliest = np.empty(counts.sum(), np.float32)
    size = 0
    for row in range(len(counts)):
        least = np.float32(1.0)
        for node in range(counts[row]):
            least = min(least, survival[row, node] * trust[row])
            survival[row, node] = least
            likeliest[size] = least
            size += 1
    likeliest.sort()
    likeliest = likeliest[::-1]
    most = min(size, edges[-1] - num_rows)
    at = np.searchsorted(edges, num_rows)
    best, total = 0.0, most
    if table[-1] > 0.0:
        best, total = len(counts) / table[min(at, len(edges) - 1)], 0
        gained, node = float(len(counts)), 0
        while node < most:
            # All that fits in the same size of step costs the same.
            at = np.searchsorted(edges, num_rows + node + 1)
            end = min(most, edges[at] - num_rows)
            gained += likeliest[node:end].sum()
            node = end
            rate = gained / (table[at] + turn)
            if rate > best:
                best, total = rate, node
    if total <= 0:
        return
    least = likeliest[total - 1]
    ties = total - np.sum(likeliest[:total] > least)
    for row in range(len(counts)):
        for node in range(counts[row]):
            if survival[row, node] > least:
                kept[row] += 1
            elif survival[row, node] == least and ties > 0:
                kept[row] += 1
                ties -= 1
            else:
                break
