"""The server's life: binding, starting, draining, ending."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero_llm.config.args import resolve_engine_args, resolve_server_args
from hetero_llm.config.engine_config import ConstraintsConfig, EngineConfig
from hetero_llm.core.errors import ConfigError
from hetero_llm.engine.engine_client import PoolingInfo
from hetero_llm.server.app import build_app
from hetero_llm.server.regions.formats import MessageFormat
from hetero_llm.server.serving import (
    EXIT_ENGINE_DEAD,
    Server,
    bind,
    drain_on_hangup,
    freeze_collector,
    read_template,
    serve,
    settings_of,
    uvicorn_config,
)
from hetero_llm.server.settings import ServerSettings
from hetero_llm.server.startup import plan_table, ready_text
from tests.helpers.time_limits import growing_limits
from tests.server.fake_engine import FakeEngine, demo_tokenizer
from tests.server.serving import LIMIT

BODY = {"prompt": "a b c", "max_tokens": 8, "ignore_eos": True}


class Run:
    """A `Server` with a fake engine in a thread; `code` is its exit code once it has ended."""

    def __init__(self, engine: FakeEngine, **args: Any) -> None:
        self.engine = engine
        arguments = resolve_server_args({"uvicorn_log_level": "critical", **args})
        app = build_app(engine, settings_of(arguments))
        self.listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.server = Server(
            uvicorn_config(app, arguments),
            app.state.context,
            shutdown_timeout=arguments["shutdown_timeout"],
            drain_delay=arguments["drain_delay"],
            ready="",
        )
        self.code: int | None = None
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        deadline = time.monotonic() + LIMIT
        while not self.server.started and time.monotonic() < deadline:
            time.sleep(0.005)
        assert self.server.started

    def _serve(self) -> None:
        async def serve() -> int:
            self.loop = asyncio.get_running_loop()
            return await self.server.run_until_stopped(self.listener)

        self.code = asyncio.run(serve())

    def unpause(self) -> None:
        self.loop.call_soon_threadsafe(self.engine.unpaused.set)

    def signal(self) -> None:
        self.server.handle_exit(signal.SIGTERM, None)

    def ended(self) -> int | None:
        self.thread.join(LIMIT)
        return self.code


@contextmanager
def running(engine: FakeEngine, **args: Any) -> Iterator[Run]:
    run = Run(engine, **args)
    try:
        yield run
    finally:
        if run.thread.is_alive():
            run.signal()
            run.signal()
            run.thread.join(LIMIT)
        run.listener.close()
        assert not run.thread.is_alive()


def in_background(url: str, body: dict[str, Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def post() -> None:
        try:
            found.append(httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT))
        except httpx.HTTPError as error:
            found.append(error)

    thread = threading.Thread(target=post, daemon=True)
    thread.start()
    return thread, found


def wait_until_asked(engine: FakeEngine, count: int) -> None:
    deadline = time.monotonic() + LIMIT
    while len(engine.seen) < count and time.monotonic() < deadline:
        time.sleep(0.005)
    assert len(engine.seen) == count


def test_the_first_signal_lets_running_requests_finish() -> None:
    engine = FakeEngine(demo_tokenizer())
    engine.unpaused.clear()
    with running(engine, shutdown_timeout=LIMIT) as run:
        thread, found = in_background(run.url, BODY)
        wait_until_asked(engine, 1)
        run.signal()
        late = httpx.post(f"{run.url}/v1/completions", json=BODY, timeout=LIMIT)
        assert late.status_code == 503 and int(late.headers["retry-after"]) > 0
        assert httpx.get(f"{run.url}/ready", timeout=LIMIT).status_code == 503
        assert httpx.get(f"{run.url}/live", timeout=LIMIT).status_code == 200
        run.unpause()
        thread.join(LIMIT)
        assert found[0].json()["usage"]["completion_tokens"] == 8
        assert run.ended() == 0


def test_readings_are_kept_from_the_start() -> None:
    """Before any page is opened."""
    with running(FakeEngine(None)) as run, httpx.Client(base_url=run.url, timeout=LIMIT) as http:
        history = []
        deadline = time.monotonic() + LIMIT
        while not history and time.monotonic() < deadline:
            history = http.get("/status.json", params={"since": -1}).json()["history"]
        assert history and history[0]["machine"]["memory_bytes"] > 0


def settings(**args: Any) -> ServerSettings:
    return settings_of(resolve_server_args(args))


def test_prompts_are_logged_with_the_requests() -> None:
    assert settings().log_prompts
    assert not settings(log_prompts=False).log_prompts
    assert settings(log_prompts=True).log_prompts
    assert settings(max_log_len=0).log_prompts and settings(max_log_len=0).max_log_len == 0
    assert not settings(disable_log_requests=True).log_prompts
    with pytest.raises(ConfigError, match="max_log_len=5: contradicts --no-log-prompts"):
        settings(max_log_len=5, log_prompts=False)
    for given in ({"max_log_len": 5}, {"log_prompts": True}):
        with pytest.raises(ConfigError, match="contradicts --disable-log-requests"):
            settings(disable_log_requests=True, **given)


def test_reasoning_is_the_engines_setting() -> None:
    config = ConstraintsConfig(reasoning_parser="qwen3", enable_in_reasoning=True)
    found = settings_of(resolve_server_args({}), config)
    assert (found.reasoning_parser, found.constrained_reasoning) == ("qwen3", True)


def test_cors_without_origins_is_refused() -> None:
    for name, value in (
        ("allow_credentials", True),
        ("allowed_methods", ["GET"]),
        ("allowed_headers", ["x-a"]),
    ):
        with pytest.raises(ConfigError, match=f"{name}=.*: needs allowed_origins"):
            settings(**{name: value})
        assert settings(allowed_origins=["https://a"], **{name: value}).cors.origins
    settings(allowed_methods=["*"], allowed_headers=["*"], allow_credentials=False)


def test_collections_leave_out_what_was_there_before() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 10)  # Python's own
        freeze_collector()
        assert gc.get_freeze_count() > 100_000
        assert gc.get_threshold()[0] > 7000
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def test_requests_are_still_taken_during_the_drain_delay() -> None:
    for delay in growing_limits(0.5):
        with running(FakeEngine(demo_tokenizer()), drain_delay=delay) as run:
            run.signal()
            assert httpx.get(f"{run.url}/ready", timeout=LIMIT).status_code == 503
            answer = httpx.post(f"{run.url}/v1/completions", json=BODY, timeout=LIMIT)
            assert run.ended() == 0 and run.server.context.draining
            if answer.status_code == 200:
                break


def test_what_does_not_finish_in_time_ends_with_an_error() -> None:
    engine = FakeEngine(demo_tokenizer(), delay=LIMIT)
    with running(engine, shutdown_timeout=0.2) as run:
        thread, found = in_background(run.url, {**BODY, "stream": True})
        wait_until_asked(engine, 1)
        run.signal()
        assert run.ended() == 0
        thread.join(LIMIT)
        assert isinstance(found[0], httpx.HTTPError) or "error" in found[0].text


def test_a_second_signal_ends_at_once() -> None:
    engine = FakeEngine(demo_tokenizer(), delay=LIMIT)
    with running(engine, shutdown_timeout=10 * LIMIT) as run:
        in_background(run.url, BODY)
        wait_until_asked(engine, 1)
        run.signal()
        run.signal()
        assert run.ended() is not None


def test_a_dead_engine_ends_the_server() -> None:
    engine = FakeEngine(demo_tokenizer())
    with running(engine) as run:
        assert httpx.get(f"{run.url}/health", timeout=LIMIT).status_code == 200
        engine.dead = True
        assert httpx.get(f"{run.url}/health", timeout=LIMIT).status_code == 503
        assert run.ended() == EXIT_ENGINE_DEAD


def test_headers_that_never_end_are_refused() -> None:
    with running(FakeEngine(demo_tokenizer())) as run:
        with socket.create_connection(run.listener.getsockname()) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nx: " + b"a" * (512 << 10))
            assert b" 400 " in client.recv(4096).splitlines()[0]
        large = httpx.get(f"{run.url}/health", headers={"x": "a" * (70 << 10)}, timeout=LIMIT)
        assert large.status_code == 431 and large.json()["error"]["code"] == "headers_too_large"
        assert httpx.get(f"{run.url}/health", timeout=LIMIT).status_code == 200


def test_a_taken_port_and_a_foreign_address() -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port={port}: .*in use; choose another"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match="host='no such host'"):
        bind("no such host", 0)


def test_templates(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }}\n")
    assert read_template(str(file)) == "{{ messages }}\n"
    assert read_template("{{ messages }}\\n") == "{{ messages }}\n"
    assert read_template("{{ 'ü' }}\\n") == "{{ 'ü' }}\n"
    assert read_template(None) is None
    with pytest.raises(ConfigError, match="neither a template nor a file"):
        read_template(str(tmp_path / "none"))


def test_the_plan_names_what_serves() -> None:
    config = EngineConfig.from_args(resolve_engine_args({"model": "demo", "cpu_threads": 3}))
    rows = dict(
        line.split(maxsplit=1)
        for line in plan_table(
            FakeEngine(None).info, config, parsers=MessageFormat().words
        ).splitlines()
    )
    assert "8192 tokens in 512 blocks of 16" in rows["KV"] and rows["drafts"] == "none"
    assert rows["cores"].endswith(", 3 for the model") and rows["offload"] == "off"
    assert rows["parsers"] == "tool calls none, reasoning none"


def test_the_plan_tells_of_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero_llm.utils.topology.compute_cpus", lambda reserve: (0, 1, 2, 3, 4))

    def rows(device: str, offload: str, **given: Any) -> dict[str, str]:
        config = EngineConfig.from_args(resolve_engine_args({"model": "demo", **given}))
        info = replace(FakeEngine(None).info, device=device, offload=offload)
        lines = plan_table(info, config, parsers="none").splitlines()
        return {line.split()[0]: line.strip().partition("  ")[2].strip() for line in lines}

    on = {"enable_prefix_cache_offload": True}
    words = "38.0 GiB of pinned host memory for the prefix cache, batched copies"
    both = rows("cuda:0", words, **on, cpu_offload_gb=2)
    assert both["offload"] == f"up to 2 GiB of weights in host memory; {words}"
    assert both["cores"] == "engine 0-4 (KV copies on 3)"
    assert rows("cuda:0", words, **on)["offload"] == words
    assert rows("cuda:0", "", **on)["offload"] == "not of the prefix cache: see the log"
    on_cpu = rows("cpu", "", **on)
    assert on_cpu["offload"] == "not of the prefix cache: it is in host memory already"
    assert "KV copies" not in on_cpu["cores"]
    drafts = {"speculative_model": "demo-draft", "num_speculative_tokens": 4,
              "cpu_draft_worker": True}  # fmt: skip
    assert rows("cuda:0", words, **on, **drafts)["cores"] == (
        "engine 0-1 (KV copies on 1), draft worker 2-4"
    )
    assert rows("cuda:0", "", **drafts)["cores"] == "engine 0, draft worker 1-4"
    assert rows("cpu", "", **on, **drafts)["cores"] == "engine 0-3, draft worker 4"


def test_the_hint_fits_the_model() -> None:
    arguments = resolve_server_args({"api_key": ["k"]})
    for chat, host, path in (
        (True, "::1", "/v1/chat/completions"),
        (False, "127.0.0.1", "/v1/completions"),
    ):
        text = ready_text((host, 80), {"total": 1.0}, arguments, chat=chat)
        ready, curl, pages = text.splitlines()
        url = ready.split()[2]
        assert f"curl {url}{path} " in curl and "Bearer $API_KEY" in curl
        body = json.loads(curl.partition(" -d '")[2].removesuffix("'"))
        assert ("messages" in body) is chat and ("prompt" in body) is not chat
        assert f"{url}/ " in pages and f"{url}/docs" in pages


@pytest.mark.parametrize(
    ("tasks", "path", "field"),
    [
        (("embed", "score"), "/v1/embeddings", "input"),
        (("classify", "score"), "/v1/score", "text_1"),
    ],
)
def test_the_hint_for_a_model_that_pools(tasks: tuple[str, ...], path: str, field: str) -> None:
    text = ready_text(("::1", 80), {"total": 1.0}, resolve_server_args({}), chat=True, tasks=tasks)
    curl = text.splitlines()[1]
    assert f"{path} " in curl and field in json.loads(curl.partition(" -d '")[2].removesuffix("'"))


def test_the_plan_of_a_model_that_pools_has_no_kv() -> None:
    config = EngineConfig.from_args(resolve_engine_args({"model": "demo"}))
    info = replace(
        FakeEngine(None).info, pooling=PoolingInfo("BertModel", "MEAN", ("embed", "score"), 384)
    )
    text = plan_table(info, config, parsers="none")
    assert "MEAN, for embed and score" in text and "KV cache" not in text


def test_middleware_is_imported_or_refused() -> None:
    from hetero_llm.server.serving import import_middleware

    assert import_middleware("tests.server.middleware.Tag").__name__ == "Tag"
    for path in ("tests.server.middleware.nothing", "no_module.x", "x", "json.dumps"):
        with pytest.raises(ConfigError, match="middleware="):
            import_middleware(path)


def test_a_whole_server_in_its_process() -> None:
    """The command, its engine's process, requests, the end of the terminal, which a shell reports
    twice to all processes: a running stream is finished, and nothing is left behind. What the
    server writes to is closed once it is ready (fault row 26)."""
    environment = {**os.environ, "HETERO_LLM_API_KEY": "secret"}
    command = [sys.executable, "-m", "hetero_llm.cli", "serve", "demo", "--device", "cpu"]
    command += ["--port", "0", "--middleware", "tests.server.middleware.Tag"]
    command += ["--max-model-len", "512", "--cpu-threads", "1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None and process.stderr is not None
            said = ""
            for line in process.stdout:
                said += line
                if line.startswith("Ready on "):
                    break
            assert "Ready on " in said, said + process.stderr.read()
            url = said.rpartition("Ready on ")[2].split()[0]
            headers = {"Authorization": "Bearer secret"}
            process.stdout.close()
            process.stderr.close()
            for _ in range(2):
                answer = httpx.post(
                    f"{url}/v1/completions", json=BODY, headers=headers, timeout=LIMIT
                )
                assert answer.status_code == 200, answer.text
                assert answer.headers["x-tag"] == "seen"
                assert answer.json()["usage"]["completion_tokens"] == 8
            assert httpx.post(f"{url}/v1/completions", json=BODY, timeout=LIMIT).status_code == 401
            children = _children(process.pid)
            assert children
            endless = {**BODY, "max_tokens": 480, "stream": True}
            target = f"{url}/v1/completions"
            with httpx.stream(
                "POST", target, json=endless, headers=headers, timeout=LIMIT
            ) as stream:
                lines = stream.iter_lines()
                assert next(lines).startswith("data: {")
                for _ in range(2):
                    os.killpg(process.pid, signal.SIGHUP)
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
            assert process.wait(LIMIT) == 0
            assert not any(Path(f"/proc/{child}").exists() for child in children)
        finally:
            process.kill()
            process.wait()


class NeverReady:
    """An engine's process whose model would take long to load."""

    socket = None
    killed = False

    def wait_until_ready(self) -> Any:
        raise AssertionError("the weights were waited for")

    def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize("parser", [None, "none"])
def test_tool_calls_that_cannot_be_read_are_refused_before_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch, parser: str | None
) -> None:
    process = NeverReady()
    monkeypatch.setattr("hetero_llm.engine.async_engine.launch", lambda _, place: process)
    monkeypatch.setattr("hetero_llm.engine.async_engine.EngineProcess", NeverReady)
    flags = {"enable_auto_tool_choice": True, "tool_call_parser": parser, "port": 0,
             "host": "127.0.0.1", "chat_template": "{{ messages }}"}  # fmt: skip
    with pytest.raises(ConfigError, match="enable_auto_tool_choice=True: .*--tool-call-parser"):
        serve({"model": "demo"}, resolve_server_args(flags))
    assert process.killed


def test_a_template_that_never_ends() -> None:
    for path, reason in (("/dev/zero", "is larger than 1 MiB"), ("/tmp", "Is a directory")):
        with pytest.raises(ConfigError, match=reason):
            read_template(path)


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    """nohup starts a command with SIGHUP ignored."""
    handler = lambda *_: None  # noqa: E731
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        drain_on_hangup(handler)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        drain_on_hangup(handler)
        assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for task in tasks for word in task.read_text().split()]
