"""Rank processes that are no ranks: how they are started, watched and ended."""

from __future__ import annotations

import gc
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import psutil
import pytest

from hetero_llm.core.errors import ConfigError, HeteroLLMError, ModelLoadError, RankDeadError
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.distributed.rank_processes import (
    NoRanks,
    RankArguments,
    RankProcesses,
    RankProgram,
)

BEGIN = """
import socket, sys, time
from hetero_llm.core.errors import ModelLoadError
from hetero_llm.distributed.control_socket import ControlSocket, RankFailed, RankReached
from hetero_llm.distributed.rank_processes import RankArguments
from hetero_llm.distributed.step_channel import StepReader
given = RankArguments.of(sys.argv[1:])
steps = StepReader(str(given.channel), given.rank)
steps.live(given.parent)
control = ControlSocket(socket.socket(fileno=given.control))
control.send(RankReached("up"))
"""
WAIT_FOR_THE_END = """
from hetero_llm.bridge.ipc.broadcast import ChannelClosedError
try:
    while True: steps.read(10**9)
except ChannelClosedError: pass
"""
NONE = np.zeros(0, np.int32)
STEP = SchedulerOutput(
    NONE, NONE, NONE, NONE, NONE, (), (), np.zeros((3, 0), np.int32), np.zeros((2, 0), np.int32)
)


@contextmanager
def ranks(
    size: int,
    code: str,
    abort: Callable[[], None] = lambda: None,
    *,
    shared_bytes: int = 0,
    fault_bytes: int = 0,
) -> Iterator[RankProcesses]:
    command = (sys.executable, "-c", BEGIN + textwrap.dedent(code))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = RankProgram(command, environment, shared_bytes, fault_bytes=fault_bytes)
    started = RankProcesses(size, program, abort)
    try:
        yield started
    finally:
        pids = started.pids
        started.shut_down()
        started.shut_down()
        assert not any(psutil.pid_exists(pid) for pid in pids)


def failure(processes: RankProcesses) -> HeteroLLMError:
    """The failure that the watch finds, for an error that nobody explains."""
    with pytest.raises(HeteroLLMError) as caught:
        while not processes.has_failed:
            pass
        processes.check()
    return caught.value


def test_ranks_end_when_the_channel_is_closed() -> None:
    with ranks(3, WAIT_FOR_THE_END) as processes:
        processes.wait_for("up")
        processes.begin_serving()
        processes.launch(STEP)
        processes.finish()
        processes.check()
        assert len(processes.pids) == 2
        held = [psutil.Process(pid) for pid in processes.pids]
    assert [psutil.wait_procs([one], 1)[1] for one in held] == [[], []]


def test_the_settings_arrive() -> None:
    code = "control.send(RankReached(control.receive_bytes().decode()))" + WAIT_FOR_THE_END
    with ranks(2, code) as processes:
        processes.send_settings(b"settings")
        processes.wait_for("settings")


def test_memory_that_all_ranks_share() -> None:
    code = """
    import os
    for fd in control.receive_bytes().split():
        os.pwrite(int(fd), str(given.rank).encode(), given.rank)
    control.send(RankReached("written"))
    """
    code = textwrap.dedent(code) + WAIT_FOR_THE_END
    with ranks(3, code, shared_bytes=4096, fault_bytes=8192) as processes:
        memories = {processes.shared: 4096, processes.faults: 8192}
        for fd, size in memories.items():
            assert os.fstat(fd).st_size == size and os.pread(fd, size, 0) == bytes(size)
        processes.send_settings(" ".join(map(str, memories)).encode())
        processes.wait_for("written")
        assert all(os.pread(fd, 4, 0) == b"\x0012\x00" for fd in memories)
    for fd in memories:
        with pytest.raises(OSError):
            os.fstat(fd)
    with ranks(2, WAIT_FOR_THE_END) as processes:
        assert processes.shared == processes.faults == -1


