"""A rank of an engine that is killed or stopped, and an engine that leaves its ranks alone."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.faults.served import (
    ENDLESS,
    ServerProcess,
    error_code,
    frames,
    is_running,
    rest_of,
    server,
)

pytestmark = pytest.mark.faults

RANK = "hetero_llm.engine.processes.rank_process"
EXIT_ENGINE_DEAD = 70
LIMIT = 5.0  # seconds from a rank's fault to the engine's end
FLAGS = (
    "--num-gpu-blocks-override", "1024", "--max-num-seqs", "4", "--cpu-backend", "torch",
    "--max-model-len", "1024",
)  # fmt: skip
KINDS = ("-tp", "-pp")
LONG = {**ENDLESS, "max_tokens": 900}


def rank_of(served: ServerProcess) -> int:
    (pid,) = (pid for pid in served.pids if RANK in psutil.Process(pid).cmdline())
    return pid


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_dies_or_hangs_ends_the_engine(
    tmp_path: Path, how: signal.Signals, busy: bool, kind: str
) -> None:
    with server(tmp_path, *FLAGS, kind, "2") as served, ExitStack() as stack:
        rank, engine = rank_of(served), served.engine
        served.probe()
        streams = []
        if busy:
            streams = [stack.enter_context(served.stream(LONG)) for _ in range(2)]
            served.wait(lambda: served.running() == 2)
        begun = time.monotonic()
        os.kill(rank, how)
        served.wait(lambda: not is_running(engine), LIMIT)
        assert not is_running(rank)
        assert time.monotonic() - begun < LIMIT
        for stream in streams:
            text, clean = rest_of(stream)
            assert not clean and frames(text)[-1]["error"]["code"] == "engine_dead"
        assert served.ended(20.0) == EXIT_ENGINE_DEAD
        what = "was ended by signal 9" if how == signal.SIGKILL else "has shown no life for 3 s"
        wanted = f"rank 1 (process {rank}) {what}"
        assert wanted in served.log(), served.log()
        assert "Traceback" not in served.log()


def test_ranks_do_not_outlive_their_engine(tmp_path: Path) -> None:
    with server(tmp_path, *FLAGS, "-tp", "2") as served:
        rank = rank_of(served)
        os.kill(rank, signal.SIGSTOP)  # the kernel ends it, since it cannot look itself
        os.kill(served.engine, signal.SIGKILL)
        served.wait(lambda: not is_running(rank), LIMIT)
        assert served.ended(20.0) == EXIT_ENGINE_DEAD


def test_a_server_that_is_asked_to_end_ends_its_ranks(tmp_path: Path) -> None:
    with server(tmp_path, *FLAGS, "-tp", "2") as served:
        answer = served.post({"prompt": "def f(", "max_tokens": 8})
        assert answer.status_code == 200, error_code(answer)
        rank = rank_of(served)
        served.popen.send_signal(signal.SIGTERM)
        assert served.ended(20.0) == 0
        assert not is_running(rank)
