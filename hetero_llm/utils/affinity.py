"""Keeps the threads of this process off cores on which others spin.

A thread that wakes up on a core where another one spins takes that core for a slice of the
scheduler, 3 to 4 ms. The spinning thread then answers milliseconds late instead of microseconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_TASKS = Path("/proc/self/task")


class ThreadsElsewhere:
    """All threads of this process but those pinned to some CPUs use the other CPUs, and so do the
    threads that they start; until `restore`.

    Args:
        cpus: logical CPUs. If a thread could use no others, it stays as it is.

    Attributes:
        num_moved: threads that had to leave the CPUs.
    """

    def __init__(self, cpus: tuple[int, ...]) -> None:
        taken = set(cpus)
        self._before: dict[int, set[int]] = {}
        for thread, allowed in _threads():
            left = allowed - taken
            if not left or left == allowed:
                continue  # pinned to one of the CPUs, or to others
            with suppress(OSError):
                os.sched_setaffinity(thread, left)
                self._before[thread] = allowed
        self._after = {frozenset(allowed - taken): allowed for allowed in self._before.values()}

    @property
    def num_moved(self) -> int:
        return len(self._before)

    def restore(self) -> None:
        """Gives the CPUs back to the threads that had them, and to those started meanwhile. May be
        called again."""
        for thread, allowed in _threads():
            before = self._after.get(frozenset(allowed))
            if before is not None:
                with suppress(OSError):
                    os.sched_setaffinity(thread, self._before.get(thread, before))
        self._before, self._after = {}, {}


def _threads() -> Iterator[tuple[int, set[int]]]:
    """Ids of this process's threads, with the CPUs that they may use."""
    for folder in _TASKS.iterdir() if _TASKS.is_dir() else ():
        with suppress(OSError):  # it has ended meanwhile
            yield int(folder.name), os.sched_getaffinity(int(folder.name))
