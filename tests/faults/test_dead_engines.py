"""Rows 6, 7 and 19 of the fault matrix: a server whose engine dies or hangs, or that is ended.

Every test ends its server, so each has its own.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest

from tests.faults.served import (
    COMPLETIONS,
    ENDLESS,
    ServerProcess,
    error_code,
    frames,
    is_running,
    rest_of,
    server,
)

pytestmark = pytest.mark.faults

EXIT_ENGINE_DEAD = 70
STEP_TIMEOUT = 2.0
FLAGS = ("--num-gpu-blocks-override", "1024", "--max-num-seqs", "4")
SLOW = "slow_step_ms=30"


class Load:
    """Three streams of which each has begun, one request that waits for its whole answer, and
    three in the queue."""

    def __init__(self, served: ServerProcess, stack: ExitStack) -> None:
        self.streams = [stack.enter_context(served.stream(ENDLESS)) for _ in range(3)]
        for connection in self.streams:
            assert b"text/event-stream" in connection.recv(1 << 10)
        pool = stack.enter_context(ThreadPoolExecutor(4))
        served.wait(lambda: served.running() == 3)
        self.whole: list[Future[httpx.Response]] = [
            pool.submit(httpx.post, served.url + COMPLETIONS, json=ENDLESS, timeout=60)
            for _ in range(4)
        ]
        served.wait(lambda: served.metric("vllm:num_requests_waiting") == 3)

    def check_ends(self) -> None:
        """An error frame and no clean end; 503 where no status had been sent."""
        for connection in self.streams:
            text, clean = rest_of(connection)
            assert not clean
            assert frames(text)[-1]["error"]["code"] == "engine_dead"
            assert all(one.get("choices", [{}])[0].get("finish_reason") is None
                       for one in frames(text))  # fmt: skip
        for waiting in self.whole:
            answer = waiting.result(20)
            assert answer.status_code == 503 and error_code(answer) == "engine_dead"
            assert int(answer.headers["retry-after"]) >= 1


def test_row_06_kill_engine(tmp_path: Path) -> None:
    with server(tmp_path, *FLAGS, faults=SLOW) as served, ExitStack() as stack:
        load = Load(served, stack)
        os.kill(served.engine, signal.SIGKILL)
        served.wait(lambda: served.status("/health") == 503, 1.0)
        assert served.status("/live") == served.status("/ready") == 503
        refused = served.post(ENDLESS)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        load.check_ends()
        assert served.ended(10.0) == EXIT_ENGINE_DEAD
        assert "signal 9" in served.log()


@pytest.mark.parametrize("how", ["SIGSTOP", "endless loop"])
def test_row_07_hung_engine(tmp_path: Path, how: str) -> None:
    faults = SLOW if how == "SIGSTOP" else f"{SLOW},stall_step_after=300"
    flags = (*FLAGS, "--step-timeout", str(STEP_TIMEOUT))
    with server(tmp_path, *flags, faults=faults) as served, ExitStack() as stack:
        load = Load(served, stack)
        begun = time.monotonic()
        if how == "SIGSTOP":
            os.kill(served.engine, signal.SIGSTOP)
            served.wait(lambda: served.status("/live") == 503, STEP_TIMEOUT + 5.0)
        else:
            served.wait(lambda: served.status("/live") == 503)
        assert time.monotonic() - begun > STEP_TIMEOUT - 1.0, "a step may take that long"
        assert served.status("/health") == served.status("/ready") == 503
        refused = served.post(ENDLESS)
        assert refused.status_code == 503 and error_code(refused) == "engine_hung"
        assert int(refused.headers["retry-after"]) >= 1
        load.check_ends()
        assert served.ended(20.0) == EXIT_ENGINE_DEAD
        log = served.log()
        assert "has shown no life" in log
        assert "most recent call first" in log and "engine_process.py" in log, "the stacks"
        assert how == "SIGSTOP" or "in stall_if" in log


def test_row_07_and_19_a_hung_engine_that_may_stay_and_a_killed_parent(tmp_path: Path) -> None:
    """With --keep-alive-on-hang the server waits, and recovers with its engine."""
    flags = (*FLAGS, "--step-timeout", str(STEP_TIMEOUT), "--keep-alive-on-hang")
    with server(tmp_path, *flags, faults=SLOW) as served, ExitStack() as stack:
        stream = stack.enter_context(served.stream({**ENDLESS, "max_tokens": 20}))
        served.wait(lambda: served.running() == 1)
        os.kill(served.engine, signal.SIGSTOP)
        served.wait(lambda: served.status("/live") == 503, STEP_TIMEOUT + 5.0)
        time.sleep(7.0)  # what ends a server without the flag
        assert served.popen.poll() is None and served.status("/live") == 503
        assert psutil.Process(served.engine).status() == psutil.STATUS_STOPPED
        os.kill(served.engine, signal.SIGCONT)
        served.wait(lambda: served.status("/live") == 200, 5.0)
        text, clean = rest_of(stream) if served.status("/live") == 200 else ("", False)
        assert clean and frames(text)[-1] == "[DONE]"
        served.wait_until_idle()
        served.probe()

        Load(served, stack)
        engine = served.engine
        os.kill(engine, signal.SIGSTOP)  # it cannot look whether its parent is there
        served.popen.kill()
        served.wait(lambda: not is_running(engine), 2.0)
        assert served.ended(1.0) == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_row_19_a_second_signal(tmp_path: Path, number: signal.Signals) -> None:
    """Neither --drain-delay nor --shutdown-timeout holds it up."""
    flags = (*FLAGS, "--shutdown-timeout", "60")
    delay = ("--drain-delay", "60") if number is signal.SIGINT else ()
    with server(tmp_path, *flags, *delay, faults=SLOW) as served, ExitStack() as stack:
        load = Load(served, stack)
        served.popen.send_signal(number)
        served.wait(lambda: served.status("/ready") == 503, 2.0)
        begun = time.monotonic()
        served.popen.send_signal(number)
        code = served.ended(10.0)
        assert time.monotonic() - begun < 2.5
        assert code == 0
        load.check_ends()
