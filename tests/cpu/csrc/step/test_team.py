"""The team of threads: barriers, sleep, pinning, fork, and bad company on its cores."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from hetero_llm.cpu import native

# A deadlock sits in C, where signals do not reach Python: the thread method ends the process.
pytestmark = pytest.mark.timeout(300, method="thread")

POINTER, INT = ctypes.c_void_p, ctypes.c_int64
MOST_THREADS = 4


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    loaded = native.load()
    assert loaded is not None
    for name, result, arguments in (
        ("new", POINTER, [INT, POINTER, INT]),
        ("free", None, [POINTER]),
        ("size", INT, [POINTER]),
        ("slept", INT, [POINTER]),
        ("patience", None, [ctypes.POINTER(INT)] * 2 + [INT, ctypes.POINTER(INT)]),
        ("delay", None, [POINTER, INT, INT]),
        ("check", INT, [POINTER, INT]),
        ("time", INT, [POINTER, INT, INT]),
    ):
        function = getattr(loaded, f"hetero_team_{name}")
        function.restype, function.argtypes = result, arguments
    return loaded


@contextmanager
def team_of(
    library: ctypes.CDLL, threads: int, *, cpus: list[int] | None = None, spin_us: int = 20
) -> Iterator[int]:
    """A team's handle; spinning shortly, so that runs meet both awake and sleeping threads."""
    places = None if cpus is None else (ctypes.c_int32 * threads)(*cpus)
    team = library.hetero_team_new(threads, places, spin_us)
    try:
        yield team
    finally:
        library.hetero_team_free(team)


def team_threads(*, but: Container[int] = ()) -> dict[int, str]:
    """The library's threads in this process: id and state (R running, S asleep)."""
    found = {}
    for folder in Path("/proc/self/task").iterdir():
        head, _, tail = (folder / "stat").read_text().rpartition(")")
        if head.endswith("(hetero-cpu") and int(folder.name) not in but:
            found[int(folder.name)] = tail.split()[0]
    return found


def test_ten_thousand_runs_with_random_threads_and_barriers(library: ctypes.CDLL) -> None:
    before = team_threads()
    rng = random.Random(0)
    runs = 0
    while runs < 10_000:
        with team_of(library, rng.randint(1, MOST_THREADS), spin_us=rng.choice((0, 20))) as team:
            for _ in range(rng.randint(1, 400)):
                assert library.hetero_team_check(team, rng.randint(0, 3)) == 0
                runs += 1
    assert team_threads(but=before) == {}


def test_sizes(library: ctypes.CDLL) -> None:
    for threads in (1, 2, 5, 9):
        with team_of(library, threads) as team:
            assert library.hetero_team_size(team) == threads
            assert library.hetero_team_check(team, 5) == 0
            assert library.hetero_team_time(team, 2, 3) > 0


@pytest.mark.parametrize("late", range(3))
def test_a_delayed_thread_is_waited_for(library: ctypes.CDLL, late: int) -> None:
    with team_of(library, 3) as team:
        library.hetero_team_delay(team, late, 200_000)
        for _ in range(100):
            assert library.hetero_team_check(team, 1) == 0
        library.hetero_team_delay(team, late, 0)
        delay = 20_000_000
        library.hetero_team_delay(team, late, delay)
        # No thread spins or yields meanwhile: the two others sleep, but for their patience, and
        # where a busy machine lets them run so late that there is nothing to wait for.
        attempts = slept = 0
        while slept <= 2 * delay:
            attempts += 1
            assert attempts < 100, "they do not sleep"
            before = library.hetero_team_slept(team)
            assert library.hetero_team_time(team, 1, 2) >= 2 * delay
            slept = library.hetero_team_slept(team) - before


