"""deploy/ray on a real local Ray cluster: two replicas on CPUs. `make test-ray`."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

ray = pytest.importorskip("ray", reason="make test-ray installs Ray")

from ray import serve  # noqa: E402

from hetero_llm.core.errors import ConfigError  # noqa: E402

PATIENCE = 180.0
FILE = Path(__file__).parents[2] / "deploy" / "ray" / "serve_app.py"
ENGINE = "hetero_llm.engine.processes.engine_process"
ARGS = {
    "model": "demo", "device": "cpu", "replicas": "2", "num_gpu_blocks_override": 256,
    "cpu_threads": 1, "api_key": ["key"],
}  # fmt: skip
BODY = {"prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def load_app() -> Any:
    spec = importlib.util.spec_from_file_location("serve_app", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its class travels to the replicas by value: they do not know this file.
    from ray import cloudpickle

    spec.loader.exec_module(module)
    import sys

    sys.modules["serve_app"] = module
    cloudpickle.register_pickle_by_value(module)
    return module


@pytest.fixture(scope="module")
def app() -> Any:
    return load_app()


@pytest.fixture(scope="module")
def http(app: Any) -> Iterator[httpx.Client]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app.build(dict(ARGS)), name="hetero-llm", route_prefix="/")
        headers = {"authorization": "Bearer key"}
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=PATIENCE, headers=headers, trust_env=False) as made:
            yield made
    finally:
        serve.shutdown()
        ray.shutdown()


def engines() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if ENGINE in (process.info["cmdline"] or ()):
            found.append(process)
    return found


def test_two_replicas_answer_alike(http: httpx.Client) -> None:
    assert len(engines()) == 2
    texts = {http.post("/v1/completions", json=BODY).json()["choices"][0]["text"] for _ in range(8)}
    assert len(texts) == 1
    assert http.get("/v1/models").json()["data"][0]["id"] == "demo"
    assert http.get("/health").status_code == 200


def test_a_stream_comes_in_events(http: httpx.Client) -> None:
    body = {**BODY, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events[-1] == "[DONE]"
    text = "".join(json.loads(one)["choices"][0]["text"] for one in events[:-1])
    assert text == http.post("/v1/completions", json=BODY).json()["choices"][0]["text"]


def test_errors_and_keys_are_the_servers(http: httpx.Client) -> None:
    refused = http.post("/v1/completions", json=BODY, headers={"authorization": "Bearer no"})
    assert refused.status_code == 401 and refused.json()["error"]["code"]
    wrong = http.post("/v1/completions", json={**BODY, "temperature": -1})
    assert wrong.status_code == 400 and "temperature" in wrong.json()["error"]["message"]


def test_a_replica_whose_engine_died_is_replaced(http: httpx.Client) -> None:
    before = {process.pid for process in engines()}
    os.kill(min(before), signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while True:
        now = {process.pid for process in engines()}
        if len(now) == 2 and now != before:
            break
        assert time.monotonic() < deadline, f"{before} became {now}"
        time.sleep(0.5)
    in_a_row = 0  # until Ray has seen the death, and the new replica has loaded the model
    while in_a_row < 8:
        answer = http.post("/v1/completions", json=BODY)
        in_a_row = in_a_row + 1 if answer.status_code == 200 else 0
        assert time.monotonic() < deadline, answer.text


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"model": "demo", "port": 5}, "is Ray's here"),
        ({"model": "demo", "replica": 2}, "unknown argument"),
        ({"model": "demo", "replicas": "two"}, "must be an integer"),
        ({"model": "demo", "max_num_seqs": "x"}, "max_num_seqs"),
    ],
)
def test_mistakes_are_found_before_a_replica_starts(
    app: Any, args: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        app.build(args)
