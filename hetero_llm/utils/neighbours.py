"""Whether other programs use this machine's cores: figures measured beside them are too low."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_SAMPLE_SECONDS = 0.25
_BUSY = 0.15  # of all cores
_IDLE, _IOWAIT, _STEAL = 3, 4, 7  # columns of /proc/stat


def cpu_ticks() -> list[int]:
    """/proc/stat's first line: user, nice, system, idle, iowait, irq, softirq, steal of all cores
    since boot; empty where there is none."""
    try:
        return [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return []


def busy_line(
    ticks: Callable[[], list[int]] = cpu_ticks, sleep: Callable[[float], None] = time.sleep
) -> str:
    """Looks at the machine for a moment in which this process does nothing.

    Returns:
        A line to show beside figures, with its line end, if other programs or other virtual
        machines take a good part of the cores; else "".
    """
    before = ticks()
    sleep(_SAMPLE_SECONDS)
    spent = [b - a for a, b in zip(before, ticks(), strict=True)]
    total = sum(spent)
    if len(spent) <= _STEAL or total <= 0:
        return ""
    busy = 1.0 - (spent[_IDLE] + spent[_IOWAIT]) / total
    if busy < _BUSY:
        return ""
    stolen = f", steal {spent[_STEAL] / total:.0%}" if spent[_STEAL] else ""
    return (
        f"note: other programs use {busy:.0%} of the {os.cpu_count()} cores (load "
        f"{os.getloadavg()[0]:.1f}{stolen}): figures are lower than on an idle machine\n"
    )
