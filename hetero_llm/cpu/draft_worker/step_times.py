"""How long steps of the draft model take, by their rows: measured at start, corrected by steps."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from hetero_llm.cpu.draft_worker.draft_model import DraftModel
from hetero_llm.cpu.draft_worker.kv_layout import no_tree_nodes
from hetero_llm.cpu.draft_worker.tree_ops import WINDOW

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Rows of the steps that are measured."""

_REPEATS = 5
_WEIGHT, _OUTLIER = 0.05, 4.0


class DraftStepTimes:
    """Seconds of steps of 0 .. `most` rows.

    Args:
        sizes, seconds: what was measured, ascending; between them and beyond it is a straight line.
    """

    def __init__(self, sizes: list[int], seconds: list[float], most: int) -> None:
        assert sizes and len(sizes) == len(seconds)
        rows = np.arange(most + 1)
        table = np.interp(rows, sizes, np.maximum.accumulate(seconds))
        if len(sizes) > 1 and most > sizes[-1]:
            slope = max((seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]), 0.0)
            beyond = rows > sizes[-1]
            table[beyond] = table[sizes[-1]] + slope * (rows[beyond] - sizes[-1])
        self._table: NDArray[np.float64] = table
        self._scale = 1.0

    def beside(self, rows: int, most: int) -> NDArray[np.float64]:
        """[most + 1] seconds of steps of `rows` rows and 0 .. `most` more."""
        last = len(self._table) - 1
        first = min(rows, last)
        found = self._table[first : first + most + 1] * self._scale
        if len(found) <= most:
            found = np.concatenate([found, np.full(most + 1 - len(found), found[-1])])
        return found

    def of(self, rows: int) -> float:
        """Seconds of a step of this many tokens."""
        return float(self._table[min(rows, len(self._table) - 1)] * self._scale)

    def observe(self, rows: int, seconds: float) -> None:
        """Report a finished step: its number of tokens and duration in seconds. Longer contexts and
        other programs on the machine make the same step slower over time."""
        expected = self.of(rows)
        if rows < len(self._table) and seconds < _OUTLIER * expected:
            self._scale *= 1.0 + _WEIGHT * (seconds / expected - 1.0)


def measure(model: DraftModel, slots: int, context: int) -> DraftStepTimes:
    """Times steps of a model that holds no text; it holds none afterwards.

    Every row is a text of its own of `context` tokens, or several of one where slots are few.
    """
    sizes, seconds = [], []
    repeats = min(_REPEATS, model.max_positions - 1)
    if not repeats:  # a text of one token has no draft
        return DraftStepTimes([1], [1.0], 8 * WINDOW)
    full = np.arange(max(context, SIZES[-1]), dtype=np.int32) % model.vocab_size
    for size in SIZES:
        texts = min(size, slots)
        rows = -(-size // texts)
        if rows > 1 and (repeats + 1) * rows > model.max_positions:
            continue  # beyond what is measured it is a straight line
        text = full[: max(1, min(context, model.max_positions - repeats * rows))]
        for slot in range(texts):
            model.kv_layout.open(slot, text)
            _run(model)
        times = []
        for _ in range(repeats):
            for slot in range(texts):
                model.kv_layout.append(slot, full[:rows])
            begin = time.perf_counter()
            _run(model)
            times.append(time.perf_counter() - begin)
        for slot in range(texts):
            model.kv_layout.close(slot)
        sizes.append(texts * rows)
        seconds.append(min(times))
    keep = [i for i, size in enumerate(sizes) if i == 0 or size > sizes[i - 1]]
    return DraftStepTimes([sizes[i] for i in keep], [seconds[i] for i in keep], 8 * WINDOW)


def _run(model: DraftModel) -> None:
    """Runs whatever is pending."""
    while len((prefix := model.kv_layout.plan_prefix(model.most_rows)).slots):
        model.step(prefix, no_tree_nodes())
