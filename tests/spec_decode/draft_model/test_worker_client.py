"""The client of the draft worker: death, silence, garbage, restarts, shutdown.

Most processes here are stand_in.py, which is up at once; the tests set the clock.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from hetero_llm.bridge.ipc.messages import MessageKind, Messages, Stamps, put_commits
from hetero_llm.bridge.ipc.rings import Ring, create_ring
from hetero_llm.core.errors import ConfigError, RingError
from hetero_llm.demo_models import demo_folder
from hetero_llm.spec_decode.draft_model import worker_client
from hetero_llm.spec_decode.draft_model.worker_client import (
    HANG_SECONDS,
    PROGRAM,
    START_SECONDS,
    DraftWorkerClient,
    WorkerLimits,
)
from hetero_llm.spec_decode.draft_model.worker_settings import WorkerSettings
from tests.bridge.ipc.tools import HEAD, SLOTS_AT, TAIL
from tests.spec_decode.draft_model import stand_in
from tests.spec_decode.draft_model.stand_in import LAST_WORDS, VOCAB

PATIENCE = 60.0  # seconds until what must come counts as missed
PATIENT = WorkerLimits(stop_seconds=PATIENCE)
SETTINGS = WorkerSettings(
    folder="/no/such", load_format="auto", dtype="float32", weight_format="float", slots=4,
    max_model_len=100, window=32, max_depth=6, threads=1, cpus=(), ahead=True, most_nodes=8,
)  # fmt: skip
SCRIPT = str(Path(stand_in.__file__))


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def worker(
    manner: str, clock: Callable[[], float] = time.monotonic, limits: WorkerLimits | None = None
) -> Iterator[DraftWorkerClient]:
    program = (sys.executable, SCRIPT, manner)
    one = DraftWorkerClient(SETTINGS, vocab_size=VOCAB, clock=clock, program=program, limits=limits)
    try:
        yield one
    finally:
        one.close()


def wait(is_so: Callable[[], bool]) -> None:
    """Waits for a condition that must come true."""
    until = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.001)


def wait_up(one: DraftWorkerClient) -> None:
    """Waits for its hello without `check_health`."""
    wait(lambda: one.poll(1000) is not None or one.is_up)


def kill(one: DraftWorkerClient) -> None:
    """Returns when it is dead; the client has not noticed yet."""
    assert one.pid is not None
    os.kill(one.pid, signal.SIGKILL)
    os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)


def stop(one: DraftWorkerClient) -> None:
    """Returns when it stands still and its earlier messages were received."""
    assert one.pid is not None
    os.kill(one.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, one.pid, os.WSTOPPED | os.WNOWAIT)
    while one.poll() is not None:
        pass


def send(one: DraftWorkerClient, count: int) -> None:
    """Sends a COMMIT for each of `count` slots."""
    numbers = np.arange(count)
    tokens = np.arange(count, dtype=np.int32)
    put_commits(one.outbox, Stamps(numbers, numbers + 1, numbers), np.ones(count, int), tokens)
    one.push()


def receive(one: DraftWorkerClient, count: int) -> Messages:
    """Waits for the next `count` messages."""
    heard: list[Messages] = []

    def is_enough() -> bool:
        messages = one.poll(1000)
        if messages is not None:
            heard.append(messages)
        return sum(map(len, heard)) >= count

    wait(is_enough)
    parts = zip(*((messages.headers, messages.words) for messages in heard))
    return Messages(*map(np.concatenate, parts))


def num_pushed(one: DraftWorkerClient) -> int:
    """Slots that the worker has filled since it started."""
    assert one.rings is not None
    (position,) = np.frombuffer(one.rings[1].memory, np.uint32, 1, HEAD)
    return int(position)


def num_taken(one: DraftWorkerClient) -> int:
    """Slots that the worker has taken since it started."""
    assert one.rings is not None
    (position,) = np.frombuffer(one.rings[0].memory, np.uint32, 1, TAIL)
    return int(position)


def belongings() -> tuple[int, int, list[int]]:
    """Open files, mapped rings and children of this process, zombies included."""
    me = psutil.Process()
    rings = Path("/proc/self/maps").read_text().count("hetero-llm-ring")
    return me.num_fds(), rings, [child.pid for child in me.children()]


@pytest.fixture(scope="module", autouse=True)
def own_objects() -> Iterator[None]:
    """Collections visit what these tests make: a suite's millions of objects take half a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_is_left(own_objects: None) -> Iterator[None]:
    gc.collect()
    before = belongings()
    yield
    gc.collect()
    files, rings, children = belongings()
    assert files <= before[0], "files are open that were not"  # fewer: an earlier test's, late
    assert (rings, children) == before[1:]


# -- start --------------------------------------------------------------------------------------


