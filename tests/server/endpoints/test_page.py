"""The status page's files and figures; tests/browser looks at the page itself."""

from __future__ import annotations

import asyncio
import ctypes
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import hetero_llm
from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server import machine as machine_module
from hetero_llm.server.endpoints import page as page_module
from hetero_llm.server.endpoints.page import PAGE_FILES
from hetero_llm.server.machine import GpuMemoryUse, Machine
from hetero_llm.server.settings import ServerSettings
from tests.server.fake_engine import CONTEXT, FakeEngine
from tests.server.serving import LIMIT, Served, serving

FOLDER = Path(page_module.__file__).parents[1] / "page"
KEYS = ServerSettings(api_keys=("key-one",))
GOOD = {"authorization": "Bearer key-one"}
MAX_BYTES = 100_000
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


def test_every_file_is_served_and_none_is_left_over() -> None:
    assert sorted(PAGE_FILES.values()) == sorted(path.name for path in FOLDER.iterdir())


@pytest.mark.parametrize("path", PAGE_FILES)
def test_a_file_and_its_headers(server: Served, path: str) -> None:
    answer = server.http.get(path)
    assert answer.status_code == 200
    assert answer.content == (FOLDER / PAGE_FILES[path]).read_bytes()
    assert answer.headers["content-type"] == TYPES[PAGE_FILES[path].rpartition(".")[2]]
    policy = [part.strip() for part in answer.headers["content-security-policy"].split(";")]
    assert "default-src 'self'" in policy
    assert not any(word in part for part in policy for word in ("unsafe", "http", "*", "data:"))
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"
    head = server.http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["etag"] == answer.headers["etag"]


@pytest.mark.parametrize("form", ["{}", "W/{}", '"other", {}', "*"])
def test_what_a_browser_has_is_not_sent_again(server: Served, form: str) -> None:
    for path in PAGE_FILES:
        tag = server.http.get(path).headers["etag"]
        assert re.fullmatch(r'"[0-9a-f]{32}"', tag)
        again = server.http.get(path, headers={"if-none-match": form.format(tag)})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == tag and "content-security-policy" in again.headers
        other = server.http.get(path, headers={"if-none-match": '"other"'})
        assert other.status_code == 200


def test_files_have_different_tags(server: Served) -> None:
    assert len({server.http.get(path).headers["etag"] for path in PAGE_FILES}) == len(PAGE_FILES)


def test_the_page_is_small_and_needs_nothing_from_elsewhere() -> None:
    texts = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < MAX_BYTES
    for name, text in texts.items():
        found = re.findall(r"(?:[a-z]+:)?//[\w.-]+\.\w+[^\s\"']*", text)
        assert [one for one in found if one != "http://www.w3.org/2000/svg"] == [], name
        assert not re.search(
            r"@import|url\(|\beval\b|(?:inner|outer)HTML|insertAdjacent|parseFromString|document\.write",
            text,
        ), name
    imported = re.findall(r'from "\./([^"]+)"', "".join(texts.values()))
    addresses = {f"/assets/{one}" for one in imported}
    for page in (texts["index.html"], texts["docs.html"]):
        assert not re.search(r"\son\w+\s*=|\sstyle\s*=|<style", page)
        assert re.findall(r"<script[^>]*>(.*?)</script>", page, re.S) == [""]
        addresses |= {f"/{one}" for one in re.findall(r'(?:src|href)="([^"]+)"', page)}
    assert addresses - {"/.", "/openapi.json"} == set(PAGE_FILES) - {"/"}


@pytest.mark.parametrize("name", ["index", "docs"])
def test_every_field_has_a_label(name: str) -> None:
    page = (FOLDER / f"{name}.html").read_text()
    ids = re.findall(r'id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    script = (FOLDER / {"index": "page.js", "docs": "docs.js"}[name]).read_text()
    assert set(re.findall(r'\bat\("([^"]+)"\)', script)) <= set(ids)
    for field in re.findall(r"<(?:input|textarea|select)[^>]*>", page):
        (name,) = re.findall(r'id="([^"]+)"', field)
        wrapped = re.search(rf"<label>[^<]*<[^>]*id=\"{name}\"", page)
        assert wrapped or f'for="{name}"' in page or "aria-label=" in field, name


def test_files_need_no_key_and_figures_do(tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer), KEYS) as served:
        for path in PAGE_FILES:
            answer = served.http.get(path)
            assert answer.status_code == 200
            assert "demo" not in answer.text.replace("demo.css", "")  # the model's name
        refused = served.http.get("/status.json")
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert served.http.get("/status.json", headers=GOOD).status_code == 200
        assert served.http.get("/assets/none.js").status_code == 401
        assert served.http.get("/assets/../status.json").status_code == 401