def test_a_start_that_fails_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise OSError("no memory")

    RankProcesses(2, RankProgram((sys.executable, "-c", ""), {}), lambda: None).shut_down()
    monkeypatch.setattr("hetero_llm.distributed.rank_processes.create_store", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigError, match="cannot be started: no memory"):
        RankProcesses(2, RankProgram((sys.executable, "-c", ""), {}), lambda: None)
    assert os.listdir("/proc/self/fd") == before


def test_what_waits_for_a_rank_ends_with_it() -> None:
    """As a group of torch does, for ten minutes, which a rank never joins."""
    never = threading.Event()
    with ranks(2, WAIT_FOR_THE_END) as processes:
        processes.wait_for("up")
        assert processes.run_watched(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            processes.run_watched(lambda: 1 // 0)
        os.kill(processes.pids[0], signal.SIGKILL)
        with pytest.raises(RankDeadError, match="SIGKILL"):
            processes.run_watched(never.wait)
    never.set()


def test_a_killed_rank_is_the_failure_of_all() -> None:
    aborted = []
    with ranks(3, WAIT_FOR_THE_END, lambda: aborted.append(1)) as processes:
        processes.wait_for("up")
        os.kill(processes.pids[1], signal.SIGKILL)
        error = failure(processes)
        wanted = f"rank 2 (process {processes.pids[1]}) was ended by signal 9 (SIGKILL)"
        assert isinstance(error, RankDeadError) and str(error) == wanted
        assert aborted == [1], "what waits on a device is ended"
        with pytest.raises(RankDeadError):
            processes.launch(STEP)
        other = RuntimeError("a collective failed")
        assert processes.why(other) is error


def test_a_rank_that_fails_for_want_of_a_killed_one_is_not_named() -> None:
    code = """
        if given.rank == 2: time.sleep(1000)
        import os, signal
        os.kill(int(control.receive_bytes()), signal.SIGKILL)
        control.send(RankFailed.of(RuntimeError("the connection is closed")))
        sys.exit(1)
    """
    with ranks(3, code) as processes:
        processes.wait_for("up")
        pid = processes.pids[1]
        processes.send_settings(str(pid).encode())
        assert str(failure(processes)) == f"rank 2 (process {pid}) was ended by signal 9 (SIGKILL)"


def test_a_stopped_rank_is_a_failure_once_it_serves() -> None:
    with ranks(2, WAIT_FOR_THE_END) as processes:
        processes.wait_for("up")
        os.kill(processes.pids[0], signal.SIGSTOP)
        assert not processes.has_failed
        processes.begin_serving()
        assert "has shown no life for 3 s" in str(failure(processes))


def test_a_rank_says_why_it_ends() -> None:
    code = "control.send(RankFailed.of(ModelLoadError('no file')))"
    with ranks(2, code) as processes:
        with pytest.raises(ModelLoadError, match="^rank 1: no file$"):
            processes.wait_for("never")
        failure(processes)


def test_a_rank_that_ends_by_itself() -> None:
    with ranks(2, "sys.exit(3)") as processes:
        assert str(failure(processes)).endswith("ended with code 3")


def test_an_error_of_this_process_is_not_explained_by_its_ranks() -> None:
    with ranks(2, WAIT_FOR_THE_END) as processes:
        error = ConfigError("a", 1, "b")
        assert processes.why(error) is error


def test_processes_end_with_their_owner() -> None:
    command = (sys.executable, "-c", BEGIN + WAIT_FOR_THE_END)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    started = RankProcesses(2, RankProgram(command, environment), lambda: None)
    started.wait_for("up")
    (process,) = (psutil.Process(pid) for pid in started.pids)
    del started
    gc.collect()
    psutil.wait_procs([process], 30)
    assert not process.is_running()


def test_a_program_that_is_not_there() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size=2: its processes cannot be st"):
        RankProcesses(2, RankProgram(("/no/program",), {}), lambda: None)
    gc.collect()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_arguments_as_words() -> None:
    given = RankArguments(1, 2, 3, 4, 5, 6, 1)
    assert RankArguments.of(given.words()) == given


def test_no_ranks() -> None:
    none, error = NoRanks(), RuntimeError()
    none.check()
    none.shut_down()
    assert none.why(error) is error