def test_up_and_heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with worker("good", limits=PATIENT) as one:
        assert not one.is_up and one.poll() is None
        one.wait_ready()
        assert one.is_up and one.why_off is None and one.counters.starts == 1
        assert "a worker of the good kind" in caplog.text
        send(one, 3)
        heard = receive(one, 3)
        assert heard.headers["kind"].tolist() == [MessageKind.REFUSED] * 3
        assert heard.headers["slot"].tolist() == [0, 1, 2]
        assert heard.headers["generation"].tolist() == [1, 2, 3]
        pid = one.pid
        one.check_health()
        assert one.pid == pid and one.counters.deaths == 0
    assert not psutil.pid_exists(pid) and one.pid is None and not one.is_up
    assert one.why_off == "closed" and "end by itself" not in caplog.text
    one.check_health()
    one.push()
    one.close()
    assert one.pid is None and one.poll() is None


def test_what_is_sent_before_it_is_up_is_not_sent() -> None:
    """The proposer sends whole sequences once the worker is up."""
    with worker("good") as one:
        send(one, 2)
        assert len(one.outbox) == 0
        one.wait_ready()
        send(one, 1)
        assert len(receive(one, 1)) == 1


def test_another_vocabulary() -> None:
    with worker("other vocabulary") as one:
        with pytest.raises(ConfigError, match=f"has {VOCAB + 1} tokens, the target's {VOCAB}: "):
            one.wait_ready()
        assert not one.is_up


def test_another_vocabulary_after_a_restart() -> None:
    """wait_ready is not there then: the worker stays off for good."""
    with worker("other vocabulary") as one:
        wait(lambda: one.poll(1000) is not None or one.why_off is not None)
        assert one.why_off is not None and f"{VOCAB + 1} tokens" in one.why_off
        assert one.pid is None and not one.is_up
        one.check_health()
        assert one.pid is None


def test_its_last_words_are_the_reason() -> None:
    with worker("failing") as one:
        with pytest.raises(ConfigError) as caught:
            one.wait_ready()
        assert str(caught.value) == f"speculative_model='/no/such': {LAST_WORDS}"


def test_not_ready_in_time() -> None:
    clock = iter(np.arange(0, 1e6, 50).tolist())
    with worker("no hello", lambda: next(clock)) as one:
        with pytest.raises(ConfigError, match="was not ready after 600 s"):
            one.wait_ready()
        assert one.pid is None


def test_no_program() -> None:
    program = ("/no/such/program",)
    with pytest.raises(ConfigError, match="cpu_draft_worker=True: cannot be started: "):
        DraftWorkerClient(SETTINGS, vocab_size=VOCAB, program=program)


