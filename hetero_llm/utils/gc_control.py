"""The interpreter as a thread that steps an engine needs it: back soon, and collecting garbage
while the device works."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SWITCH_SECONDS = 5e-6
_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1000
_DUE, _OVERDUE, _LATE = 10_000, 50_000, 100_000
"""New containers after which young garbage is collected: behind a launch while nobody waits for a
first token, behind any launch, and whatever goes on."""
_YOUNG_ONES = 50  # collections of the youngest generation before one of the next


def serve_promptly() -> None:
    """Prepares the interpreter for stepping an engine, which `prompt_wakeups` is to surround.

    - A step gives the interpreter away a dozen times, for microseconds each, and a busy thread
      keeps it for a switch interval: 5 ms by default, 5 us from here on.
    - Long prompts are long lists, and whatever is young is visited by every collection: 5 to 78 ms
      where 50 requests of 10K tokens came at once. `collect_if_due` does it in good time.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
    youngest, *older = gc.get_threshold()
    if youngest:  # else there is to be no collection
        gc.set_threshold(max(youngest, _LATE), *older)


@contextmanager
def prompt_wakeups() -> Iterator[None]:
    """Within it the calling thread's timers, and those of threads that it starts, fire within a
    microsecond, not 50 as Linux lets them by default. So it waits shortly for the interpreter, and
    a busy thread, which waits by the default, leaves it to the engine ten times as long."""
    if sys.platform != "linux":
        yield
        return
    prctl = ctypes.PyDLL(None).prctl  # keeps the interpreter, which another call would give away
    prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_TIMERSLACK, 0, 0, 0, 0)  # the thread's default


def collect_if_due(*, calm: bool) -> None:
    """Collects young garbage if much is new: to be called while the device works.

    Args:
        calm: nobody waits for a first token, so a step that takes longer holds nobody up for long.
    """
    young, middle, _ = gc.get_count()
    if young > (_DUE if calm else _OVERDUE) and gc.isenabled():
        gc.collect(1 if middle > _YOUNG_ONES else 0)
