"""Notices that the executor's threads wait for cores that other programs use."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_SECONDS_WATCHED = 2.0  # of steps, for each look
_SHARE_WORTH_A_LINE = 0.25  # more than uneven parts of a step cause
_SECONDS_BETWEEN_LINES = 60.0


class CoreWatch:
    """Writes a line to the log when waiting takes a large share of the steps, at most one a minute.

    Args:
        slept_ns: returns nanoseconds that all threads together have waited for each other, asleep.
        threads: their number.
        clock: returns seconds.
    """

    def __init__(
        self,
        slept_ns: Callable[[], int],
        threads: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slept_ns, self._threads, self._clock = slept_ns, threads, clock
        self._slept = slept_ns()
        self._seconds = 0.0
        self._quiet_until = float("-inf")

    def on_step(self, seconds: float) -> None:
        """Called after each step with its duration."""
        self._seconds += seconds
        if self._seconds < _SECONDS_WATCHED:
            return
        slept = self._slept_ns()
        share = (slept - self._slept) / (1e9 * self._seconds * self._threads)
        self._slept, self._seconds = slept, 0.0
        now = self._clock()
        if share < _SHARE_WORTH_A_LINE or now < self._quiet_until:
            return
        self._quiet_until = now + _SECONDS_BETWEEN_LINES
        logger.warning(
            "the %d threads of the CPU executor spent %.0f%% of their time waiting for one of them "
            "to get a core: other programs use the cores (load %.1f); cores of "
            "its own, or fewer threads (cpu_threads), would make it faster",
            self._threads, 100 * share, os.getloadavg()[0],
        )  # fmt: skip