def test_behind_a_proxy_with_a_prefix(tokenizer: Tokenizer) -> None:
    settings = ServerSettings(api_keys=("key-one",), root_path="/llm")
    with serving(FakeEngine(tokenizer), settings) as served:
        for prefix in ("", "/llm"):
            for path in PAGE_FILES:
                assert served.http.get(prefix + path).status_code == 200
            assert served.http.get(f"{prefix}/status.json").status_code == 401


def status(served: Served, **rest: Any) -> Any:
    answer = served.http.get("/status.json", **rest)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["cache-control"] == "no-store"
    return answer.json()


def test_the_figures_are_the_engines(tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer)) as served:
        first = status(served)
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        assert served.post("/v1/completions", body).status_code == 200
        second = status(served)
    assert first["version"] == hetero_llm.__version__ and first["state"] == "ready"
    assert first["model"] == {
        "name": "demo", "max_model_len": CONTEXT, "text": True, "chat": True, "images": 0,
        "image_bytes": ServerSettings().limits.image_bytes,
    }  # fmt: skip
    assert first["engine"]["device"] == "cpu" and first["engine"]["num_blocks"] == 512
    assert abs(first["time"] - time.time()) < 60 and second["uptime"] > first["uptime"] >= 0
    assert set(first["counters"]) == {
        "prompt_tokens", "generation_tokens", "requests_finished", "preemptions", "steps",
        "prefix_cache_queries", "prefix_cache_hits", "drafts", "draft_tokens", "accepted_tokens",
    }  # fmt: skip
    grown = {name: second["counters"][name] - value for name, value in first["counters"].items()}
    assert (grown["prompt_tokens"], grown["generation_tokens"]) == (3, 4)
    assert (grown["requests_finished"], grown["steps"]) == (1, 4)
    drafted = ("drafts", "draft_tokens", "accepted_tokens")
    assert [second["counters"][name] for name in drafted] == [3, 9, 6]
    assert second["now"] == {
        "running": 0, "waiting": 0, "queue": 0, "kv_usage": 0.25, "host_kv_usage": None,
        "last_step_age": 0.01,
    }  # fmt: skip
    assert second["plan"] is None and second["errors"] == []
    assert second["machine"]["gpu"] is None and second["machine"]["cores"] >= 1


def take(served: Served, count: int = 1) -> None:
    """Adds readings to the history, as the server's task does every two seconds."""

    async def run() -> None:
        for _ in range(count):
            await served.context.readings.take()

    asyncio.run_coroutine_threadsafe(run(), served.loop).result(LIMIT)


def test_latencies_are_those_of_the_last_minute(tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer)) as served:
        assert status(served)["latency"] == {"first_token": None, "between_tokens": None}
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "stream": True}
        assert served.post("/v1/completions", body).status_code == 200
        for found in status(served)["latency"].values():
            assert 0 < found["p50"] <= found["p95"] <= found["p99"] < 20
        observe = served.context.metrics.observe
        served.call(lambda: observe("time_to_first_token_seconds", 500.0))
        take(served, 30)
        assert status(served)["latency"]["first_token"] is None  # nothing new in a minute
        for milliseconds in range(1, 101):
            served.call(lambda ms=milliseconds: observe("time_to_first_token_seconds", ms / 1000))
        found = status(served)["latency"]["first_token"]
        expected = {"p50": 0.050, "p95": 0.095, "p99": 0.099}
        assert found == {name: pytest.approx(value, rel=0.07) for name, value in expected.items()}


def test_the_last_minutes_are_kept(tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer)) as served:
        assert "history" not in status(served)
        assert status(served, params={"since": "-1"})["history"] == []
        take(served, 3)
        answer = status(served, params={"since": -1})
        uptimes = [reading["uptime"] for reading in answer["history"]]
        assert uptimes == sorted(uptimes) and len(uptimes) == 3
        shared = ("uptime", "counters", "now", "latency", "machine")
        assert all(set(reading) == set(shared) for reading in answer["history"])
        assert set(shared) < set(answer) and answer["uptime"] > uptimes[-1]
        later = status(served, params={"since": uptimes[1]})["history"]
        assert [reading["uptime"] for reading in later] == uptimes[2:]
        take(served, 200)
        assert len(status(served, params={"since": -1})["history"]) == 150  # five minutes


