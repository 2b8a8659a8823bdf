"""How many draft nodes a step should hold: as many as make tokens come fastest.

Goodput as in SmartSpec (Liu et al., arXiv 2406.14066) and vLLM's adaptive verification: with B
sequences and nodes of path probabilities p_1 >= p_2 >= ..., a step with the first b nodes yields
B + p_1 + ... + p_b tokens and takes T(rows + b) seconds, which is learned from the steps that ran.
To these comes the time that the device idles: a step with drafts can only be made when the tokens
of the one before are known, and one without drafts is launched before (proposal_account.py).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetero_llm.utils.jit import njit

_FASTER, _SLOWER = 0.3, 0.1  # weight of a new time below and above the known one
_OUTLIER = 4.0  # times the known one: something else happened
_UNKNOWN_SLOPE = 0.004  # per row, of a step larger than any seen: cheap, so that it is tried
_COMMON, _OWN = 0.1, 0.4  # of an error: the parts that all sizes and the step's own one take on
_SETTLED = 0.01  # of a size's own correction: the part that all sizes take on whenever it runs
_KEPT = 0.995  # of the other sizes' own corrections, at every step
_KNOWN = 0.1  # how fresh a size's time must be to bound those of its neighbours
_LEAST = 0.5  # of the profile, whatever was observed
GUESSED_GAIN, GUESSED_LOSS = 1.2, 0.95
"""Of a step with and without draft nodes, as long as no step was seen."""
MEMORY = 1000
"""Steps after which the time of a size that did not run again is forgotten, so that a size that was
slow once is tried again."""
MOST_ROWS = 8192
"""Larger steps are neither observed nor planned."""
_EDGES = np.array(
    [*range(9), *range(16, 65, 8), *range(80, 129, 16), *range(160, 257, 32),
     *range(320, MOST_ROWS + 1, 64)]
)  # fmt: skip
"""Step sizes that differ, unless `StepCosts.price` says which: a step between two of them takes as
long as the larger one."""


class StepCosts:
    """Seconds of steps by their rows (tokens): as lately observed, or as measured at start and
    corrected by what is observed.

    A step's time depends on its contexts, too, and these change slowly. So a step that ran says
    something about all sizes: what it took beyond the profile is for one part common to all, and
    for the other its size's own, which is forgotten bit by bit unless the size runs again.

    Attributes:
        edges: sizes that differ, ascending. To be read only.
    """

    def __init__(self) -> None:
        self.edges = _EDGES
        self._profile = np.zeros(len(_EDGES))
        self._forget()

    @staticmethod
    def compile() -> None:
        """Makes both kinds of tables once, so that no step waits for the compiler."""
        costs = StepCosts()
        costs.table()
        costs.price([(1, 1.0)])
        costs.table()

    def _forget(self) -> None:
        self._seconds = np.zeros(len(self.edges))
        self._seen = np.zeros(len(self.edges), np.int64)  # number of the last step of each size
        self._steps = MEMORY
        self._common = 0.0  # seconds beyond the profile
        self._corrections = 0
        self._own = np.zeros(len(self.edges))
        self._fresh = np.zeros(len(self.edges))  # 1 for a size that has just run
        self._table: NDArray[np.float64] | None = None  # of what is known now

    def price(self, profile: list[tuple[int, float]]) -> None:
        """Sets rows and seconds of every size that steps are padded to, ascending. Forgets what was
        observed before."""
        sizes, seconds = (np.array(column) for column in zip(*profile, strict=True))
        largest = sizes[-1]
        beyond = _EDGES[np.searchsorted(_EDGES, largest, "right") :]
        slope = _UNKNOWN_SLOPE * seconds[-1]
        if len(sizes) > 1:  # more rows do not cost less each than those measured last
            slope = max(slope, (seconds[-1] - seconds[-2]) / (largest - sizes[-2]))
        self.edges = np.concatenate([sizes, beyond])
        self._profile = np.concatenate([seconds, seconds[-1] + slope * (beyond - largest)])
        self._forget()

    def observe(self, num_rows: int, seconds: float) -> None:
        """Report a finished step: its rows, none of a prompt, and its duration in seconds."""
        if num_rows > MOST_ROWS:
            return
        self._table = None
        at = int(np.searchsorted(self.edges, num_rows))
        if self._profile[0] > 0.0:
            self._correct(at, seconds)
            return
        self._steps += 1
        before = self._seconds[at]
        if self._steps - self._seen[at] >= MEMORY:
            self._seconds[at] = seconds
        elif seconds < _OUTLIER * before:
            weight = _FASTER if seconds < before else _SLOWER
            self._seconds[at] = before + weight * (seconds - before)
        else:
            return
        self._seen[at] = self._steps

    def _correct(self, at: int, seconds: float) -> None:
        expected = self._profile[at] + self._common + self._own[at]
        # Contexts may be much longer than at any time before, but not from one step to the next.
        error = seconds - expected
        if self._corrections:
            error = min(error, max(expected, self._profile[at]))
        common = max(_COMMON, 1.0 / (1 + self._corrections))
        self._corrections += 1
        own = self._own[at] + (1.0 - common) * _OWN * error
        settled = _SETTLED * own  # what one size shows may be true of all
        own -= settled
        self._common += common * error + settled
        self._own *= _KEPT
        self._fresh *= _KEPT
        self._own[at], self._fresh[at] = own, 1.0

    def table(self) -> NDArray[np.float64]:
        """Seconds of steps of each edge's size. A size that has not run lately takes no less than
        smaller ones that have, and no more than larger ones. All 0 as long as nothing is known."""
        if self._table is None:
            if self._profile[0] > 0.0:
                self._table = _corrected(self._profile, self._common, self._own, self._fresh)
            else:
                known = self._steps - self._seen < MEMORY
                self._table = _table(self._seconds, known, self.edges)
        return self._table

    def of(self, *rows: int) -> list[float]:
        """Seconds of steps of these numbers of rows."""
        return self.table()[np.searchsorted(self.edges, rows)].tolist()


@njit(cache=True, nogil=True)
def _corrected(
    profile: np.ndarray, common: float, own: np.ndarray, fresh: np.ndarray
) -> np.ndarray:
    table = np.maximum(profile + common + own, _LEAST * profile)
    low, high = 0.0, np.inf
    for k in range(len(table)):
        if fresh[k] > _KNOWN:
            low = max(low, table[k])
        else:
            table[k] = max(table[k], low)
    for k in range(len(table) - 1, -1, -1):
        if fresh[k] > _KNOWN:
            high = min(high, table[k])
        else:
            table[k] = min(table[k], high)
    return table


@njit(cache=True, nogil=True)
def _table(seconds: np.ndarray, fresh: np.ndarray, edges: np.ndarray) -> np.ndarray:
    table = np.zeros(len(edges))
    last = -1
    for i in range(len(edges)):
        if not fresh[i]:
            continue
        before = seconds[last] if last >= 0 else seconds[i]
        for k in range(last + 1, i + 1):
            part = (edges[k] - edges[last]) / (edges[i] - edges[last]) if last >= 0 else 1.0
            table[k] = before + part * (seconds[i] - before)
        last = i
    for k in range(last + 1, len(edges) if last >= 0 else 0):
        table[k] = seconds[last] * (1.0 + _UNKNOWN_SLOPE * (edges[k] - edges[last]))
    for k in range(1, len(edges)):
        table[k] = max(table[k], table[k - 1])
    return table


@njit(cache=True, nogil=True)
def choose(
    path_probs: np.ndarray,
    counts: np.ndarray,
    scales: np.ndarray,
    table: np.ndarray,
    edges: np.ndarray,
    num_rows: int,
    idle: float,
    plain_idle: float,
    most_rows: int,
    kept: np.ndarray,
) -> float:
    """How many nodes of each draft to verify, its first ones. None of any means that the step
    yields tokens faster without drafts. Nodes that padding has room for are free.

    Args:
        path_probs: [S, most] path probabilities of each draft's nodes. Scaled in place, and
            lowered so that no node is likelier than those before it.
        counts: [S] nodes of each draft.
        scales: [S] acceptance scale: what to scale the odds of the estimates by.
        table, edges: `StepCosts.table` and its `edges`.
        num_rows: of the step without drafts; each sequence yields a token without them, too.
        idle: seconds that the device idles before a step for which drafts are proposed.
        plain_idle: the same before steps for which none are.
        most_rows: of the step with drafts.
        kept: [S], written.

    Returns:
        Tokens a second of this step over those of a step for which nothing is proposed. The nodes
        kept are best for this step alone, whose device has idled already.
    """
    likeliest = np.empty(counts.sum(), np.float32)
    size = 0
    for row in range(len(counts)):
        least = np.float32(1.0)
        for node in range(counts[row]):
            # Odds are scaled rather than probabilities, which would have to be cut off at 1.
            prob = path_probs[row, node]
            prob *= scales[row] / (np.float32(1.0) + prob * (scales[row] - np.float32(1.0)))
            least = min(least, prob)
            path_probs[row, node] = least
            likeliest[size] = least
            size += 1
    likeliest = _descending(likeliest)
    most = max(min(size, min(edges[-1], most_rows) - num_rows), 0)
    total, gain = most, GUESSED_GAIN if most > 0 else GUESSED_LOSS
    if table[-1] > 0.0:
        plain = table[min(np.searchsorted(edges, num_rows), len(edges) - 1)]
        best, total = len(counts) / (plain + idle), 0
        gained, node = float(len(counts)), 0
        while node < most:
            # All that fits in the same size of step costs the same.
            at = np.searchsorted(edges, num_rows + node + 1)
            end = min(most, edges[at] - num_rows)
            gained += likeliest[node:end].sum()
            node = end
            rate = gained / (table[at] + idle)
            if rate > best:
                best, total = rate, node
        gain = best * (plain + plain_idle) / max(len(counts), 1)
    if total <= 0:
        return gain
    least = likeliest[total - 1]
    ties = total - np.sum(likeliest[:total] > least)
    for row in range(len(counts)):
        for node in range(counts[row]):
            if path_probs[row, node] > least:
                kept[row] += 1
            elif path_probs[row, node] == least and ties > 0:
                kept[row] += 1
                ties -= 1
            else:
                break
    return gain


@njit(cache=True, nogil=True)
def _descending(probs: np.ndarray) -> np.ndarray:
    """[N] float32, none negative, the largest first. A radix sort (Knuth 5.2.5): it has no branch
    to mispredict, and takes a fifth of a quicksort's time for 370 nodes."""
    size = len(probs)
    keys, moved = np.empty(size, np.uint32), np.empty(size, np.uint32)
    starts = np.empty(257, np.int64)
    for i in range(size):  # the bits of such numbers are in their order
        keys[i] = ~probs.view(np.uint32)[i]
    for shift in (0, 8, 16, 24):
        starts[:] = 0
        for i in range(size):
            starts[((keys[i] >> np.uint32(shift)) & np.uint32(255)) + 1] += 1
        for digit in range(256):
            starts[digit + 1] += starts[digit]
        for i in range(size):
            digit = (keys[i] >> np.uint32(shift)) & np.uint32(255)
            moved[starts[digit]] = keys[i]
            starts[digit] += 1
        keys, moved = moved, keys
    for i in range(size):
        keys[i] = ~keys[i]
    return keys.view(np.float32)