def test_rings_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of what there was already: see `nothing_is_left`."""
    made = []

    def damaged(*slots: int) -> Ring:
        ring = create_ring(*slots)
        made.append(ring.slots)
        if len(made) % 2 == 0:
            np.frombuffer(ring.memory, np.uint8)[:SLOTS_AT] = 7
        return ring

    monkeypatch.setattr(worker_client, "create_ring", damaged)
    with pytest.raises(ConfigError, match="cpu_draft_worker=True: cannot be started: rings of "):
        DraftWorkerClient(SETTINGS, vocab_size=VOCAB, program=(sys.executable, SCRIPT, "good"))
    assert len(made) == 2


def test_a_restart_that_fails_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    with worker("good", clock) as one:
        wait_up(one)
        kill(one)
        one.check_health()

        def none(*_: int) -> Ring:
            raise RingError("no memory")

        monkeypatch.setattr(worker_client, "create_ring", none)
        clock.now += 2
        one.check_health()
        assert one.pid is None and one.why_off is not None and "no memory" in one.why_off


def test_generations_are_never_those_of_before() -> None:
    with worker("good") as one:
        found = [one.next_generation() for _ in range(100)]
        assert len(set(found)) == 100 and min(found) > 0
        one.counters.generations = 0x7FFFFFFE
        assert [one.next_generation() for _ in range(3)] == [0x7FFFFFFF, 1, 2]


# -- death, silence, nonsense -------------------------------------------------------------------


def test_back_off_and_the_end_of_patience() -> None:
    clock = Clock()
    with worker("good", clock) as one:
        for deaths, seconds in enumerate((1.0, 2.0, 4.0, 8.0), 1):
            wait_up(one)
            kill(one)
            one.check_health()
            assert one.counters.deaths == deaths and one.pid is None and not one.is_up
            assert one.poll() is None
            clock.now += seconds - 0.01
            one.check_health()
            assert one.pid is None
            clock.now += 0.02
            one.check_health()
            assert one.pid is not None and one.counters.starts == deaths + 1
        wait_up(one)
        send(one, 2)
        assert len(receive(one, 2)) == 2
        kill(one)
        one.check_health()
        assert one.why_off == "died 5 times within 600 s"
        clock.now += 1e9
        one.check_health()
        assert one.pid is None and one.counters.starts == 5


def test_rare_deaths_are_forgiven() -> None:
    clock = Clock()
    with worker("good", clock) as one:
        for deaths in range(1, 7):
            wait_up(one)
            kill(one)
            one.check_health()
            clock.now += 4.01  # three of them at a time lie within ten minutes
            one.check_health()
            assert one.pid is not None and one.counters.deaths == deaths
            clock.now += 200.0
        assert one.why_off is None


def test_silence() -> None:
    clock = Clock()
    with worker("good", clock) as one:
        wait_up(one)
        stop(one)
        clock.now += HANG_SECONDS
        one.check_health()
        assert one.is_up
        clock.now += 0.01
        one.check_health()
        assert not one.is_up and one.pid is None
        assert (one.counters.hangs, one.counters.deaths) == (1, 1)


def test_a_long_step_of_the_engine_is_no_silence() -> None:
    """What it said meanwhile is heard first."""
    clock = Clock()
    with worker("good", clock) as one:
        wait_up(one)
        send(one, 1)
        clock.now += 100.0
        receive(one, 1)
        one.check_health()
        assert one.is_up and one.counters.hangs == 0


def test_not_ready_after_a_restart() -> None:
    clock = Clock()
    with worker("no hello", clock) as one:
        clock.now += START_SECONDS + 0.01
        one.check_health()
        assert one.counters.deaths == 1 and one.counters.hangs == 0 and one.pid is None


def test_heartbeats_do_not_end_a_wait() -> None:
    with worker("good") as one:
        one.wait_ready()
        begin = time.monotonic()
        assert one.poll(200_000) is None
        assert time.monotonic() - begin >= 0.2


def test_answers_behind_many_heartbeats_come_at_once() -> None:
    """The engine was idle for a while."""
    with worker("good") as one:
        one.wait_ready()
        wait(lambda: one.poll() is None)
        send(one, 1)
        before = num_pushed(one)
        wait(lambda: num_pushed(one) >= before + 8)
        assert len(one.poll() or ()) == 1


def test_deaf() -> None:
    clock = Clock()
    with worker("deaf", clock) as one:
        wait_up(one)
        send(one, 1 << 14)
        assert len(one.outbox) == 0
        send(one, 10)
        assert len(one.outbox) == 10  # the ring is full: they wait
        clock.now += HANG_SECONDS
        one.push()
        assert one.is_up and len(one.outbox) == 10
        clock.now += 0.01
        one.push()
        assert not one.is_up and one.pid is None and len(one.outbox) == 0
        assert one.counters.deaths == 1


def test_slow_is_not_deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Much more than the ring holds gets there, in order."""
    with worker("good") as one:
        one.wait_ready()
        count = 3 << 14
        send(one, count)
        heard, slots = 0, []
        while heard < count:
            one.push()
            messages = one.poll(1000)
            assert one.is_up
            if messages is not None:
                heard += len(messages)
                slots += messages.headers["slot"].tolist()
        assert slots == list(range(count))


def test_slow_for_longer_than_silence_is_not_deaf() -> None:
    """The ring is full at every push, but something of it was taken since the last one."""
    clock = Clock()
    with worker("good", clock) as one:
        wait_up(one)
        stop(one)
        send(one, 3 << 14)
        assert one.pid is not None
        taken = num_taken(one)
        os.kill(one.pid, signal.SIGCONT)
        wait(lambda: num_taken(one) > taken)
        stop(one)
        clock.now += HANG_SECONDS + 0.01
        one.push()
        assert one.is_up and len(one.outbox) > 0
        clock.now += HANG_SECONDS + 0.01
        one.push()
        assert one.pid is None


def test_unsent_messages_are_bounded() -> None:
    with worker("deaf", Clock(), WorkerLimits(max_waiting=100)) as one:
        wait_up(one)
        send(one, (1 << 14) + 101)
        assert one.pid is None and len(one.outbox) == 0


def test_nonsense() -> None:
    """`poll` returns messages of any content; none ends the worker."""
    with worker("nonsense") as one:
        one.wait_ready()
        heard = receive(one, 500)
        assert not {MessageKind.HELLO, MessageKind.HEARTBEAT} & set(heard.headers["kind"].tolist())
        one.check_health()
        assert one.is_up and one.why_off is None


