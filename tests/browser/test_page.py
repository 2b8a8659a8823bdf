"""The status page in a real browser: `make test-browser`, and `make test` where there is one."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero_llm.core.outputs import RequestOutput
from hetero_llm.engine.tokenizer import Tokenizer
from hetero_llm.server.settings import ServerSettings
from tests.browser.devtools import Browser
from tests.server.fake_engine import FakeEngine
from tests.server.serving import Served, serving

PICTURE = "STATUS_PAGE_PICTURE"
KEYS = ServerSettings(api_keys=("key-one",))
CTRL = 2
MARKS = "[...document.querySelectorAll('#log mark')].map(mark => mark.textContent)"
ANSWER = "document.querySelector('#log .turn:last-child .answer').textContent"
IDLE = "document.getElementById('stop').disabled"
REPORT = "document.getElementById('report')"


class Bursts(FakeEngine):
    """The first token of an answer comes alone, then `size` at once, as after accepted drafts."""

    size = 3

    async def _outputs(self, *args: Any) -> AsyncGenerator[RequestOutput, None]:
        held: RequestOutput | None = None
        first = True
        async for output in super()._outputs(*args):
            if held is not None:
                (old,), (new,) = held.outputs, output.outputs
                new.text, new.token_ids = old.text + new.text, old.token_ids + new.token_ids
            held = output
            if first or output.finished or len(output.outputs[0].token_ids) == self.size:
                yield output
                held, first = None, False


@pytest.fixture
def served(tokenizer: Tokenizer) -> Iterator[Served]:
    with serving(Bursts(tokenizer)) as found:
        yield found


def open_page(browser: Browser, served: Served) -> None:
    browser.open(f"{served.url}/")
    browser.wait("document.getElementById('state').textContent === 'ready'")
    browser.wait("!document.getElementById('send').disabled")


@contextmanager
def left_at_the_end(browser: Browser) -> Iterator[None]:
    """Closes the page before its server goes: it would complain."""
    try:
        yield
    finally:
        browser.open("about:blank")


def choose(browser: Browser, mode: str) -> None:
    browser.run(
        f"(() => {{ const box = document.getElementById('mode'); box.value = '{mode}';"
        "box.dispatchEvent(new Event('change')); })()"
    )


def ask(browser: Browser, text: str, *, modifiers: int = 0, wait: bool = True) -> None:
    """Types into the prompt and sends it from the keyboard."""
    browser.run("document.getElementById('prompt').focus()")
    browser.type(text)
    turns = browser.run("document.querySelectorAll('.turn').length")
    browser.press("Enter", modifiers=modifiers)
    browser.wait(f"document.querySelectorAll('.turn').length === {turns + 1}")
    if wait:
        browser.wait(IDLE)


def text_of(served: Served, ids: list[int]) -> str:
    text: str = served.engine.tokenizer.decode(ids, skip_special_tokens=True)
    return text


def set_field(browser: Browser, name: str, value: float) -> None:
    browser.run(f"document.getElementById('{name}').value = {value}")


def test_a_chat_goes_on(served: Served, browser: Browser) -> None:
    open_page(browser, served)
    set_field(browser, "max-tokens", 5)
    ask(browser, "first words")
    first = browser.run(ANSWER)
    ask(browser, "and more")
    (_, one, params), (_, two, _) = served.engine.seen
    assert params.max_tokens == 5 and params.temperature == 0
    # The engine echoes its prompt.
    assert first and first == text_of(served, one.token_ids[:5])
    told = text_of(served, two.token_ids)
    assert told.index("first words") < told.rindex(first) < told.index("and more")
    assert browser.run("document.getElementById('prompt').value") == ""


def test_a_completion_is_drawn_with_its_drafts(served: Served, browser: Browser) -> None:
    open_page(browser, served)
    choose(browser, "complete")
    set_field(browser, "max-tokens", 8)
    prompt = "for index in range(10): print(index)"
    ask(browser, prompt, modifiers=CTRL)
    ids = served.engine.tokenizer.encode(prompt)[:8]
    assert len(ids) == 8
    assert browser.run(ANSWER) == text_of(served, ids)
    # Tokens 1 | 2 3 4 | 5 6 7 | 8: of each three the last is the model's own.
    drafted = [text_of(served, ids[1:3]), text_of(served, ids[4:6])]
    browser.wait(f"JSON.stringify({MARKS}) === JSON.stringify({json.dumps(drafted)})")
    assert browser.text("tokens") == "8"
    assert browser.text("drafted") == "4 (50%)"
    assert re.fullmatch(r"\d+(\.\d)? tokens/s", browser.text("speed"))
    assert re.fullmatch(r"\d+ ms", browser.text("first-token"))
    assert browser.run("document.getElementById('prompt').value") == prompt


def test_an_answer_can_be_stopped(browser: Browser, tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer, delay=0.02)) as served, left_at_the_end(browser):
        open_page(browser, served)
        set_field(browser, "max-tokens", 1000)
        ask(browser, "on and on", wait=False)
        browser.wait(f"{ANSWER} !== ''")
        browser.press("Escape")
        browser.wait(IDLE)
        served.wait(lambda: served.engine.aborted)
        assert browser.run("document.getElementById('banner').hidden")


def test_the_charts_move(browser: Browser, tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer, delay=0.01)) as served, left_at_the_end(browser):
        open_page(browser, served)
        set_field(browser, "max-tokens", 1000)
        ask(browser, "a lot", wait=False)
        browser.wait(
            "/generated [1-9]/.test(document.querySelector('#chart-throughput').innerText)"
        )
        browser.wait(
            "document.querySelector('#chart-queue canvas').ariaLabel.includes('running 1')"
        )
        assert browser.run("document.querySelector('#chart-kv').innerText").endswith("25%")
        assert browser.run("document.getElementById('chart-gpu').hidden")
        drawn = (
            "(canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)"
            ".data.some(value => value))(document.querySelector('#chart-cpu canvas'))"
        )
        assert browser.run(drawn)
        browser.press("Escape")
        served.wait(lambda: served.engine.aborted)


def test_the_key_is_asked_for_and_kept_in_the_tab(browser: Browser, tokenizer: Tokenizer) -> None:
    with serving(Bursts(tokenizer), KEYS) as served, left_at_the_end(browser):
        browser.open(f"{served.url}/")
        is_open = "document.getElementById('key-dialog').open"
        for key, text in (("wrong", "This server wants a key"), ("key-one", "was not accepted")):
            browser.wait(is_open)
            assert text in browser.text("key-text")
            assert browser.run("document.activeElement.id") == "key"
            browser.type(key)
            browser.press("Enter")
            browser.wait(
                f"!{is_open} || document.getElementById('key-text').innerText.includes('not')"
            )
        browser.wait("document.getElementById('state').textContent === 'ready'")
        assert browser.run("Object.values(sessionStorage)") == ["key-one"]
        assert browser.run("localStorage.length") == 0
        open_page(browser, served)  # again, without being asked
        ask(browser, "with a key")
        assert browser.run(ANSWER) != ""
        refused = [one for one in browser.complaints if "401" in one]
        assert len(refused) == len(browser.complaints) == 2
        browser.complaints.clear()


def test_a_mistake_is_shown_where_it_was_made(served: Served, browser: Browser) -> None:
    open_page(browser, served)
    set_field(browser, "max-tokens", 10**6)
    ask(browser, "private words")
    text = browser.run("document.querySelector('#log .failed').textContent")
    assert "maximum context length" in text
    assert browser.run("document.getElementById('banner').hidden")  # it is not the server's
    browser.complaints.clear()


def test_trouble_and_its_report(browser: Browser, tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer, fail_after=2)) as served, left_at_the_end(browser):
        served.context.plan = "  model   demo\n  drafts  none"
        open_page(browser, served)
        ask(browser, "private words")
        browser.wait("!document.getElementById('banner').hidden")
        assert "status 500" in browser.text("banner-text")
        browser.run(
            "navigator.clipboard.writeText = () => Promise.reject(new Error('not allowed'))"
        )
        browser.run("document.getElementById('copy-report').click()")
        browser.wait(f"!{REPORT}.hidden")
        text = browser.run(f"{REPORT}.value")
        report = json.loads(text)
        assert report["plan"] == ["  model   demo", "  drafts  none"]
        assert report["server_errors"][0]["code"] == "generation_failed"
        assert report["page_errors"][0]["what"] == "request: 200 generation_failed"
        assert report["version"] and report["engine"]["device"] == "cpu"
        assert "private" not in text
        browser.run("document.getElementById('dismiss').click()")
        assert browser.run("document.getElementById('banner').hidden")
        served.engine.dead = True
        browser.wait("document.getElementById('state').textContent === 'dead'")
        assert "engine has stopped" in browser.text("banner-text")
        assert not browser.run("document.getElementById('banner').hidden")


def test_a_copied_report(browser: Browser, tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer)) as served, left_at_the_end(browser):
        served.engine.hung = True
        browser.open(f"{served.url}/")
        browser.wait("!document.getElementById('banner').hidden")
        browser.run(
            "navigator.clipboard.writeText = text => { window.copied = text;"
            "return Promise.resolve(); }"
        )
        browser.run("document.getElementById('copy-report').click()")
        browser.wait("document.getElementById('copy-report').textContent === 'Copied'")
        assert json.loads(browser.run("copied"))["state"] == "hung"


def test_a_server_that_is_gone_and_back(browser: Browser, tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer)) as served, left_at_the_end(browser):
        open_page(browser, served)
        browser.run("window.realFetch = fetch; window.fetch = () => Promise.reject(new TypeError)")
        browser.wait("document.getElementById('state').textContent === 'no answer'")
        assert "does not answer" in browser.text("banner-text")
        browser.run("window.fetch = realFetch")
        browser.wait("document.getElementById('state').textContent === 'ready'")
        browser.wait("document.getElementById('banner').hidden")


def test_it_works_from_the_keyboard(served: Served, browser: Browser) -> None:
    open_page(browser, served)
    names = []
    for _ in range(12):
        browser.press("Tab")
        names.append(browser.run("document.activeElement.id"))
        assert browser.run("getComputedStyle(document.activeElement).outlineStyle") != "none"
        if names[-1] == "send":
            break
    assert names == [
        "", "key-button", "log", "prompt", "", "mode", "max-tokens", "temperature", "clear", "send",
    ]  # fmt: skip


def test_dark_and_light_and_narrow(served: Served, browser: Browser) -> None:
    open_page(browser, served)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = browser.run(ground)
    browser.media("dark")
    dark = browser.run(ground)
    shade = [sum(map(int, re.findall(r"\d+", colour))) for colour in (light, dark)]
    assert shade[0] > 600 and shade[1] < 150
    for width in (1280, 700, 360):
        browser.size(width, 800)
        assert browser.run("document.documentElement.scrollWidth") <= width


def test_nothing_is_asked_of_others(served: Served, browser: Browser) -> None:
    open_page(browser, served)
    ask(browser, "hello there")
    browser.wait("document.querySelector('#chart-kv').innerText.includes('25%')")
    assert {address for address in browser.addresses if not address.startswith(served.url)} == set()
    assert any(address.endswith("/assets/charts.js") for address in browser.addresses)


def test_behind_a_prefix(browser: Browser, tokenizer: Tokenizer) -> None:
    with (
        serving(Bursts(tokenizer), ServerSettings(root_path="/llm")) as served,
        left_at_the_end(browser),
    ):
        browser.open(f"{served.url}/llm/")
        browser.wait("document.getElementById('state').textContent === 'ready'")
        ask(browser, "through a proxy")
        assert browser.run(ANSWER) != ""
        asked = [address for address in browser.addresses if address.startswith(served.url)]
        assert {
            address for address in asked if not address.startswith(f"{served.url}/llm/")
        } == set()


# with a real engine

POINT = """class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __repr__"""
PROMPTS = (
    POINT,
    "def read_lines(path):\n",
    "import argparse\n\ndef main():\n    parser = argparse.ArgumentParser()\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self",
)
SECONDS_OF_LOAD = 45


@pytest.fixture
def real_url() -> Iterator[str]:
    command = [
        sys.executable, "-m", "hetero_llm.cli", "serve", "demo", "--use-lookahead",
        "--device", "cpu", "--port", "0",
    ]  # fmt: skip
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    killer = threading.Timer(120, server.kill)
    killer.start()
    try:
        found = None
        while found is None:
            line = server.stdout.readline()
            assert line, "the server did not start"
            found = re.match(r"Ready on (\S+)", line)
        yield found.group(1)
    finally:
        killer.cancel()
        server.send_signal(signal.SIGTERM)
        try:
            server.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()


@pytest.mark.skipif(PICTURE not in os.environ, reason="`make test-browser` runs it")
def test_the_picture_in_the_documentation(real_url: str, browser: Browser) -> None:
    """A real server that drafts, with some load from elsewhere; writes the picture."""
    browser.size(1360, 860)
    browser.open(f"{real_url}/")
    browser.wait("document.getElementById('state').textContent === 'ready'")
    choose(browser, "complete")
    end = time.monotonic() + SECONDS_OF_LOAD

    def load(seed: int) -> None:
        chance = random.Random(seed)
        while time.monotonic() < end:
            body = {
                "prompt": chance.choice(PROMPTS),
                "max_tokens": chance.randrange(32, 256),
                "temperature": 0.8,
                "seed": chance.randrange(1000),
            }
            httpx.post(f"{real_url}/v1/completions", json=body, timeout=60).raise_for_status()
            time.sleep(chance.expovariate(1.0))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(load, range(4)))
    set_field(browser, "max-tokens", 110)
    ask(browser, POINT, modifiers=CTRL)
    browser.wait(f"{MARKS}.length > 5")
    assert browser.run(ANSWER).strip()
    browser.wait("/[1-9]/.test(document.querySelector('#chart-acceptance').innerText)")
    browser.wait("document.querySelector('#chart-queue canvas').ariaLabel.includes('running 0')")
    browser.run("document.activeElement.blur()")
    browser.screenshot(Path(os.environ[PICTURE]))
