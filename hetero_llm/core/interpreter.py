"""The interpreter as a thread that steps an engine needs it: back soon, and collecting garbage
while the device works."""

from __future__ import annotations

import ctypes
import gc
import sys

_SWITCH_SECONDS = 2e-5
_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1000
_DUE, _LATE = 10_000, 40_000
"""New containers after which young garbage is collected in good time, and whatever goes on."""
_YOUNG_ONES = 50  # collections of the youngest generation before one of the next


def serve_promptly() -> None:
    """Prepares the interpreter, and the calling thread, for stepping an engine.

    - A step gives the interpreter away a dozen times, for microseconds each, and a busy thread
      keeps it for a switch interval (5 ms by default, 20 us from here on) plus what the kernel adds
      to so short a wait: 50 us, unless the waiting thread asks for less, as this one does now.
    - Long prompts are long lists, and whatever is young is visited by every collection: 5 to 78 ms
      where 50 requests of 10K tokens came at once. `collect_if_due` does it in good time.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)
    youngest, *older = gc.get_threshold()
    if youngest:  # else there is to be no collection
        gc.set_threshold(max(youngest, _LATE), *older)


def collect_if_due() -> None:
    """Collects young garbage if much is new: to be called while the device works."""
    young, middle, _ = gc.get_count()
    if young > _DUE and gc.isenabled():
        gc.collect(1 if middle > _YOUNG_ONES else 0)
