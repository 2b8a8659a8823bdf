"""How fast requests finish: how long a client that was refused should wait."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_KEPT = 32  # times
_SHORTEST, _LONGEST = 1.0, 60.0  # seconds, bounds of `seconds_for`


class FinishRate:
    """Times at which the last requests finished.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: deque[float] = deque(maxlen=_KEPT)

    def note(self) -> None:
        """A request finishes now."""
        self._times.append(self._clock())

    def clear(self) -> None:
        """The engine was idle, which says nothing about how fast it is."""
        self._times.clear()

    def seconds_for(self, count: int) -> float:
        """Seconds in which `count` more requests finish at the recent rate, between 1 and 60; 1 if
        the rate is not known."""
        if not self._times:
            return _SHORTEST
        passed = self._clock() - self._times[0]
        return min(max(count * passed / len(self._times), _SHORTEST), _LONGEST)
