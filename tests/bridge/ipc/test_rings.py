"""A ring beside a queue that does the same; making and refusing rings; waiting."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import resource
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.bridge import build
from hetero_llm.bridge.ipc import ring_library
from hetero_llm.bridge.ipc.messages import HEADER, MAX_WORDS, MessageKind, Outbox
from hetero_llm.bridge.ipc.rings import (
    Consumer,
    Producer,
    RingStatus,
    attach_ring,
    create_ring,
)
from hetero_llm.core.errors import RingError
from hetero_llm.utils import native_build
from hetero_llm.utils.native_build import find_compiler
from tests.bridge.ipc.tools import (
    ASLEEP,
    HEAD,
    TAIL,
    Ends,
    both_ends,
    numbers_of,
    put_numbered,
    slots_of,
)

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

NEAR_THE_END = 2**32 - 40


@settings(max_examples=150, deadline=None)
@given(
    slots=st.sampled_from([8, 16, 64]),
    start=st.sampled_from([0, 5, NEAR_THE_END]),
    max_messages=st.sampled_from([1, 3, 256]),
    steps=st.lists(st.lists(st.integers(0, 90), max_size=12) | st.none(), min_size=1, max_size=60),
)
def test_a_ring_is_a_queue_of_bounded_length(
    slots: int, start: int, max_messages: int, steps: list[list[int] | None]
) -> None:
    """A step pushes messages of these lengths after those that had no room, or pops."""
    waiting: deque[tuple[int, int]] = deque()  # not pushed yet: number and slots
    inside: deque[tuple[int, int]] = deque()
    outbox, made = Outbox(), 0
    with both_ends(slots, start=start, max_messages=max_messages) as ends:
        for lengths in [*steps, *[None] * 200]:
            if lengths is None:
                expected = [inside.popleft()[0] for _ in range(min(max_messages, len(inside)))]
                status, messages = ends.consumer.pop()
                assert status == (RingStatus.OK if expected else RingStatus.EMPTY)
                assert numbers_of(messages) == expected
                continue
            for length in lengths:
                put_numbered(outbox, made, length)
                waiting.append((made, slots_of(length)))
                made += 1
            while waiting and waiting[0][1] <= slots - sum(size for _, size in inside):
                inside.append(waiting.popleft())
            status = ends.producer.push(outbox)
            assert status == (RingStatus.FULL if waiting else RingStatus.OK)
            assert len(outbox) == len(waiting)
        assert not inside
        pushed, popped = ends.producer.counters(), ends.consumer.counters()
        assert pushed.messages == popped.messages == made - len(waiting)
        assert pushed.slots == popped.slots
        assert (popped.corrupt_slots, popped.dropped_slots, popped.bad_positions) == (0, 0, 0)


def test_bodies_of_every_length_arrive() -> None:
    lengths = [*range(200), MAX_WORDS - 13, MAX_WORDS - 1, MAX_WORDS]
    outbox = Outbox()
    with both_ends(512, start=NEAR_THE_END) as ends:
        for number, length in enumerate(lengths):
            put_numbered(outbox, number, length)
            assert ends.producer.push(outbox) == RingStatus.OK
            assert numbers_of(ends.consumer.pop().messages) == [number]
            assert ends.producer.counters().slots == sum(map(slots_of, lengths[: number + 1]))


def test_nothing_is_overwritten_in_a_full_ring() -> None:
    outbox = Outbox()
    with both_ends(8) as ends:
        for number in range(9):
            put_numbered(outbox, number, 2)
        assert ends.producer.push(outbox) == RingStatus.FULL and len(outbox) == 1
        before = ends.memory.tobytes()
        for _ in range(3):
            assert ends.producer.push(outbox) == RingStatus.FULL and len(outbox) == 1
        assert ends.memory.tobytes() == before and ends.producer.counters().full == 4
        assert numbers_of(ends.consumer.pop().messages) == list(range(8))
        assert ends.producer.push(outbox) == RingStatus.OK and len(outbox) == 0
        assert numbers_of(ends.consumer.pop().messages) == [8]
        del before


def test_pops_are_as_large_as_the_buffers() -> None:
    """What does not fit the buffers stays in the ring."""
    outbox = Outbox()
    with (
        create_ring(4096) as ring,
        Producer(ring) as producer,
        Consumer(ring, max_messages=5, max_words=MAX_WORDS) as consumer,
    ):
        for number in range(8):
            put_numbered(outbox, number, MAX_WORDS // 3)
        for number in range(8, 15):
            put_numbered(outbox, number, 3)
        assert producer.push(outbox) == RingStatus.OK
        sizes = []
        while (popped := consumer.pop()).status == RingStatus.OK:
            sizes.append(numbers_of(popped.messages))
        assert sizes == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14]]


def test_a_copy_outlives_the_next_pop() -> None:
    outbox = Outbox()
    with both_ends() as ends:
        put_numbered(outbox, 1, 30)
        ends.producer.push(outbox)
        popped = ends.consumer.pop().messages
        first = popped.copy()
        put_numbered(outbox, 2, 40)
        ends.producer.push(outbox)
        assert numbers_of(ends.consumer.pop().messages) == [2]
        assert numbers_of(first) == [1]
        # Nothing is copied without being asked for.
        assert popped.headers["generation"].tolist() == [2]


def test_views_of_any_number_of_shapes() -> None:
    """Two pops of the same shape return the same views, of which a few are kept."""
    outbox = Outbox()
    with both_ends(512, max_views=8) as ends:
        for number in range(100):
            put_numbered(outbox, number, number * number % 11)
            ends.producer.push(outbox)
            assert numbers_of(ends.consumer.pop().messages) == [number]
            assert ends.consumer.num_views <= 8
            assert ends.consumer.pop().status == RingStatus.EMPTY
        seen = []
        for number in (100, 102):
            put_numbered(outbox, number, 5)
            ends.producer.push(outbox)
            seen.append(ends.consumer.pop())
            assert numbers_of(seen[-1].messages) == [number]
        assert seen[0] is seen[1]


def test_a_timeout_is_waited_for_and_not_much_longer() -> None:
    for spin_us in (0, 200, 10**7):
        with create_ring(8) as ring, Consumer(ring, spin_us=spin_us) as consumer:
            begun = time.monotonic_ns()
            assert consumer.pop(timeout_us=30_000).status == RingStatus.TIMEOUT
            assert 30_000_000 <= time.monotonic_ns() - begun < 5_000_000_000
            assert (consumer.counters().naps > 0) == (spin_us < 30_000)
            assert consumer.pop().status == RingStatus.EMPTY


def sleeps(waiter: threading.Thread, ends: Ends) -> bool:
    """Whether the thread that pops is in the kernel and says so."""
    stat = Path(f"/proc/self/task/{waiter.native_id}/stat").read_text()
    return bool(ends.memory[ASLEEP]) and stat.rpartition(")")[2].split()[0] == "S"


@pytest.mark.parametrize("spin_us", [0, 10**7])
def test_a_waiting_consumer_is_woken(spin_us: int) -> None:
    """It would wait a minute; the producer pushes once it sleeps, or while it spins."""
    outbox, popped = Outbox(), []
    with both_ends(spin_us=spin_us) as ends:
        waiter = threading.Thread(
            target=lambda: popped.append(ends.consumer.pop(timeout_us=60_000_000))
        )
        waiter.start()
        while spin_us == 0 and not sleeps(waiter, ends):
            pass
        put_numbered(outbox, 3, 3)
        assert ends.producer.push(outbox) == RingStatus.OK
        waiter.join(30)
        assert not waiter.is_alive()
        assert popped[0].status == RingStatus.OK and numbers_of(popped[0].messages) == [3]
        assert ends.producer.counters().wakes == (spin_us == 0)
        put_numbered(outbox, 4, 3)  # the consumer is awake: no wake-up
        ends.producer.push(outbox)
        assert ends.producer.counters().wakes == (spin_us == 0)


def test_a_sleeper_whose_flag_is_gone_looks_for_itself() -> None:
    outbox, popped = Outbox(), []
    with both_ends() as ends:
        waiter = threading.Thread(
            target=lambda: popped.append(ends.consumer.pop(timeout_us=60_000_000))
        )
        waiter.start()
        while not sleeps(waiter, ends):
            pass
        np.frombuffer(ends.ring.memory, np.uint8)[ASLEEP : ASLEEP + 4] = 0
        put_numbered(outbox, 3, 3)
        ends.producer.push(outbox)
        waiter.join(30)
        assert not waiter.is_alive() and numbers_of(popped[0].messages) == [3]
        assert ends.consumer.counters().missed_wakes == 1


@contextmanager
def alarm_after(seconds: float, handler: Callable[[], None]) -> Iterator[None]:
    old = signal.signal(signal.SIGALRM, lambda *_: handler())
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_a_wait_goes_on_after_a_signal() -> None:
    seen: list[int] = []
    with both_ends() as ends, alarm_after(0.02, lambda: seen.append(1)):
        begun = time.monotonic_ns()
        assert ends.consumer.pop(timeout_us=200_000).status == RingStatus.TIMEOUT
        assert time.monotonic_ns() - begun >= 200_000_000 and seen == [1]


def test_a_signals_handler_can_end_a_wait() -> None:
    def stop() -> None:
        raise InterruptedError("enough")

    with both_ends() as ends, alarm_after(0.02, stop):
        begun = time.monotonic_ns()
        with pytest.raises(InterruptedError, match="enough"):
            ends.consumer.pop(timeout_us=200_000_000)
        assert time.monotonic_ns() - begun < 100_000_000_000


def test_each_end_is_opened_once() -> None:
    with create_ring(8) as ring, Producer(ring), Consumer(ring) as consumer:
        for role in (Producer, Consumer):
            with pytest.raises(RingError, match="open already"):
                role(ring)
        consumer.close()
        consumer.close()
        with Consumer(ring):
            pass


def test_memory_stays_while_an_end_is_open() -> None:
    ring = create_ring(8)
    producer = Producer(ring)
    with pytest.raises(BufferError):
        ring.close()
    producer.close()
    ring.close()


def test_an_end_goes_on_where_the_last_one_stopped() -> None:
    outbox = Outbox()
    with create_ring(16, start=NEAR_THE_END) as ring:
        for number in range(50):
            put_numbered(outbox, number, 20)
            with Producer(ring) as producer:
                assert producer.push(outbox) == RingStatus.OK
            with Consumer(ring) as consumer:
                assert numbers_of(consumer.pop().messages) == [number]


def test_what_is_not_the_handles_ring_is_refused() -> None:
    with create_ring(16) as ring, create_ring(16) as other, create_ring(32) as larger:
        with attach_ring(f"{os.dup(ring.fd)}:16:{ring.stamp:x}") as again:
            assert (again.slots, again.stamp) == (ring.slots, ring.stamp)
        for handle, why in (
            (f"{other.fd}:16:{ring.stamp:x}", "another ring"),
            (f"{larger.fd}:16:{larger.stamp:x}", "size"),
            ("16:16", "no memory"),
            ("x:16:0", "no memory"),
            (f"{2**70}:16:0", "no memory"),
            (f"987654:16:{ring.stamp:x}", "Bad file descriptor"),
        ):
            with pytest.raises(RingError, match=why):
                attach_ring(handle)


@pytest.mark.parametrize(
    ("offset", "value", "why"),
    [(0, 1, "no ring"), (16, 9, "version"), (20, 128, "version"), (24, 64, "header is damaged")],
)
def test_a_damaged_or_foreign_header_is_refused(offset: int, value: int, why: str) -> None:
    with create_ring(16) as ring:
        np.frombuffer(ring.memory, np.uint8)[offset] = value
        with pytest.raises(RingError, match=why):
            attach_ring(ring.handle)


def test_an_empty_or_short_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short"
    for content, why in ((b"", "no memory"), (b"x" * 100, "too small"), (b"x" * 5000, "no ring")):
        path.write_bytes(content)
        fd = os.open(path, os.O_RDWR)
        with pytest.raises(RingError, match=why):
            attach_ring(f"{fd}:16:0")
        os.close(fd)


def test_ends_refuse_damaged_positions() -> None:
    for offset in (HEAD, TAIL):
        with create_ring(16) as ring:
            np.frombuffer(ring.memory, np.uint8)[offset] ^= 1
            for role in (Producer, Consumer):
                with pytest.raises(RingError, match="positions are damaged"):
                    role(ring)


def test_nothing_is_left_open() -> None:
    with both_ends():
        pass
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with create_ring(16) as ring, Producer(ring):
            other = attach_ring(f"{os.dup(ring.fd)}:{ring.slots}:{ring.stamp:016x}")
            Consumer(other).close()
            other.close()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_memory_cannot_be_shrunk() -> None:
    with create_ring(16) as ring, pytest.raises(PermissionError):
        os.ftruncate(ring.fd, 0)


def without_memfd(*_: object) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def test_without_memfd_a_file_without_a_name_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "memfd_create", without_memfd)
    outbox = Outbox()
    with caplog.at_level(logging.WARNING), both_ends() as ends:
        assert len(caplog.messages) == 1 and "no memfd (Function not implemented)" in caplog.text
        assert os.readlink(f"/proc/self/fd/{ends.ring.fd}").endswith("(deleted)")
        put_numbered(outbox, 5, 50)
        ends.producer.push(outbox)
        assert numbers_of(ends.consumer.pop().messages) == [5]
        other = attach_ring(f"{os.dup(ends.ring.fd)}:{ends.ring.slots}:{ends.ring.stamp:x}")
        other.close()


def test_no_memory_at_all_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", without_memfd)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = sorted(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        with pytest.raises(RingError, match="5120 bytes of shared memory cannot be had: "):
            create_ring(64)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_without_a_compiler_there_are_no_rings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ring_library.load.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "which", lambda _: None)
            patch.setenv("HETERO_LLM_CACHE_DIR", str(tmp_path))
            with pytest.raises(RingError, match="no C\\+\\+ compiler found"):
                create_ring(16)
            with pytest.raises(RingError, match="no C\\+\\+ compiler found"):
                Outbox()
            assert build.main([]) == 1
            result = capsys.readouterr().err
            assert result == "the library of the rings cannot be built: no C++ compiler found\n"
            patch.setenv("HETERO_LLM_NATIVE", "0")
            with pytest.raises(RingError, match="HETERO_LLM_NATIVE=0"):
                create_ring(16)
        with create_ring(16):
            pass
    finally:
        ring_library.load.cache_clear()


def test_build_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of the three libraries, without optimization: the third takes as long as both."""
    assert [name for name, _ in build.RECIPES] == ["rings", "KV copier", "host pool"]
    monkeypatch.setattr(build, "RECIPES", build.RECIPES[::2])
    monkeypatch.setenv("HETERO_LLM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(native_build, "FAST", ("-O0",))
    monkeypatch.setattr(native_build, "SANITIZED", ("-O0", *native_build.SANITIZERS))
    assert build.main(["--sanitize"]) == 0
    lines = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    built = {Path(path) for path in lines.values()}
    assert len(built) == 4 and set(tmp_path.iterdir()) == built
    for name in ("rings", "host pool"):
        plain, sanitized = Path(lines[name]), Path(lines[f"{name} with sanitizers"])
        assert b"__asan_init" in sanitized.read_bytes()
        assert b"__asan_init" not in plain.read_bytes()


@given(st.binary(max_size=200), st.integers(0, 2**32 - 1))
def test_both_checksums_are_crc32c(data: bytes, seed: int) -> None:
    crc = ring_library.load().quick.hetero_crc32c
    assert crc(b"123456789", 9, 0, 0) == crc(b"123456789", 9, 0, 1) == 0xE3069283
    assert crc(data, len(data), seed, 0) == crc(data, len(data), seed, 1)


def test_a_body_that_is_not_as_its_header_says_is_our_own_bug() -> None:
    library = ring_library.load().quick
    headers = np.zeros(2, HEADER)
    headers["kind"], headers["words"] = (MessageKind.HEARTBEAT, MessageKind.NODES), (0, 9)
    words = np.arange(9, dtype=np.uint32)
    with create_ring(64) as ring, Consumer(ring) as consumer:
        memory = ctypes.c_char.from_buffer(ring.memory)
        producer = ctypes.c_void_p(library.hetero_ring_open(ctypes.addressof(memory), 0))

        def push(total: int) -> int:
            return int(
                library.hetero_ring_push(producer, headers.ctypes.data, words.ctypes.data, 2, total)
            )

        for sizes, total in (((0, 8), 9), ((1, 9), 9), ((0, MAX_WORDS + 1), MAX_WORDS + 1)):
            headers["words"] = sizes
            assert push(total) < 0
        assert consumer.pop().status == RingStatus.EMPTY
        headers["words"] = 0, 9
        assert push(9) == 2
        popped = consumer.pop().messages
        assert popped.headers.tolist() == headers.tolist()
        assert popped.words.tolist() == words.tolist()
        library.hetero_ring_close(producer)
        del memory
