"""The server's log: its form, its lines about throughput, and a reader that does not read."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from hetero_llm.engine.engine_client import EngineStats
from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server.logs import StatsLine, log_stats, server_log
from tests.server.fake_engine import FakeEngine
from tests.server.serving import LIMIT, serving
from tests.server.test_serving import running

COMPLETIONS = "/v1/completions"
F_SETPIPE_SZ = 1031
PAGE = 4096


# -- the log's form -----------------------------------------------------------------------------


def test_json_is_valid_whatever_a_user_sends(
    capfd: pytest.CaptureFixture[str], tokenizer: Tokenizer
) -> None:
    evil = 'a"}\n{"ts":"1","level":"ERROR","logger":"x","message":"forged"}\r\n\x1b[31m\u2028\x00'
    body = {"prompt": evil, "max_tokens": 2, evil: 1, "request_id": "r-\n-forged", "user": evil}
    with server_log("json") as console, serving(FakeEngine(tokenizer)) as served:
        console.say("two\nlines")
        for id, more in (("trace-1", {}), ("trace-2", {"model": evil}), ("trace-3", {"n": evil})):
            served.post(COMPLETIONS, body | more, headers={"x-request-id": id})
    out, err = capfd.readouterr()
    lines = [json.loads(line) for line in err.splitlines()]
    assert all({"ts", "level", "logger", "message"} <= line.keys() for line in lines)
    assert not [line for line in lines if line["message"] == "forged"]
    prompts = [line for line in lines if ": prompt " in line["message"]]
    assert len(prompts) == 1 and "forged" in prompts[0]["message"]
    ids = {line["request_id"] for line in lines if line["logger"].startswith("hetero_llm.server")}
    assert "trace-1" in ids and ids <= {"trace-1", "trace-2", "trace-3"}
    (said,) = map(json.loads, out.splitlines())
    assert said["message"] == "two\nlines" and said["level"] == "INFO"


def test_text_lines_cannot_be_forged(
    capfd: pytest.CaptureFixture[str], tokenizer: Tokenizer
) -> None:
    evil = "a\n2026-01-01T00:00:00.000Z ERROR api: forged"
    with server_log("text"), serving(FakeEngine(tokenizer)) as served:
        served.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, evil: 1})
        logging.getLogger("hetero_llm.x").error("%s", evil)
    lines = capfd.readouterr().err.splitlines()
    form = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|WARNING|ERROR) api: ")
    assert all(form.match(line) for line in lines)
    forged = [line for line in lines if "forged" in line]
    assert len(forged) == 2 and all("\\n2026-01-01" in line for line in forged)


def test_what_was_set_before_is_set_again(capfd: pytest.CaptureFixture[str]) -> None:
    root, ours = logging.getLogger(), logging.getLogger("hetero_llm")
    before = root.handlers[:], ours.level
    with server_log("text"):
        assert root.handlers != before[0] and ours.isEnabledFor(logging.INFO)
    assert (root.handlers, ours.level) == before


@pytest.mark.parametrize("wanted", [True, False])
def test_access_log(capfd: pytest.CaptureFixture[str], tokenizer: Tokenizer, wanted: bool) -> None:
    args: dict[str, Any] = {
        "uvicorn_log_level": "info",
        "api_key": ["sk-secret"],
        "disable_uvicorn_access_log": not wanted,
        "disable_log_requests": True,
    }
    headers = {"Authorization": "Bearer sk-secret", "x-request-id": "trace-9"}
    with server_log("json", secrets=["sk-secret"]), running(FakeEngine(tokenizer), **args) as run:
        for path in ("/health", "/metrics", "/v1/models?key=sk-secret", "/nothing%0Ax"):
            httpx.get(run.url + path, headers=headers, timeout=LIMIT)
    err = capfd.readouterr().err
    lines = [json.loads(line) for line in err.splitlines()]
    found = [line for line in lines if line["logger"] == "uvicorn.access"]
    assert "sk-secret" not in err
    if not wanted:
        assert found == []
        return
    shown = [line["message"].partition(" - ")[2] for line in found]
    assert shown == [
        '"GET /v1/models?key=*** HTTP/1.1" 200', '"GET /nothing%0Ax HTTP/1.1" 404'
    ]  # fmt: skip
    assert {line["request_id"] for line in found} == {"trace-9"}


def test_monitors_are_logged_where_that_is_wanted(
    capfd: pytest.CaptureFixture[str], tokenizer: Tokenizer
) -> None:
    with (
        server_log("text", polls=True),
        running(FakeEngine(tokenizer), uvicorn_log_level="info") as run,
    ):
        httpx.get(f"{run.url}/health", timeout=LIMIT)
    assert '"GET /health HTTP/1.1" 200' in capfd.readouterr().err


class Waits(logging.Handler):
    """Notes of two lines whether what they are about was on its way when they were made."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__()
        self.engine = engine
        self.came = threading.Event()
        self.in_time: dict[str, bool] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "uvicorn.access":
            self.in_time["answer"] = self.came.wait(LIMIT)
        elif "prompt(s)" in record.msg:
            self.in_time["request"] = len(self.engine.seen) == 1