def test_garbage_in_the_ring_of_answers() -> None:
    """Damaged messages are lost and counted; later ones are received."""
    rng = np.random.default_rng(0)
    with worker("good") as one:
        one.wait_ready()
        for corrupt in range(10):
            before = num_pushed(one)
            send(one, 40)
            wait(lambda end=before + 40: num_pushed(one) >= end)
            assert one.rings is not None
            slots = np.frombuffer(one.rings[1].memory, np.uint8)[SLOTS_AT:]
            slots[:] = rng.integers(0, 256, len(slots), np.uint8)
            assert one.poll() is None
            assert one.counters.corrupt > corrupt
            send(one, 1)
            assert len(receive(one, 1)) == 1
        one.check_health()
        assert one.is_up and one.counters.deaths == 0
        del slots


# -- the end ------------------------------------------------------------------------------------


def test_close_while_it_loads(caplog: pytest.LogCaptureFixture) -> None:
    with worker("no hello", limits=PATIENT) as one:
        pid = one.pid
        one.close()
        assert not psutil.pid_exists(pid) and "end by itself" not in caplog.text


def test_close_when_it_does_not_listen(caplog: pytest.LogCaptureFixture) -> None:
    limits = WorkerLimits(stop_seconds=0.05)
    for manner in ("stubborn", "deaf"):
        with worker(manner, limits=limits) as one:
            one.wait_ready()
            pid = one.pid
            one.close()
            assert not psutil.pid_exists(pid) and "did not end by itself" in caplog.text
            caplog.clear()
    with worker("good", limits=limits) as one:
        one.wait_ready()
        stop(one)
        one.close()
        assert "did not end by itself" in caplog.text


def test_restarts_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    with worker("good", clock) as one:
        wait_up(one)
        files, rings, children = belongings()
        for number in range(6):
            kill(one) if number % 2 else stop(one)
            clock.now += HANG_SECONDS + 0.01
            one.check_health()
            clock.now += 700.0
            one.check_health()
            wait_up(one)
            assert belongings()[:2] == (files, rings) and len(belongings()[2]) == len(children)
        assert one.counters.starts == 7 and one.counters.hangs == 3


def test_a_forgotten_worker_ends() -> None:
    one = DraftWorkerClient(SETTINGS, vocab_size=VOCAB, program=(sys.executable, SCRIPT, "good"))
    pid = one.pid
    del one
    gc.collect()
    assert not psutil.pid_exists(pid)


STARTS_ONE = """
import json, sys
from hetero_llm.spec_decode.draft_model.worker_client import DraftWorkerClient
from hetero_llm.spec_decode.draft_model.worker_settings import WorkerSettings
settings = WorkerSettings.from_json(sys.argv[1])
program = tuple(json.loads(sys.argv[2]))
one = DraftWorkerClient(settings, vocab_size=int(sys.argv[3]), program=program)
print(one.pid, flush=True)
sys.stdin.readline()
"""


@contextmanager
def parent(
    settings: WorkerSettings, program: str, vocab_size: int = VOCAB
) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A process with a worker of its own, and that worker."""
    popen = subprocess.Popen(
        [sys.executable, "-c", STARTS_ONE, settings.to_json(), program, str(vocab_size)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with popen:
        assert popen.stdout is not None
        child = psutil.Process(int(popen.stdout.readline()))
        try:
            yield popen, child
        finally:
            popen.kill()
            if child.is_running():
                child.kill()


STAND_IN = json.dumps([sys.executable, SCRIPT, "good"])


def test_who_exits_without_closing_leaves_none() -> None:
    with parent(SETTINGS, STAND_IN) as (popen, child):
        assert popen.stdin is not None
        popen.stdin.write("end\n")
        popen.stdin.flush()
        assert popen.wait(PATIENCE) == 0
        assert not child.is_running()


def test_the_real_worker_ends_with_a_parent_killed_while_it_loads() -> None:
    settings = replace(SETTINGS, folder=str(demo_folder("demo-draft")))
    with parent(settings, json.dumps(PROGRAM), 4096) as (popen, child):
        popen.kill()
        popen.wait()
        child.wait(PATIENCE)


def test_the_real_worker(caplog: pytest.LogCaptureFixture) -> None:
    """A worker starts, gets messages, ends by itself, and is killed with its parent."""
    settings = replace(SETTINGS, folder=str(demo_folder("demo-draft")))
    one = DraftWorkerClient(settings, vocab_size=4096, limits=PATIENT)
    try:
        one.wait_ready()
        send(one, 2)  # of texts that it does not know
        assert receive(one, 2).headers["kind"].tolist() == [MessageKind.REFUSED] * 2
        one.check_health()
        assert one.is_up
    finally:
        one.close()
    assert "end by itself" not in caplog.text


def test_the_real_worker_says_why_it_cannot() -> None:
    one = DraftWorkerClient(SETTINGS, vocab_size=VOCAB)
    with pytest.raises(ConfigError) as caught:
        one.wait_ready()
    one.close()
    assert str(caught.value).startswith("speculative_model='/no/such': ModelLoadError: /no/such")
    assert "\n" not in str(caught.value)
