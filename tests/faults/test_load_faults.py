"""Rows 11 to 18 of the fault matrix: clients that misbehave, too much load, and the end under load.

One server for the whole file; the last test ends it. It may open 400 files, which leaves 208
connections, and steps are slowed down, so that there is time to interfere.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import psutil
import pytest

from tests.faults.served import (
    COMPLETIONS,
    ENDLESS,
    PATIENCE,
    PROMPT,
    ServerProcess,
    error_code,
    frames,
    head,
    rest_of,
    server,
)

pytestmark = pytest.mark.faults

FILES = 400
CONNECTIONS = FILES - 64 - 128
RUNNING, QUEUED = 56, 60
HEADER_SECONDS, BODY_SECONDS, WRITE_SECONDS = 3.0, 1.0, 2.0
STEP_MS = 40
LONG_PROMPT = {"prompt": [7] * 1900, "max_tokens": 8, "ignore_eos": True}
FLAGS = f"""--verbose --num-gpu-blocks-override 4096 --no-enable-prefix-caching
    --max-num-seqs {RUNNING} --max-queued-requests {QUEUED} --max-num-batched-tokens 128
    --header-timeout {HEADER_SECONDS} --body-timeout {BODY_SECONDS} --write-timeout {WRITE_SECONDS}
    --shutdown-timeout 4 --drain-delay 1"""


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("load")
    with server(
        folder, *FLAGS.split(), faults=f"slow_step_ms={STEP_MS}", before_exec=few_files
    ) as one:
        yield one


@pytest.fixture(autouse=True)
def nothing_is_left(served: ServerProcess) -> Iterator[None]:
    """After each row no request, slot or block is held, and an ordinary request is answered."""
    yield
    if served.popen.poll() is None:
        served.wait_until_idle()
        served.probe()


def fill(served: ServerProcess, stack: ExitStack, count: int) -> None:
    """So many endless requests, accepted and read by nobody, until the stack ends."""
    for _ in range(count):
        stack.enter_context(served.stream(ENDLESS))
    served.wait(lambda: served.http.get("/load").json()["server_load"] >= count)


# row 11


@pytest.mark.parametrize("stream", [False, True])
def test_row_11_more_than_the_context(served: ServerProcess, stream: bool) -> None:
    for prompt, max_tokens in ((PROMPT, 2048), ([7] * 2048, 1), ([7] * 3000, None)):
        answer = served.post({"prompt": prompt, "max_tokens": max_tokens, "stream": stream})
        assert answer.status_code == 400
        assert error_code(answer) == "context_length_exceeded"


def test_row_11_an_omitted_max_tokens_is_clipped(served: ServerProcess) -> None:
    answer = served.post({"prompt": [7] * 2045, "ignore_eos": True})
    assert answer.status_code == 200
    assert answer.json()["usage"] == answer.json()["usage"] | {"completion_tokens": 3}
    assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_row_11_more_than_all_slots(served: ServerProcess) -> None:
    answer = served.post({"prompt": PROMPT, "n": RUNNING + 1})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "n"


# row 12


def client_gone(served: ServerProcess) -> float:
    return served.metric("hetero_llm:aborted_requests_total", cause="client_gone")


def leave_stream(served: ServerProcess) -> None:
    with served.stream(ENDLESS) as connection:
        while b"data: " not in connection.recv(1 << 12):
            pass


def leave_waiting(served: ServerProcess) -> None:
    content = json.dumps(ENDLESS).encode()
    with served.raw(head(len(content)) + content):
        served.wait(lambda: served.running() == 1)


def leave_queued(served: ServerProcess) -> None:
    with ExitStack() as stack:
        fill(served, stack, RUNNING)
        served.wait(lambda: served.running() == RUNNING)
        before = client_gone(served)
        with served.stream(ENDLESS):
            served.wait(lambda: served.metric("vllm:num_requests_waiting") == 1)
        served.wait(lambda: served.metric("vllm:num_requests_waiting") == 0, 1.0)
        assert client_gone(served) == before + 1
        assert served.running() == RUNNING


def leave_prefill(served: ServerProcess) -> None:
    served.wait_until_idle()
    before = served.metric("vllm:generation_tokens_total")
    with served.stream(LONG_PROMPT):
        served.wait(lambda: served.running() == 1)
    served.wait_until_idle()
    assert served.metric("vllm:generation_tokens_total") == before


def leave_body(served: ServerProcess) -> None:
    with served.raw(head(1000) + b'{"prompt": '):
        served.wait(lambda: served.metric("hetero_llm:http_requests_in_flight") == 2)


@pytest.mark.parametrize(
    "leave", [leave_stream, leave_waiting, leave_queued, leave_prefill, leave_body]
)
def test_row_12_a_client_leaves(served: ServerProcess, leave: Any) -> None:
    """What it waited for is aborted within a few steps, counted and logged."""
    gone = client_gone(served)
    lines = served.log().count("abort")
    leave(served)
    tokens = served.metric("vllm:generation_tokens_total")
    served.wait(lambda: client_gone(served) > gone, 2.0)
    served.wait_until_idle()
    # The figure before is as old as a heartbeat, so this is a few steps of all that ran.
    assert served.metric("vllm:generation_tokens_total") - tokens <= 10 * RUNNING
    if leave is not leave_body:  # which is no request yet
        assert served.log().count("abort") > lines


# row 13


def test_row_13_slow_readers(served: ServerProcess) -> None:
    """Fifty that read a byte a second are dropped after the write timeout, while one beside them
    has all its tokens, and the server does not grow."""
    before = served.metric("hetero_llm:aborted_requests_total", cause="stalled")
    memory = psutil.Process(served.popen.pid).memory_info().rss
    # The first event fills all buffers on the way; what follows waits in ours.
    body = {**ENDLESS, "prompt": [7] * 300, "max_tokens": 400, "logprobs": 20, "echo": True}
    slow: list[socket.socket] = []
    stop = threading.Event()

    def read_slowly() -> None:
        while not stop.wait(1.0):
            for connection in slow:
                try:
                    connection.recv(1)
                except OSError:
                    continue

    reader = threading.Thread(target=read_slowly)
    with ExitStack() as stack:
        stack.callback(reader.join)
        stack.callback(stop.set)
        reader.start()
        slow += [stack.enter_context(served.stream(body, small=True)) for _ in range(50)]
        stalled, deadline = 0.0, time.monotonic() + PATIENCE
        while stalled < 50:
            assert time.monotonic() < deadline, f"{stalled:g} of 50 were dropped"
            fast = served.post({"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True})
            assert fast.json()["usage"]["completion_tokens"] == 8
            stalled = served.metric("hetero_llm:aborted_requests_total", cause="stalled") - before
        assert stalled == 50
    grown = psutil.Process(served.popen.pid).memory_info().rss - memory
    assert grown < 200 << 20, f"{grown >> 20} MiB"


# row 14


def seconds_until_408(connection: socket.socket) -> float:
    begun = time.monotonic()
    text, _ = rest_of(connection)  # and the connection is closed
    assert text.startswith("HTTP/1.1 408 ") and '"code":"request_timeout"' in text
    assert "connection: close" in text.lower()
    return time.monotonic() - begun


def test_row_14_slow_headers(served: ServerProcess) -> None:
    """A byte now and then does not help."""
    with served.raw(b"GET /health HTTP/1.1\r\nx-a: ") as connection:
        stop = threading.Event()

        def drip() -> None:
            while not stop.wait(0.2):
                try:
                    connection.sendall(b"a")
                except OSError:
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        seconds = seconds_until_408(connection)
        stop.set()
        thread.join()
    assert seconds < HEADER_SECONDS + 2.0


def test_row_14_slow_headers_of_a_second_request(served: ServerProcess) -> None:
    with served.raw(b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n") as connection:
        assert connection.recv(1 << 12).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"GET /live HTTP/1.1\r\n")
        assert seconds_until_408(connection) < HEADER_SECONDS + 2.0


def test_row_14_a_connection_that_says_nothing(served: ServerProcess) -> None:
    with served.raw(b"") as connection:
        begun = time.monotonic()
        assert rest_of(connection) == ("", False)
        assert time.monotonic() - begun < HEADER_SECONDS + 2.0


def test_row_14_slow_body(served: ServerProcess) -> None:
    with served.raw(head(1000) + b'{"prompt": ') as connection:
        assert seconds_until_408(connection) < BODY_SECONDS + 2.0


# row 15


def test_row_15_more_connections_than_files(served: ServerProcess) -> None:
    """Five hundred at once, all before the server looks: it runs out of files, answers those that
    it has, refuses the others, and is itself again within two seconds."""
    assert f"{CONNECTIONS} connections at once instead of 2048" in served.log()
    request = b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n"
    with ExitStack() as stack:
        os.kill(served.popen.pid, signal.SIGSTOP)
        try:
            connections = [stack.enter_context(served.raw(request)) for _ in range(FILES + 100)]
        finally:
            os.kill(served.popen.pid, signal.SIGCONT)
        with ThreadPoolExecutor(16) as pool:
            firsts = list(pool.map(first_line, connections))
        statuses = {line.split(" ")[1] for line in firsts if line}
        assert statuses == {"200", "503"}
        assert sum(" 200 " in line for line in firsts) >= CONNECTIONS - 20
        assert "out of system resource" in served.log()
    begun = time.monotonic()
    with httpx.Client(base_url=served.url, timeout=2.0, trust_env=False) as fresh:
        answer = fresh.post(COMPLETIONS, json={"prompt": PROMPT, "max_tokens": 1})
    assert answer.status_code == 200 and time.monotonic() - begun < 2.0


def first_line(connection: socket.socket) -> str:
    """Of an answer; empty if the connection was refused."""
    try:
        return connection.recv(1 << 12).partition(b"\r\n")[0].decode()
    except OSError:
        return ""


def test_row_15_a_full_server_still_answers_probes(served: ServerProcess) -> None:
    with ExitStack() as stack:
        for _ in range(CONNECTIONS):
            stack.enter_context(served.raw(b""))
        fresh = stack.enter_context(httpx.Client(base_url=served.url, trust_env=False))
        assert fresh.get("/health").status_code == 200
        answer = fresh.get("/v1/models")
        assert answer.status_code == 503 and error_code(answer) == "too_many_connections"
        assert int(answer.headers["retry-after"]) >= 1 and answer.headers["x-request-id"]


# row 16


def test_row_16_a_full_queue(served: ServerProcess) -> None:
    refused = served.metric("vllm:admission_rejections_total", reason="overloaded")
    with ExitStack() as stack:
        fill(served, stack, RUNNING + QUEUED)
        served.wait(lambda: served.metric("vllm:num_requests_waiting") == QUEUED)
        for stream in (False, True):
            answer = served.post({**ENDLESS, "stream": stream})
            assert answer.status_code == 503 and error_code(answer) == "overloaded"
            assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert served.running() == RUNNING
    assert served.metric("vllm:admission_rejections_total", reason="overloaded") == refused + 2


# row 17


def test_row_17_a_deadline_in_the_queue(served: ServerProcess) -> None:
    with ExitStack() as stack:
        fill(served, stack, RUNNING)
        served.wait(lambda: served.running() == RUNNING)
        for stream in (False, True):
            answer = served.post({**ENDLESS, "stream": stream}, x_request_timeout_ms="300")
            assert answer.status_code == 408 and error_code(answer) == "request_timeout"
        served.wait(lambda: served.metric("vllm:num_requests_waiting") == 0, 1.0)
        assert served.running() == RUNNING


@pytest.mark.parametrize("stream", [False, True])
def test_row_17_a_deadline_while_running(served: ServerProcess, stream: bool) -> None:
    answer = served.post({**ENDLESS, "stream": stream}, x_request_timeout_ms="1000")
    assert answer.status_code == 200
    last = answer.json() if not stream else frames(answer.text)[-2]
    assert stream is (frames(answer.text)[-1:] == ["[DONE]"])
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["choices"][0]["timeout"] is True
    count = len(frames(answer.text)) - 2 if stream else last["usage"]["completion_tokens"]
    assert 0 < count < 1900


@pytest.mark.parametrize("stream", [False, True])
def test_row_17_a_deadline_before_the_first_token(served: ServerProcess, stream: bool) -> None:
    answer = served.post({**LONG_PROMPT, "stream": stream}, x_request_timeout_ms="300")
    assert answer.status_code == 504 and error_code(answer) == "request_timeout"


# row 18, the last of this file


def test_row_18_sigterm_under_load(served: ServerProcess) -> None:
    short = {**ENDLESS, "max_tokens": 40}
    with ExitStack() as stack:
        finishing = [stack.enter_context(served.stream(short)) for _ in range(5)]
        cut = [stack.enter_context(served.stream(ENDLESS)) for _ in range(3)]
        pool = stack.enter_context(ThreadPoolExecutor(1))
        served.wait(lambda: served.running() == 8)
        waiting = pool.submit(httpx.post, served.url + COMPLETIONS, json=ENDLESS, timeout=60)
        served.wait(lambda: served.running() == 9)
        begun = time.monotonic()
        served.popen.send_signal(signal.SIGTERM)
        served.wait(lambda: served.status("/ready") == 503, 1.0)
        assert served.status("/live") == served.status("/health") == 200
        served.probe()  # during --drain-delay requests are still taken
        served.wait(lambda: served.post(short).status_code == 503, 3.0)
        late = served.post(short)
        assert error_code(late) == "draining" and int(late.headers["retry-after"]) >= 1
        for connection in finishing:
            text, clean = rest_of(connection)
            assert clean and frames(text)[-1] == "[DONE]"
            assert frames(text)[-2]["choices"][0]["finish_reason"] == "length"
        for connection in cut:
            text, clean = rest_of(connection)
            assert not clean and frames(text)[-1]["error"]["code"] == "engine_dead"
        answer = waiting.result()
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert served.ended(10.0) == 0
        assert time.monotonic() - begun < 1.0 + 4.0 + 5.0
