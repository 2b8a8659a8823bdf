"""Where the time of a step goes. Part of the engine, which alone calls it."""

from __future__ import annotations

import time
from time import perf_counter

from hetero_llm.core.histogram import Histogram

PHASES = ("schedule", "launch", "wait", "update", "output")
"""Choosing rows; handing them to the device; waiting for it; bookkeeping; text."""

_BOUNDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1,
           0.25, 0.5, 1.0, 2.5, 10.0)  # fmt: skip


class StepClock:
    """Sums the laps of each phase over a step, and keeps a histogram of the sums.

    Attributes:
        last_step: Unix time in seconds of the last step's end, 0 before the first.
    """

    def __init__(self) -> None:
        self.last_step = 0.0
        self._sums = dict.fromkeys(PHASES, 0.0)
        self._histograms = {phase: Histogram.empty(_BOUNDS) for phase in PHASES}
        self._lapped = 0.0

    def begin(self) -> None:
        """A step begins. One that has begun and never ended does not count."""
        for phase in PHASES:
            self._sums[phase] = 0.0
        self._lapped = perf_counter()

    def lap(self, phase: str) -> float:
        """The time since the last lap belongs to this phase. Returns the present time."""
        now = perf_counter()
        self._sums[phase] += now - self._lapped
        self._lapped = now
        return now

    def end(self) -> None:
        self.last_step = time.time()
        for phase, seconds in self._sums.items():
            self._histograms[phase].observe(seconds)

    def histograms(self) -> dict[str, Histogram]:
        """By "step_seconds/" and the phase, in seconds."""
        return {f"step_seconds/{phase}": kept for phase, kept in self._histograms.items()}