@pytest.mark.parametrize("since", ["", "now", "nan", "inf", "1" * 5000])
def test_a_time_that_is_none(server: Served, since: str) -> None:
    answer = server.http.get("/status.json", params={"since": since})
    assert answer.status_code == 400 and len(answer.content) < 1000
    assert answer.json()["error"]["param"] == "since"


def test_host_memory_behind_the_prefix_cache(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(tokenizer)
    stats = engine.stats()
    stats.metrics.update(kv_offload_host_slots=8.0, kv_offload_host_slots_used=2.0)
    monkeypatch.setattr(engine, "stats", lambda: stats)
    with serving(engine) as served:
        assert status(served)["now"]["host_kv_usage"] == 0.25


def test_running_requests_are_seen(tokenizer: Tokenizer) -> None:
    # A stream's first comment opens it before its first token.
    with serving(FakeEngine(tokenizer), ServerSettings(keep_alive_seconds=0.05)) as served:
        served.call(served.engine.unpaused.clear)
        body = {"prompt": "a", "max_tokens": 1, "stream": True}
        with served.http.stream("POST", "/v1/completions", json=body):
            served.wait(lambda: served.engine.num_live == 1)
            now = status(served)["now"]
            served.call(served.engine.unpaused.set)
    assert (now["running"], now["queue"]) == (1, 1)


def test_a_model_without_a_template_or_tokenizer(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(FakeEngine(None)) as served:
        model = status(served)["model"]
        assert (model["text"], model["chat"]) == (False, False)
    monkeypatch.setattr(tokenizer.hf, "chat_template", None)
    engine = FakeEngine(tokenizer)
    with serving(engine) as served:
        model = status(served)["model"]
        assert (model["text"], model["chat"]) == (True, False)
    with serving(engine, ServerSettings(chat_template="{{ messages }}")) as served:
        assert status(served)["model"]["chat"] is True


@pytest.mark.parametrize("state", ["draining", "hung", "dead"])
def test_a_sick_server_still_tells(tokenizer: Tokenizer, state: str) -> None:
    with serving(FakeEngine(tokenizer)) as served:
        served.context.draining = state == "draining"
        served.engine.hung = state == "hung"
        served.engine.dead = state == "dead"
        found = status(served)
        assert found["state"] == state
        assert (found["now"]["last_step_age"] is None) == (state == "hung")


def test_our_errors_are_kept_and_users_are_not(tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer, fail_after=1)) as served:
        bad = {"prompt": "private words", "max_tokens": -1}
        assert served.post("/v1/completions", bad).status_code == 400
        body = {"prompt": "private words", "max_tokens": 4}
        for number in range(25):
            headers = {"x-request-id": f"trace-{number}"}
            assert served.post("/v1/completions", body, headers=headers).status_code == 500
        answer = status(served)
        errors = answer["errors"]
    assert [error["request_id"] for error in errors] == [f"trace-{n}" for n in range(5, 25)]
    assert errors[0]["status"] == 500 and errors[0]["code"] == "generation_failed"
    assert answer["time"] - 60 < errors[0]["time"] <= answer["time"]
    assert "private" not in str(answer) and "secret" not in str(answer)


def test_a_stream_that_breaks_is_one_of_our_errors(tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer, fail_after=2)) as served:
        body = {"prompt": "a b c", "max_tokens": 8, "stream": True}
        assert served.post("/v1/completions", body).status_code == 200
        assert [error["code"] for error in status(served)["errors"]] == ["generation_failed"]


# the machine

_BUSY = "import sys\nprint(1, flush=True)\nsys.stdin.read(1)\nx = 0\nwhile True: x += 1"


