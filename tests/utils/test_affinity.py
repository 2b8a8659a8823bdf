"""Threads leave the CPUs on which others spin, and come back."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from hetero_llm.utils.affinity import ThreadsElsewhere

ALL = os.sched_getaffinity(0)
pytestmark = pytest.mark.skipif(len(ALL) < 2, reason="needs two CPUs")


class Waiting:
    """A thread that says which CPUs it may use."""

    def __init__(self, cpus: set[int] | None = None) -> None:
        self._cpus, self._ends = cpus, threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait()

    def _run(self) -> None:
        if self._cpus is not None:
            os.sched_setaffinity(0, self._cpus)
        self._ready.set()
        self._ends.wait()

    @property
    def cpus(self) -> set[int]:
        assert self._thread.native_id is not None
        return os.sched_getaffinity(self._thread.native_id)

    def end(self) -> None:
        self._ends.set()
        self._thread.join()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    os.sched_setaffinity(0, ALL)


def test_threads_that_are_not_pinned_there_leave() -> None:
    cpu = max(ALL)
    free, pinned = Waiting(), Waiting({cpu})
    moved = ThreadsElsewhere((cpu,))
    later = Waiting()
    try:
        assert free.cpus == later.cpus == os.sched_getaffinity(0) == ALL - {cpu}
        assert pinned.cpus == {cpu} and moved.num_moved >= 2
        moved.restore()
        assert free.cpus == later.cpus == os.sched_getaffinity(0) == ALL
        assert pinned.cpus == {cpu}
        os.sched_setaffinity(0, ALL - {cpu})
        moved.restore()
        assert os.sched_getaffinity(0) == ALL - {cpu}  # not its doing
    finally:
        for one in (free, pinned, later):
            one.end()


def test_no_thread_is_left_without_a_cpu() -> None:
    moved = ThreadsElsewhere(tuple(ALL))
    assert moved.num_moved == 0 and os.sched_getaffinity(0) == ALL
