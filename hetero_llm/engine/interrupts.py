"""Ctrl-C between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupt_between_steps() -> Iterator[list[int]]:
    """Collects Ctrl-C in a list instead of raising it inside a step, which would leave scheduler
    and device in different states. Only the main thread gets signals; in others the list stays
    empty."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    previous = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, previous)
