"""The channel from one process to several."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_llm.bridge.ipc.broadcast import (
    MAX_READERS,
    Broadcast,
    BroadcastReader,
    BroadcastWriter,
    ChannelClosedError,
    attach_broadcast,
    create_broadcast,
)
from hetero_llm.core.errors import RingError

SIZE = 1 << 12  # bytes of the frames, the smallest


class NoRoom(Exception):
    pass


def no_room() -> None:
    raise NoRoom


@contextmanager
def opened(
    readers: int, *, size: int = SIZE, start: int = 0
) -> Iterator[tuple[Broadcast, BroadcastWriter, list[BroadcastReader]]]:
    channel = create_broadcast(readers, size=size, start=start)
    writer = BroadcastWriter(channel, readers)
    reading = [BroadcastReader(channel, number) for number in range(readers)]
    try:
        yield channel, writer, reading
    finally:
        for reader in reading:
            reader.free()
        writer.free()
        channel.close()


def message(number: int, words: int) -> bytes:
    return np.arange(number, number + words, dtype=np.int32).tobytes()


@given(
    lengths=st.lists(st.integers(0, 255), max_size=60),
    readers=st.integers(1, 3),
    start=st.sampled_from([0, 2**32 - 1024, 2**40]),
    eager=st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_every_reader_gets_every_message_in_order(
    lengths: list[int], readers: int, start: int, eager: list[bool]
) -> None:
    """Whether they read at once or when the channel is full."""
    with opened(readers, start=start) as (_, writer, reading):
        taken: list[list[bytes]] = [[] for _ in reading]

        def read_all() -> None:
            for reader, got in zip(reading, taken, strict=True):
                while (words := reader.read(0)) is not None:
                    got.append(words.tobytes())

        sent = [message(number, words) for number, words in enumerate(lengths)]
        for one, at_once in zip(sent, eager):
            writer.write(one, read_all)
            if at_once:
                read_all()
        read_all()
        assert taken == [sent] * readers
        assert writer.beats()[1] == [0] * readers


def test_a_message_longer_than_the_channel_comes_in_frames() -> None:
    code = (
        "import sys, hashlib\n"
        "from hetero_llm.bridge.ipc.broadcast import BroadcastReader, attach_broadcast\n"
        "reader = BroadcastReader(attach_broadcast(sys.argv[1]), 0)\n"
        "for _ in range(2): print(hashlib.sha256(reader.read(60_000_000).tobytes()).hexdigest())\n"
    )
    long = message(7, 100_000)
    channel = create_broadcast(1, size=SIZE)
    writer = BroadcastWriter(channel, 1)
    command = [sys.executable, "-c", code, channel.handle]
    with subprocess.Popen(command, pass_fds=[channel.fd], stdout=subprocess.PIPE) as child:
        writer.write(long, lambda: None)
        writer.write(message(1, 3), lambda: None)
        printed = child.communicate()[0].decode().split()
    assert printed == [sha256(one).hexdigest() for one in (long, message(1, 3))]
    writer.free()
    channel.close()


def test_a_writer_without_room_waits_for_the_slowest_reader() -> None:
    with opened(2) as (_, writer, reading):
        written = 0
        with suppress(NoRoom):
            while True:
                writer.write(message(written, 100), no_room)
                written += 1
        assert written > 2
        for _ in range(written):
            assert reading[0].read(0) is not None
        assert reading[0].read(0) is None
        with pytest.raises(NoRoom):
            writer.write(message(0, 100), no_room)
        assert reading[1].read(0) is not None
        writer.write(message(0, 100), no_room)


def test_a_read_times_out_and_a_closed_channel_ends() -> None:
    with opened(1) as (_, writer, (reader,)):
        assert reader.read(1000) is None
        writer.write(message(1, 2), no_room)
        writer.end()
        words = reader.read(0)
        assert words is not None and words.tolist() == [1, 2] and words.flags.writeable
        with pytest.raises(ChannelClosedError):
            reader.read(1000)


def test_damaged_memory_is_refused() -> None:
    with opened(1) as (channel, writer, (reader,)):
        writer.write(message(1, 2), no_room)
        np.frombuffer(channel.memory, np.uint8)[(1 << 14)] ^= 1  # the first frame's position
        with pytest.raises(RingError, match="damaged"):
            reader.read(0)


def test_what_is_no_channel_is_refused() -> None:
    with opened(1) as (channel, _, _):
        with pytest.raises(RingError, match="no channel with such a reader"):
            BroadcastReader(channel, 1)
        np.frombuffer(channel.memory, np.uint8)[0] ^= 1
        with pytest.raises(RingError, match="no channel"):
            BroadcastWriter(channel, 1)
        np.frombuffer(channel.memory, np.uint8)[0] ^= 1
    for handle in ("x", "9999"):
        with pytest.raises(RingError, match="leads to no memory"):
            attach_broadcast(handle)
    assert MAX_READERS == 63


def test_a_reader_whose_interpreter_is_stuck_gives_signs_of_life() -> None:
    code = (
        "import sys, os\n"
        "from hetero_llm.bridge.ipc.broadcast import BroadcastReader, attach_broadcast\n"
        "reader = BroadcastReader(attach_broadcast(sys.argv[1]), 0)\n"
        "reader.live(int(sys.argv[2]))\n"
        "sys.setswitchinterval(1000)\n"
        "print('up', flush=True)\n"
        "while True: pass\n"
    )
    channel = create_broadcast(1, size=SIZE)
    writer = BroadcastWriter(channel, 1)
    command = [sys.executable, "-c", code, channel.handle, str(os.getpid())]
    with subprocess.Popen(command, pass_fds=[channel.fd], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        first = writer.beats()[0][0]
        while writer.beats()[0][0] < first + 2:
            assert child.poll() is None
        child.kill()
    writer.free()
    channel.close()


def test_a_reader_ends_when_its_parent_is_another_one() -> None:
    code = (
        "import sys, time\n"
        "from hetero_llm.bridge.ipc.broadcast import BroadcastReader, attach_broadcast\n"
        "reader = BroadcastReader(attach_broadcast(sys.argv[1]), 0)\n"
        "reader.live(1)\n"
        "time.sleep(1000)\n"
    )
    channel = create_broadcast(1, size=SIZE)
    command = [sys.executable, "-c", code, channel.handle]
    child = subprocess.run(command, pass_fds=[channel.fd], timeout=60)
    assert child.returncode == -signal.SIGKILL
    channel.close()
