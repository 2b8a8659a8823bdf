"""What `serve_promptly` and its companions set; the slack in a thread of its own, so that no other
test sees it."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from hetero_llm.utils.gc_control import collect_if_due, long_turns, prompt_wakeups, serve_promptly

_SET_SLACK, _GET_SLACK = 29, 30


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*thresholds)


@pytest.mark.skipif(sys.platform != "linux", reason="timer slack is Linux's")
def test_wakeups_are_prompt_for_the_caller_and_its_threads_alone() -> None:
    prctl = ctypes.CDLL(None).prctl
    before, seen = prctl(_GET_SLACK), []

    def note() -> None:
        seen.append(prctl(_GET_SLACK))

    def body() -> None:
        default = prctl(_GET_SLACK)
        with pytest.raises(ValueError, match="out"), prompt_wakeups():
            note()
            child = threading.Thread(target=note)
            child.start()
            child.join()
            raise ValueError("out")
        assert prctl(_GET_SLACK) == default
        late = threading.Thread(target=note)
        late.start()
        late.join()
        seen.append(default)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [1000, 1000, before, before] and prctl(_GET_SLACK) == before


def test_the_interval_is_lowered_and_never_raised() -> None:
    sys.setswitchinterval(5e-3)
    serve_promptly()
    assert sys.getswitchinterval() == pytest.approx(5e-6)
    sys.setswitchinterval(1e-6)
    serve_promptly()
    assert sys.getswitchinterval() == pytest.approx(1e-6)


def test_long_turns_last_as_long_as_the_context() -> None:
    sys.setswitchinterval(5e-6)
    with pytest.raises(KeyError), long_turns():
        assert sys.getswitchinterval() == pytest.approx(1e-3)
        raise KeyError
    assert sys.getswitchinterval() == pytest.approx(5e-6)
    sys.setswitchinterval(5e-3)
    with long_turns():
        assert sys.getswitchinterval() == pytest.approx(5e-3)


@pytest.mark.parametrize(("before", "after"), [(700, 100_000), (900_000, 900_000), (0, 0)])
def test_collections_become_rarer_and_stay_off(before: int, after: int) -> None:
    gc.set_threshold(before, 12, 13)
    serve_promptly()
    assert gc.get_threshold() == (after, 12, 13)


def test_young_garbage_is_collected_when_it_is_much() -> None:
    gc.set_threshold(1_000_000, 1000, 1000)
    collect = partial(collect_if_due, young_collections=2)
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        collect(calm=True)
        kept: list[list[int]] = []
        for _ in range(4):
            kept += [[] for _ in range(11_000)]
            collect(calm=False)
            collect(calm=True)
        assert seen == [0, 0, 0, 1]
        kept += [[] for _ in range(51_000)]
        collect(calm=False)
        assert len(seen) == 5
        gc.disable()
        kept += [[] for _ in range(51_000)]
        collect(calm=True)
        assert len(seen) == 5
    finally:
        gc.enable()
        gc.callbacks.remove(note)
