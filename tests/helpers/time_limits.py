"""Short time limits in tests that a busy machine may miss for a reason of its own."""

from __future__ import annotations

from collections.abc import Iterator

_MOST_SECONDS = 120.0  # only a hang comes near


def growing_limits(seconds: float) -> Iterator[float]:
    """Limits to try one after the other, in seconds: this one, then twice as much each time.

    For what has to happen within a limit although the limit has to end: the test leaves the loop
    at the first limit for which the machine was fast enough, and the last one is followed by an
    AssertionError.
    """
    while seconds < _MOST_SECONDS:
        yield seconds
        seconds *= 2
    raise AssertionError("no limit was long enough")
