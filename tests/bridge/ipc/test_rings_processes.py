"""Two processes: messages arrive in order whatever the timing; either side may be killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_llm.bridge.ipc.messages import Outbox, put_stop
from hetero_llm.bridge.ipc.rings import Consumer, Producer, Ring, RingStatus, create_ring
from hetero_llm.utils.native_build import find_compiler
from tests.bridge.ipc.peer import length_of
from tests.bridge.ipc.tools import ASLEEP, numbers_of, put_numbered

# A wait that is not woken sits in C, where signals do not reach Python.
pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler"),
    pytest.mark.timeout(120, method="thread"),
]

ROOT = Path(__file__).parents[3]
LONG_US = 30_000_000


@contextmanager
def peer(
    role: str, seed: int, *rings: Ring, count: int | None = None
) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-m", "tests.bridge.ipc.peer", role, str(seed)]
    command += [ring.handle for ring in rings] + ([] if count is None else [str(count)])
    process = subprocess.Popen(command, pass_fds=[ring.fd for ring in rings], cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("seed", range(2))
def test_messages_of_another_process_arrive_in_order(seed: int) -> None:
    rng, count, popped = random.Random(seed), 3000, 0
    with (
        create_ring(64, start=2**32 - 500) as ring,
        peer("produce", seed, ring, count=count),
        Consumer(ring, spin_us=rng.choice([0, 30])) as consumer,
    ):
        while popped < count:
            status, messages = consumer.pop(timeout_us=rng.choice([0, 50, LONG_US]))
            assert status in (RingStatus.OK, RingStatus.EMPTY, RingStatus.TIMEOUT)
            numbers = numbers_of(messages)
            assert numbers == list(range(popped, popped + len(numbers)))
            popped += len(numbers)
        assert consumer.pop().status == RingStatus.EMPTY
        counters = consumer.counters()
        assert counters.corrupt_slots == counters.bad_positions == 0


def test_another_process_gets_messages_in_order() -> None:
    outbox, count = Outbox(), 3000
    with (
        create_ring(64) as ring,
        peer("consume", 5, ring, count=count) as process,
        Producer(ring) as producer,
    ):
        for number in range(count):
            put_numbered(outbox, number, length_of(number))
        while producer.push(outbox) == RingStatus.FULL:
            assert process.poll() in (None, 0)
        assert process.wait(60) == 0
        assert producer.counters().full > 0


@pytest.mark.parametrize("seed", range(2))
def test_both_directions(seed: int) -> None:
    """One message at a time, so that each side meets the other one asleep again and again."""
    outbox = Outbox()
    with (
        create_ring(64) as there,
        create_ring(64) as back,
        peer("echo", seed, there, back) as other,
        Producer(there) as producer,
        Consumer(back, spin_us=20 * seed) as consumer,
    ):
        for number in range(500):
            put_numbered(outbox, number, length_of(number))
            producer.push(outbox)
            status, messages = consumer.pop(timeout_us=LONG_US)
            assert status == RingStatus.OK and numbers_of(messages) == [number]
        # Some may be a busy machine's: the nap ended by itself, then the message came.
        assert consumer.counters().missed_wakes < 50
        put_stop(outbox)
        producer.push(outbox)
        assert other.wait(60) == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_producer_leaves_whole_messages(seed: int) -> None:
    popped, stop = 0, random.Random(seed).randrange(1, 400)
    with (
        create_ring(64) as ring,
        peer("produce", seed, ring) as process,
        Consumer(ring, spin_us=0) as consumer,
    ):
        while popped < stop:
            status, messages = consumer.pop(timeout_us=LONG_US)
            assert status == RingStatus.OK
            numbers = numbers_of(messages)
            assert numbers == list(range(popped, popped + len(numbers)))
            popped += len(numbers)
        process.kill()
        process.wait()
        while (left := consumer.pop(timeout_us=1000)).status == RingStatus.OK:
            numbers = numbers_of(left.messages)
            assert numbers == list(range(popped, popped + len(numbers)))
            popped += len(numbers)
        assert left.status == RingStatus.TIMEOUT
        assert consumer.counters().corrupt_slots == 0
    assert not [name for name in os.listdir("/dev/shm") if "hetero-llm-ring" in name]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_consumer_that_is_gone_leaves_a_full_ring(how: signal.Signals) -> None:
    outbox = Outbox()
    with create_ring(64) as ring, peer("consume", 1, ring) as process, Producer(ring) as producer:
        number = 0
        while producer.counters().slots < 500:  # so it has taken most of them
            if not len(outbox):
                put_numbered(outbox, number, length_of(number))
                number += 1
            producer.push(outbox)
        process.send_signal(how)
        os.waitpid(process.pid, os.WUNTRACED)
        for _ in range(100):
            put_numbered(outbox, number, 4)
        producer.push(outbox)
        before = producer.counters()
        for _ in range(1000):
            assert producer.push(outbox) == RingStatus.FULL
        after = producer.counters()
        assert after.slots == before.slots and after.wakes == before.wakes


def test_a_consumer_killed_in_its_sleep_costs_one_wake() -> None:
    outbox = Outbox()
    with create_ring(64) as there, create_ring(64) as back, peer("echo", 0, there, back) as process:
        while not there.memory[ASLEEP]:
            assert process.poll() is None
        process.kill()
        process.wait()
        with Producer(there) as producer:
            for number in range(10):
                put_numbered(outbox, number, 4)
                assert producer.push(outbox) == RingStatus.OK
            assert producer.counters().wakes == 1


def test_a_stopped_producer_is_waited_for_no_longer_than_asked() -> None:
    popped = 0
    with create_ring(64) as ring, peer("produce", 9, ring) as process, Consumer(ring) as consumer:
        assert consumer.pop(timeout_us=LONG_US).status == RingStatus.OK
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        while (left := consumer.pop(timeout_us=2000)).status == RingStatus.OK:
            popped += len(left.messages)
        assert left.status == RingStatus.TIMEOUT
        process.send_signal(signal.SIGCONT)
        status, messages = consumer.pop(timeout_us=LONG_US)
        assert status == RingStatus.OK and len(numbers_of(messages)) > 0


def test_a_handle_of_another_ring_is_refused_over_there() -> None:
    with create_ring(16) as ring, create_ring(16) as other:
        forged = replace(ring, stamp=other.stamp)
        command = [sys.executable, "-m", "tests.bridge.ipc.peer", "produce", "0", forged.handle]
        done = subprocess.run(command, pass_fds=[ring.fd], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 1
        assert "RingError" in done.stderr and "another ring than the handle's" in done.stderr