def test_the_cpu_time_is_that_of_the_whole_tree() -> None:
    machine = Machine("cpu", kept_seconds=0.0, children_seconds=0.0)
    child = subprocess.Popen(
        [sys.executable, "-c", _BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdin is not None
    try:
        assert child.stdout.readline() == b"1\n"
        first = machine.read()
        assert 0 <= first.cpu_seconds < time.process_time() / 2  # nothing of before
        assert 1 << 20 < first.memory_bytes < first.memory_total_bytes
        assert first.gpu is None and first.gpu_memory is None
        child.stdin.write(b"1")
        child.stdin.flush()
        deadline = time.monotonic() + LIMIT
        ours = time.process_time()
        while (busy := machine.read()).cpu_seconds < 0.2 + (time.process_time() - ours):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        child.kill()
        child.communicate()
    assert machine.read().cpu_seconds >= busy.cpu_seconds  # those of the dead are not lost


def test_a_reading_is_shared() -> None:
    machine = Machine("cpu", kept_seconds=1e6)
    assert machine.read() is machine.read()
    machine = Machine("cpu", kept_seconds=0.0)
    assert machine.read() is not machine.read()


class FakeDriver:
    """NVIDIA's library with these GPUs, by index or UUID; what is negative fails. `memory` has
    used and all bytes of each; without it there is none to be read."""

    def __init__(
        self,
        busy: dict[Any, int],
        *,
        memory: dict[Any, tuple[int, int]] | None = None,
        works: bool = True,
    ) -> None:
        self.busy = busy
        self.memory = memory or {}
        self.works = works

    def nvmlInit_v2(self) -> int:
        return int(not self.works)

    def nvmlDeviceGetCount_v2(self, found: Any) -> int:
        count = sum(isinstance(name, int) for name in self.busy)
        ctypes.cast(found, ctypes.POINTER(ctypes.c_uint))[0] = count
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, name: Any, found: Any) -> int:
        if name not in self.busy:
            return 6
        handle = 1 + list(self.busy).index(name)
        ctypes.cast(found, ctypes.POINTER(ctypes.c_void_p))[0] = handle
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, found: Any) -> int:
        return self.nvmlDeviceGetHandleByIndex_v2(name.decode(), found)

    def nvmlDeviceGetUtilizationRates(self, handle: ctypes.c_void_p, found: Any) -> int:
        assert handle.value is not None
        percent = list(self.busy.values())[handle.value - 1]
        if percent < 0:
            return 3
        ctypes.cast(found, ctypes.POINTER(ctypes.c_uint))[0] = percent
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, found: Any) -> int:
        assert handle.value is not None
        name = list(self.busy)[handle.value - 1]
        if name not in self.memory:
            return 3
        used, total = self.memory[name]
        values = ctypes.cast(found, ctypes.POINTER(ctypes.c_ulonglong))
        values[0], values[1], values[2] = total, total - used, used
        return 0


def with_driver(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver | None) -> None:
    def library(name: str) -> FakeDriver:
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    monkeypatch.setattr(machine_module.ctypes, "CDLL", library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, [0.1, 0.9]), ("1", [0.9]), ("GPU-abc, 0", [0.5, 0.1]), ("7", None), ("MIG-x", None)],
)
def test_the_gpus_are_those_that_cuda_shows(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[float] | None
) -> None:
    with_driver(monkeypatch, FakeDriver({0: 10, 1: 90, "GPU-abc": 50}))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Machine("cuda:0").read().gpu == expected
    assert Machine("cpu").read().gpu is None


def test_a_gpu_that_does_not_answer_keeps_its_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver({0: 40})
    with_driver(monkeypatch, driver)
    machine = Machine("cuda", kept_seconds=0.0)
    assert machine.read().gpu == [0.4]
    driver.busy[0] = -1
    assert machine.read().gpu == [0.4]
    driver.busy[0] = 70
    assert machine.read().gpu == [0.7]


def test_the_memory_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver({0: 10, 1: 90}, memory={0: (3, 8), 1: (1, 4)})
    with_driver(monkeypatch, driver)
    machine = Machine("cuda", kept_seconds=0.0)
    assert machine.read().gpu_memory == [GpuMemoryUse(3, 8), GpuMemoryUse(1, 4)]
    del driver.memory[0]  # during a reset the last figures stay
    driver.memory[1] = 2, 4
    assert machine.read().gpu_memory == [GpuMemoryUse(3, 8), GpuMemoryUse(2, 4)]
    unified = Machine("cuda", kept_seconds=0.0).read()  # the first has no memory of its own
    assert unified.gpu_memory is None and unified.gpu == [0.1, 0.9]
    assert Machine("cpu").read().gpu_memory is None


@pytest.mark.parametrize(
    "driver",
    [
        None,  # no library
        FakeDriver({0: 40}, works=False),
        FakeDriver({}),
        FakeDriver({0: 40, 1: -1}),  # the second is a part of a card
    ],
)
def test_where_no_gpu_can_be_read_none_is_shown(
    monkeypatch: pytest.MonkeyPatch, driver: FakeDriver | None
) -> None:
    with_driver(monkeypatch, driver)
    assert Machine("cuda").read().gpu is None
