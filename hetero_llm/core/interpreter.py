"""How soon a thread that steps an engine gets the interpreter back from a busy one."""

from __future__ import annotations

import ctypes
import sys

_SWITCH_SECONDS = 2e-5
_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1000


def return_soon() -> None:
    """Lets the calling thread have the interpreter back soon, however busy other threads are.

    A step gives it away a dozen times, for microseconds each, and a busy thread keeps it for a
    switch interval (5 ms by default, 20 us from here on) plus what the kernel adds to so short a
    wait: 50 us, unless the waiting thread asks for less. The interval is the whole interpreter's,
    the slack is this thread's and that of threads it starts from now on.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)
