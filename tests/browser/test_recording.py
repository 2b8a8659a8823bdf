"""The page, shown what a server's page was told once: the GPU's chart above all, since no other
test has a GPU. The recording's "source" says where it comes from; bench/server/status_recording.py
makes new ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from bench.server.status_recording import without_paths, write
from hetero_llm.engine.text.tokenizer import Tokenizer
from tests.browser.devtools import Browser
from tests.browser.test_page import left_at_the_end
from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving

RECORDING = Path(__file__).parent / "status_recording.json"
MOST = 120
"""Readings that are shown: the chart holds five minutes."""
FASTER = 40
ROOM = {"top": 8, "bottom": 16}  # around the lines, as in charts.js
THICKNESS = 3.0  # pixels by which a line may be off
LINES = """(canvas => {
  const style = getComputedStyle(document.documentElement);
  const colours = ["--first", "--second"].map((name) =>
    style.getPropertyValue(name).match(/[0-9a-f]{2}/gi).map((part) => parseInt(part, 16)));
  const { width, height } = canvas;
  const data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
  const rows = [];
  for (let at = 0; at < data.length; at += 4) {
    const near = (colour) => colour.every((part, i) => Math.abs(part - data[at + i]) < 40);
    if (data[at + 3] > 128 && colours.some(near)) rows.push(Math.floor(at / 4 / width));
  }
  return { count: rows.length, top: Math.min(...rows), bottom: Math.max(...rows), height };
})(document.querySelector("#chart-gpu canvas"))"""


def of_today(reading: dict[str, Any]) -> dict[str, Any]:
    """A reading with the figures that the recorded server did not have yet."""
    none = {"first_token": None, "between_tokens": None}
    now = {"host_kv_usage": None, **reading["now"]}
    machine = {"memory_total_bytes": 1 << 37, "gpu_memory": None, **reading["machine"]}
    model = {"images": 0, "image_bytes": 0, **reading["model"]}
    return {"latency": none, **reading, "now": now, "machine": machine, "model": model}


def recorded() -> list[dict[str, Any]]:
    return [of_today(reading) for reading in json.loads(RECORDING.read_text())["readings"]]


def replay_of(readings: list[dict[str, Any]]) -> type:
    """ASGI middleware that answers the page with one reading after the other, then with the last
    one, growing older."""

    class Replay:
        asked = 0

        def __init__(self, app: ASGIApp) -> None:
            self._app = app

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] != "/status.json":
                await self._app(scope, receive, send)
                return
            late = max(Replay.asked - len(readings) + 1, 0)
            reading = dict(readings[min(Replay.asked, len(readings) - 1)])
            reading["uptime"] += late
            Replay.asked += 1
            answer = Response(json.dumps(reading), media_type="application/json")
            await answer(scope, receive, send)

    return Replay


@contextmanager
def hurried(browser: Browser) -> Iterator[None]:
    """Pages that are opened inside wait less long than they mean to."""
    script = (
        "(real => window.setTimeout = (call, ms, ...rest) =>"
        f" real(call, ms / {FASTER}, ...rest))(window.setTimeout)"
    )
    added = browser.call("Page.addScriptToEvaluateOnNewDocument", source=script)
    try:
        yield
    finally:
        browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])


def percent(value: float) -> str:
    """As page.js writes it."""
    return f"{100 * value:.{int(0 < value < 0.0995)}f}%"


@contextmanager
def replayed(
    browser: Browser, tokenizer: Tokenizer, readings: list[dict[str, Any]]
) -> Iterator[None]:
    """The page after all readings."""
    replay: Any = replay_of(readings)
    with (
        hurried(browser),
        serving(FakeEngine(tokenizer), wrap=replay) as served,
        left_at_the_end(browser),
    ):
        browser.open(f"{served.url}/")
        served.wait(lambda: replay.asked > len(readings) + 1)  # the last one is drawn, too
        yield


def test_the_gpu_chart_shows_what_was_recorded(browser: Browser, tokenizer: Tokenizer) -> None:
    readings = recorded()[-MOST:]
    busy = [reading["machine"]["gpu"] for reading in readings]
    assert len(busy) >= 10 and max(map(max, busy)) > 0.5
    with replayed(browser, tokenizer, readings):
        assert not browser.run("document.getElementById('chart-gpu').hidden")
        mean, most = sum(busy[-1]) / len(busy[-1]), max(busy[-1])
        text = browser.run("document.querySelector('#chart-gpu figcaption').innerText")
        assert text.split() == ["GPU", "busy", "mean", percent(mean), "most", percent(most)]
        drawn = browser.run(LINES)
        scale = drawn["height"] - ROOM["top"] - ROOM["bottom"]

        def row(value: float) -> float:
            return float(drawn["height"] - ROOM["bottom"] - value * scale)

        shown = busy[1:]  # the page draws from its second reading on
        assert drawn["count"] > len(shown)
        assert abs(drawn["top"] - row(max(map(max, shown)))) <= THICKNESS
        assert abs(drawn["bottom"] - row(min(sum(one) / len(one) for one in shown))) <= THICKNESS


def test_a_page_that_is_opened_shows_the_last_minutes(
    browser: Browser, tokenizer: Tokenizer
) -> None:
    """Only the first answer has what the server has kept; the page then draws one point a time."""
    readings = recorded()[-60:]
    opened = {**readings[-1], "history": readings[:-1]}
    opened["machine"]["gpu_memory"] = [{"used_bytes": 3 << 30, "total_bytes": 8 << 30}]
    asked: list[bytes] = []

    class Answer:
        def __init__(self, app: ASGIApp) -> None:
            self._app = app

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] != "/status.json":
                await self._app(scope, receive, send)
                return
            asked.append(scope["query_string"])
            status = 200 if len(asked) == 1 else 503
            answer = Response(json.dumps(opened), status, media_type="application/json")
            await answer(scope, receive, send)

    with serving(FakeEngine(tokenizer), wrap=Answer) as served, left_at_the_end(browser):
        browser.open(f"{served.url}/")
        browser.wait("document.getElementById('model').textContent !== ''")
        assert asked[0] == b"since=-1"
        assert browser.run(LINES)["count"] > len(readings)
        assert browser.text("gpu-memory") == "3.0 of 8.0 GiB"
        served.wait(lambda: len(asked) > 1)
        assert asked[1] == b""
    browser.complaints.clear()  # of the 503


def test_without_a_gpu_there_is_no_chart(browser: Browser, tokenizer: Tokenizer) -> None:
    readings = recorded()[:4]
    for reading in readings:
        reading["machine"]["gpu"] = None
    with replayed(browser, tokenizer, readings):
        assert browser.run("document.getElementById('chart-gpu').hidden")
        assert not browser.run("document.getElementById('chart-cpu').hidden")


def test_a_recording_names_no_folder(tmp_path: Path) -> None:
    folder = '/home/somebody/models/a "b"/llama'
    reading = {"model": {"name": folder}, "engine": {"model": folder}, "plan": f"model {folder}"}
    file = tmp_path / "one.json"
    write(file, "a test", [without_paths(reading, folder)] * 2)
    shown = {"model": {"name": "llama"}, "engine": {"model": "llama"}, "plan": None}
    assert json.loads(file.read_text()) == {"source": "a test", "readings": [shown] * 2}
    text = RECORDING.read_text()
    assert "/" not in text.partition("readings")[2], "the committed one names a path"