def test_no_first_token_waits_for_the_log(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer)
    body = {"prompt": "a b c", "max_tokens": 2, "stream": True}
    handler = Waits(engine)
    with server_log("text"), running(engine, uvicorn_log_level="info") as run:
        logging.getLogger().addHandler(handler)  # `server_log` takes it away
        with httpx.stream("POST", run.url + COMPLETIONS, json=body, timeout=LIMIT) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    handler.came.set()
    assert handler.in_time == {"request": True, "answer": True}


# -- throughput ---------------------------------------------------------------------------------


def stats(**metrics: float) -> EngineStats:
    return EngineStats({"num_steps": 1, **metrics}, 1, 0.0, 0)


def test_the_line_is_vllms() -> None:
    lines = StatsLine(stats(prompt_tokens=100, generation_tokens=10), 50.0)
    after = stats(
        prompt_tokens=600, generation_tokens=260, num_requests_running=3, num_requests_waiting=2,
        kv_cache_usage_perc=0.125, prefix_cache_queries=500, prefix_cache_hits=100,
    )  # fmt: skip
    assert lines.next(after, 60.0) == (
        "Avg prompt throughput: 50.0 tokens/s, Avg generation throughput: 25.0 tokens/s, "
        "Running: 3 reqs, Waiting: 2 reqs, KV cache usage: 12.5%, Prefix cache hit rate: 20.0%"
    )
    still = lines.next(after, 70.0)
    assert still is not None and still.startswith("Avg prompt throughput: 0.0 tokens/s")
    assert still.endswith("Prefix cache hit rate: 20.0%")  # no lookup since


def test_it_is_silent_when_idle() -> None:
    done = stats(prompt_tokens=600, generation_tokens=260)
    lines = StatsLine(stats(), 0.0)
    assert lines.next(done, 10.0) is not None
    assert lines.next(done, 20.0) is None
    waiting = stats(prompt_tokens=600, generation_tokens=260, num_requests_waiting=1)
    assert "Waiting: 1 reqs" in (lines.next(waiting, 40.0) or "")


def test_drafts_are_in_the_line_while_there_are_some() -> None:
    lines = StatsLine(stats(), 0.0)
    after = stats(
        generation_tokens=30, spec_decode_num_drafts=10, spec_decode_num_draft_tokens=40,
        spec_decode_num_accepted_tokens=15,
    )  # fmt: skip
    line = lines.next(after, 10.0)
    assert line is not None
    assert line.endswith(", Mean acceptance length: 2.50, Draft acceptance rate: 37.5%")
    later = stats(**{**after.metrics, "generation_tokens": 40})
    assert "acceptance" not in (lines.next(later, 20.0) or "acceptance")


def test_the_lines_come_from_a_running_server(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hetero_llm")
    engine = FakeEngine(None)

    async def report() -> None:
        task = asyncio.create_task(log_stats(engine, 0.01))
        await asyncio.sleep(0)
        engine.generated = 7
        while not caplog.records:
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(asyncio.wait_for(report(), LIMIT))
    (line,) = [r.getMessage() for r in caplog.records]
    assert re.match(r"Avg prompt throughput: 0\.0 tokens/s, Avg generation throughput: \d", line)


# -- a reader that does not read (fault row 26) -------------------------------------------------


@contextmanager
def served_into_pipes(*flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The command with standard output and error in pipes of one page."""
    command = [sys.executable, "-m", "hetero_llm.cli", "serve", "demo", "--device", "cpu",
               "--port", "0", "--max-model-len", "512", "--cpu-threads", "1",
               *flags]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stderr is not None
        for pipe in (process.stdout, process.stderr):
            fcntl.fcntl(pipe, F_SETPIPE_SZ, PAGE)
        said = b""
        while b"curl" not in said:
            piece = os.read(process.stdout.fileno(), PAGE)
            assert piece, said + process.stderr.read()
            said += piece
        match = re.search(rb"http://[\d.:]+", said)
        assert match is not None
        yield process, match.group().decode()
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def test_row_26_nobody_reads_the_log() -> None:
    """Standard error is full again and again: requests are answered and SIGTERM ends the server.
    Where both are closed: `test_serving`, whose server has to be started, too."""
    with served_into_pipes("--log-format", "json", "--log-stats-interval", "0.1") as (process, url):
        assert process.stdout is not None and process.stderr is not None
        body = {"prompt": "log " * 400, "max_tokens": 2, "ignore_eos": True}

        def post() -> None:
            answer = httpx.post(url + COMPLETIONS, json=body, timeout=LIMIT)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 2

        for _ in range(20):  # over 30 KB of lines
            post()
        seen = os.read(process.stderr.fileno(), PAGE)
        assert len(seen) > PAGE // 2  # it was full
        assert json.loads(seen.splitlines()[0])["process"] in ("api", "engine")
        for _ in range(8):
            post()
        assert httpx.get(f"{url}/health", timeout=LIMIT).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 0