def patience_at(library: ctypes.CDLL, waits: list[tuple[float, float]]) -> list[int]:
    """Microseconds of patience behind waits: when each ended, in ms, and what it took."""
    count = len(waits)
    times, taken, found = ((INT * count)(), (INT * count)(), (INT * count)())
    for i, (when, wait) in enumerate(waits):
        times[i], taken[i] = int(when * 1e6), int(wait * 1e6)
    library.hetero_team_patience(times, taken, count, found)
    return [each // 1000 for each in found]


def test_threads_are_patient_unless_a_core_was_taken_lately(library: ctypes.CDLL) -> None:
    """Parts of a step that differ make no thread sleep early, and one lost core does so for some
    milliseconds only; if it is lost again and again, for longer."""
    uneven = [(1000 + i, 0.3) for i in range(50)]
    assert patience_at(library, uneven) == [200] * 50
    lost_once = [(1000, 3), (1005, 0.02), (1009, 0.1), (1011, 0.02), (1100, 0.02)]
    assert patience_at(library, lost_once) == [2, 2, 2, 200, 200]
    rarely = [(1000, 3), (1100, 3), (1111, 0)]
    assert patience_at(library, rarely) == [2, 2, 200]
    often = [(1000, 3), (1012, 3), (1031, 0), (1034, 3), (1073, 0), (1075, 0)]
    assert patience_at(library, often) == [2, 2, 2, 2, 2, 200]
    always = [(1000 + 12 * i, 3) for i in range(100)]
    assert set(patience_at(library, always)) == {2}


def test_threads_are_pinned_and_fall_asleep(library: ctypes.CDLL) -> None:
    before = team_threads()
    granted = sorted(os.sched_getaffinity(0))
    cpus = [granted[i % len(granted)] for i in range(3)]
    with team_of(library, 3, cpus=cpus) as team:
        assert library.hetero_team_check(team, 3) == 0
        while set(team_threads(but=before).values()) != {"S"}:
            os.sched_yield()
        places = [os.sched_getaffinity(thread) for thread in team_threads(but=before)]
        assert sorted(map(sorted, places)) == sorted([cpu] for cpu in cpus[1:])
        assert library.hetero_team_check(team, 3) == 0
    assert sorted(os.sched_getaffinity(0)) == granted


def test_a_cpu_that_is_not_there_leaves_the_thread_unpinned(library: ctypes.CDLL) -> None:
    with team_of(library, 2, cpus=[0, 100_000]) as team:
        assert library.hetero_team_check(team, 3) == 0


def test_a_competitor_on_one_core_stops_no_thread(library: ctypes.CDLL) -> None:
    granted = sorted(os.sched_getaffinity(0))
    cpus = [granted[0], granted[-1]]
    code = f"import os\nos.sched_setaffinity(0, [{cpus[1]}])\nprint(flush=True)\nwhile True: pass"
    # Without the sanitizers' preloaded runtime, which a plain interpreter has no use for.
    plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    competitor = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=plain, text=True
    )
    try:
        assert competitor.stdout is not None
        competitor.stdout.readline()
        with team_of(library, 2, cpus=cpus, spin_us=100) as team:
            # Until both have had the core: a quarter of a second is dozens of time slices.
            company, runs = psutil.Process(competitor.pid), 0
            until = company.cpu_times().user + 0.25
            while runs < 500 or company.cpu_times().user < until:
                assert library.hetero_team_check(team, 2) == 0
                runs += 1
    finally:
        competitor.kill()
        competitor.communicate()


def test_after_a_fork_both_have_a_team(library: ctypes.CDLL) -> None:
    with team_of(library, 3) as team, team_of(library, 2) as unused:
        assert library.hetero_team_check(team, 3) == 0
        child = os.fork()
        if child == 0:
            alone = not team_threads()
            right = all(library.hetero_team_check(team, 3) == 0 for _ in range(20))
            right = right and len(team_threads()) == 2
            library.hetero_team_free(team)
            library.hetero_team_free(unused)
            os._exit(0 if alone and right and not team_threads() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert library.hetero_team_check(team, 3) == 0
        assert library.hetero_team_check(unused, 3) == 0
