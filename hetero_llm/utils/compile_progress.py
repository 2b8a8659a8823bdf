"""Says that kernels are being compiled: at a first start nothing else would be seen for a minute.

The log gets a line when compiling begins, one every few seconds, and one when `finish` is called at
the end of a start. A terminal whose log level hides these gets one line that is written over.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 5.0
_ERASE = "\r\x1b[K"


@dataclass(slots=True)
class _Progress:
    """What this process has compiled since it began, or since the last call of `finish`.

    Attributes:
        begun: when the first compilation began; None: there was none.
        logged: when the last line was written.
        kernels: compiled functions and source files.
    """

    begun: float | None = None
    logged: float = 0.0
    kernels: int = 0


_progress = _Progress()
_lock = threading.Lock()


def begin() -> None:
    """Called before each compilation; the first one is announced."""
    with _lock:
        if _progress.begun is None:
            _progress.begun = _progress.logged = time.monotonic()
            _say("compiling kernels once, about a minute")


def advance() -> None:
    """Called after each function or source file that has been compiled."""
    with _lock:
        _progress.kernels += 1
        now = time.monotonic()
        if _progress.begun is None or now < _progress.logged + _SECONDS_BETWEEN_LINES:
            return
        _progress.logged = now
        seconds = now - _progress.begun
        _say(f"compiling kernels once: {_progress.kernels} done in {seconds:.0f} s")


def finish() -> None:
    """Called when the start is over: ends the report, if there was anything to compile."""
    global _progress
    with _lock:
        before, _progress = _progress, _Progress()
        if before.begun is None:
            return
        seconds = time.monotonic() - before.begun
        logger.info("compiled %d kernels in %.0f s, kept for later", before.kernels, seconds)
        if _on_terminal():
            _overwrite("")


def _say(text: str) -> None:
    logger.info(text)
    if _on_terminal():
        _overwrite(f"{text} ...")


def _on_terminal() -> bool:
    return sys.stderr.isatty() and not logger.isEnabledFor(logging.INFO)


def _overwrite(text: str) -> None:
    sys.stderr.write(_ERASE + text)
    sys.stderr.flush()
