"""How many draft nodes a step should hold: as many as make tokens come fastest.

Goodput as in SmartSpec (Liu et al., arXiv 2406.14066) and vLLM's adaptive verification: with B
sequences and nodes of path probabilities p_1 >= p_2 >= ..., a step with the first b nodes yields
B + p_1 + ... + p_b tokens and takes T(rows + b) seconds, which `core.step_times` predicts.
To these comes the time that the device idles: a step with drafts can only be made when the tokens
of the one before are known, and one without drafts is launched before (proposal_account.py).

Goodput alone would let one sequence's accepted drafts pay for the time of all others. So what
drafts gain is reported less what those sequences lose that accept none (`net_gain`): where the gain
is small or is one sequence's alone, the drafter pauses. Without that a batch of 8 whose drafts are
right in 0.2 of cases took 7% longer to its last token than without drafts.
"""

from __future__ import annotations

import numpy as np

from hetero_llm.core.step_times import StepTimes, extend_profile
from hetero_llm.utils.jit import njit

_ADDED = 0.75
"""On a GPU contexts, which no report tells, lengthen all verify steps alike; a slower machine does
not. On a CPU each node reads the context anew, and other programs take a share of all its time."""
_UNKNOWN_GROWTH = 0.004
"""Per token of a step larger than any measured: cheap, so that it is tried."""
GUESSED_GAIN, GUESSED_LOSS = 1.2, 0.95
"""Of a step with and without draft nodes, as long as no step was seen."""
MEMORY = 1000
"""Steps after which the time of a size that did not run again is forgotten where nothing was
measured, so that a size that was slow once is tried again."""
MOST_ROWS = 8192
"""Larger steps are neither observed nor planned."""
_SIZES = (
    *range(1, 9), *range(16, 65, 8), *range(80, 129, 16), *range(160, 257, 32),
    *range(320, MOST_ROWS + 1, 64),
)  # fmt: skip
"""Step sizes that differ, unless a profile says which."""


def verify_times(
    profile: list[tuple[int, float]] | None = None, *, multiplies: bool = False
) -> StepTimes:
    """The predictor of verify steps, which takes steps as padded to the sizes.

    Args:
        profile: (tokens, seconds) of every size that steps are padded to, ascending; None: nothing
            was measured.
        multiplies: whether steps that take longer than predicted do so in proportion to their time.
    """
    added = 0.0 if multiplies else _ADDED
    if not profile:
        return StepTimes(_SIZES, padded=True, added=added, growth=_UNKNOWN_GROWTH, memory=MEMORY)
    sizes, seconds = zip(*profile, strict=True)
    return StepTimes(
        *extend_profile(sizes, seconds, _SIZES, _UNKNOWN_GROWTH), padded=True, added=added
    )


def net_gain(gain: float, slowdown: float, num_sequences: int, accepting: float) -> float:
    """What a step's drafts are worth.

    Args:
        gain: tokens a second of the step over those of one without drafts.
        slowdown: its seconds over those of one without, idle time included in both.
        num_sequences: of the step. Drafts of a single one delay no other.
        accepting: how many of them will accept a node, as estimated. Where all do, no sequence
            waits for the others' drafts, however long the step takes.
    """
    if num_sequences <= 1:
        return gain
    delayed = max(1.0 - accepting / num_sequences, 0.0)
    return gain - delayed * max(slowdown - 1.0, 0.0)


_net_gain = njit(cache=True, nogil=True)(net_gain)
"""For `choose`; Python calls the other one, which has nothing to compile inside a request."""


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
        table, edges: `StepTimes.table` and its `sizes`.
        num_rows: of the step without drafts; each sequence yields a token without them, too.
        idle: seconds that the device idles before a step for which drafts are proposed.
        plain_idle: the same before steps for which none are.
        most_rows: of the step with drafts.
        kept: [S], written.

    Returns:
        `net_gain` of this step over one for which nothing is proposed. The nodes kept are best for
        this step alone, whose device has idled already.
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
    total, gain, slowdown = most, GUESSED_GAIN if most > 0 else GUESSED_LOSS, 1.0
    if table[-1] > 0.0:
        plain = table[min(np.searchsorted(edges, num_rows), len(edges) - 1)]
        best, best_seconds, total = len(counts) / (plain + idle), 0.0, 0
        gained, node = float(len(counts)), 0
        while node < most:
            # All that fits in the same size of step costs the same.
            at = np.searchsorted(edges, num_rows + node + 1)
            end = min(most, edges[at] - num_rows)
            gained += likeliest[node:end].sum()
            node = end
            rate = gained / (table[at] + idle)
            if rate > best:
                best, best_seconds, total = rate, table[at] + idle, node
        gain = best * (plain + plain_idle) / max(len(counts), 1)
        slowdown = best_seconds / (plain + plain_idle)
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
    accepting = 0.0
    for row in range(len(counts)):
        if kept[row] > 0:  # the first node is the likeliest
            accepting += path_probs[row, 0]
    return _net_gain(gain, slowdown, len(counts), accepting)


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
