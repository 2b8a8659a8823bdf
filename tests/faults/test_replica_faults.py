"""Several engines: one of a server's dies, one of a router's servers dies or drains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.faults.served import (
    COMPLETIONS,
    ENDLESS,
    ENGINE,
    PATIENCE,
    PROMPT,
    ROOT,
    ServerProcess,
    frames,
    rest_of,
    server,
)

pytestmark = pytest.mark.faults

EXIT_ENGINE_DEAD = 70
FLAGS = ("--num-gpu-blocks-override", "512", "--max-num-seqs", "4")
SHORT = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}


def engines(served: ServerProcess) -> list[int]:
    """In the order of their start."""
    found = [psutil.Process(pid) for pid in served.pids]
    ours = [one for one in found if ENGINE in one.cmdline()]
    return [one.pid for one in sorted(ours, key=lambda one: one.create_time())]


def test_a_dead_engine_of_two_ends_the_server_with_one_line(tmp_path: Path) -> None:
    with server(tmp_path, *FLAGS, "--data-parallel-size", "2") as served, ExitStack() as stack:
        streams = [stack.enter_context(served.stream(ENDLESS)) for _ in range(4)]
        served.wait(lambda: served.running() == 4)
        _, second = engines(served)
        for replica in "01":
            name = "hetero_llm:replica_num_requests_running"
            assert served.metric(name, replica=replica) == 2
        os.kill(second, signal.SIGKILL)
        for connection in streams:
            text, clean = rest_of(connection)
            assert not clean and frames(text)[-1]["error"]["code"] == "engine_dead"
        assert served.ended(20) == EXIT_ENGINE_DEAD
        lines = [line for line in served.log().splitlines() if "is dead" in line]
        assert lines and all(
            "engine 1 of 2 is dead" in line and "signal 9" in line for line in lines
        )


def test_two_engines_drain(tmp_path: Path) -> None:
    with server(tmp_path, *FLAGS, "--data-parallel-size", "2") as served, ExitStack() as stack:
        body = {**ENDLESS, "max_tokens": 300}
        streams = [stack.enter_context(served.stream(body)) for _ in range(4)]
        served.wait(lambda: served.running() == 4)
        served.popen.send_signal(signal.SIGTERM)
        for connection in streams:
            text, clean = rest_of(connection)
            assert clean and frames(text)[-1] == "[DONE]"
        assert served.ended(30) == 0


@contextmanager
def router(*urls: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A router before these servers, and a client of it."""
    words = [sys.executable, "-m", "hetero_llm.cli", "route", *urls, "--port", "0"]
    flags = ["--health-seconds", "0.2", "--health-path", "/ready"]
    popen = subprocess.Popen([*words, *flags], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert popen.stdout is not None
        url = popen.stdout.readline().split()[2].rstrip(",")
        with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as http:
            yield popen, http
    finally:
        popen.kill()
        popen.wait()


def num_up(http: httpx.Client) -> int:
    return sum(one["up"] for one in http.get("/router/replicas").json())


def test_a_server_that_dies_in_mid_stream_and_another_that_drains(tmp_path: Path) -> None:
    with (
        server(tmp_path, *FLAGS) as one,
        server(tmp_path, *FLAGS) as two,
        router(one.url, two.url) as (popen, http),
    ):
        assert http.get("/v1/models").json()["data"][0]["id"] == "demo"
        with http.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            one.wait(lambda: one.running() + two.running() == 1)
            dying, other = (one, two) if one.running() else (two, one)
            dying.popen.kill()
            with pytest.raises(httpx.RemoteProtocolError):  # not the end of a whole answer
                for _ in lines:
                    pass
        for _ in range(6):  # no client sees that one is gone
            assert http.post(COMPLETIONS, json=SHORT).status_code == 200
        other.wait(lambda: num_up(http) == 1)
        with http.stream(
            "POST", COMPLETIONS, json={**ENDLESS, "max_tokens": 300, "stream": True}
        ) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            other.popen.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        other.wait(lambda: num_up(http) == 0)
        refused = http.post(COMPLETIONS, json=SHORT)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        popen.send_signal(signal.SIGTERM)
        assert popen.wait(PATIENCE) == 0
