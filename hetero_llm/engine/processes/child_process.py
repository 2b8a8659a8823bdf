"""What the processes of an engine and of its ranks do alike when they start and end."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import signal
import sys
from typing import NoReturn

from hetero_llm.utils.gc_control import serve_promptly
from hetero_llm.utils.log_sink import LineFormatter, Sink

_PR_SET_PDEATHSIG = 1


def begin(title: str) -> None:
    """Prepares this process: what is printed goes to standard error, since standard output is the
    parent's, for its results; signals that a terminal or a service manager sends to a whole process
    group are ignored; SIGUSR1 writes the stacks of all threads, for a process that hangs.

    Args:
        title: shown by `ps`, where setproctitle is installed.
    """
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A handler, and not SIG_IGN, which processes started from here would inherit.
        signal.signal(number, lambda *_: None)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    serve_promptly()
    try:
        from setproctitle import setproctitle
    except ImportError:
        return
    setproctitle(f"hetero-llm: {title}")


def die_with_parent_thread() -> None:
    """Makes the kernel kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def open_log(name: str, form: str, level: int) -> None:
    """Logs to standard error.

    Args:
        name: of the process, at the beginning of each line.
        form: one of `log_sink.FORMATS`.
        level: of this package; others log warnings at least.
    """
    root = logging.getLogger()
    root.handlers[:] = [Sink(sys.stderr.fileno(), LineFormatter(form, name))]
    root.setLevel(max(level, logging.WARNING))
    logging.getLogger("hetero_llm").setLevel(level)
    logging.captureWarnings(True)


def freeze_objects() -> None:
    """Lets later garbage collections skip all objects that were loaded."""
    gc.collect()
    gc.freeze()


def end(exit_code: int) -> NoReturn:
    """Ends the process. The kernel frees everything faster than the interpreter does, device memory
    included."""
    logging.shutdown()
    os._exit(exit_code)
