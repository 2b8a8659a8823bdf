"""What `return_soon` sets, in a thread of its own so that no other test sees the slack."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator

import pytest

from hetero_llm.core.gil import return_soon

_SET_SLACK, _GET_SLACK = 29, 30


@pytest.fixture
def interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.mark.skipif(sys.platform != "linux", reason="timer slack is Linux's")
def test_the_calling_thread_alone_waits_precisely(interval: None) -> None:
    prctl = ctypes.CDLL(None).prctl
    before, seen = prctl(_GET_SLACK), []

    def body() -> None:
        prctl(_SET_SLACK, 50_000)
        seen.append(prctl(_GET_SLACK))
        return_soon()
        seen.append(prctl(_GET_SLACK))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [50_000, 1000] and prctl(_GET_SLACK) == before


def test_the_interval_is_lowered_and_never_raised(interval: None) -> None:
    sys.setswitchinterval(5e-3)
    return_soon()
    assert sys.getswitchinterval() == pytest.approx(2e-5)
    sys.setswitchinterval(1e-6)
    return_soon()
    assert sys.getswitchinterval() == pytest.approx(1e-6)
