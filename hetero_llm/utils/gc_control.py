"""Settings of the Python interpreter for a thread that steps an engine: it gets the GIL back soon,
and garbage is collected while the device works."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

_SWITCH_SECONDS = 5e-6
_LONG_TURN = 1e-3
_PR_SET_TIMERSLACK = 29
_SLACK_NS, _USUAL_SLACK_NS = 1000, 50_000
_DUE, _OVERDUE, _LATE = 10_000, 50_000, 100_000
"""Numbers of new containers after which young garbage is collected: after a launch if no request
waits for its first token, after any launch, and at any time (by the interpreter itself)."""
_YOUNG_COLLECTIONS = 50


def serve_promptly() -> None:
    """Prepares the interpreter for stepping an engine. Steps must run within `prompt_wakeups`.

    - A step releases the GIL a dozen times, for microseconds each, and another busy thread then
      keeps it for a switch interval: 5 ms by default, 5 us after this call.
    - Long prompts are long lists, and a collection visits all young objects: 5 to 78 ms when 50
      requests of 10K tokens came at once. `collect_if_due` collects while the device works.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
    youngest, *older = gc.get_threshold()
    if youngest:  # else the user has switched collection off
        gc.set_threshold(max(youngest, _LATE), *older)


@contextmanager
def prompt_wakeups() -> Iterator[None]:
    """Sets the timer slack of the calling thread, and of threads that it starts, to 1 us instead of
    Linux's default of 50 us, while the context is open. The thread then waits briefly for the GIL;
    other threads keep the default, so the engine holds the GIL ten times as long as they do. A
    thread that is started meanwhile and works beside the engine begins with `usual_wakeups`."""
    if sys.platform != "linux":
        yield
        return
    prctl = _prctl()
    prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_TIMERSLACK, 0, 0, 0, 0)  # the thread's default


@contextmanager
def long_turns() -> Iterator[None]:
    """While the context is open a thread keeps the GIL for 1 ms when others want it, not for the
    5 us after `serve_promptly`: threads that compute in Python, as compilers do, would spend much
    of their time on handing it over. They begin with `usual_wakeups`, too."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(max(before, _LONG_TURN))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def usual_wakeups() -> None:
    """Gives the calling thread Linux's default timer slack of 50 us. A thread has the slack of the
    one that started it: nine threads with 1 us that ask each other for the GIL every 5 us took 0.3
    to 1.7 s to load 30 small tensors, instead of 10 ms."""
    if sys.platform == "linux":
        _prctl()(_PR_SET_TIMERSLACK, _USUAL_SLACK_NS, 0, 0, 0)


@cache
def _prctl() -> Callable[..., int]:
    """Opened once: that takes 50 us, and `LLMEngine.step` opens a context for each step."""
    return ctypes.PyDLL(None).prctl  # PyDLL: the call does not release the GIL


def collect_if_due(*, calm: bool, young_collections: int = _YOUNG_COLLECTIONS) -> None:
    """Collects young garbage if there are many new objects. To be called while the device works.

    Args:
        calm: no request waits for its first token, so a longer step delays only streams.
        young_collections: collections of the youngest generation before one of the next.
    """
    young, middle, _ = gc.get_count()
    if young > (_DUE if calm else _OVERDUE) and gc.isenabled():
        gc.collect(1 if middle > young_collections else 0)
