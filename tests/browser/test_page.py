"""The status page in a real browser: `make test-browser`, and `make test` where there is one."""

from __future__ import annotations

import asyncio
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
from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server.settings import ServerSettings
from tests.browser.devtools import Browser
from tests.server.fake_engine import EOS, FakeEngine
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


def kept(browser: Browser) -> Any:
    """The turns that are kept over a reload."""
    return browser.run("JSON.parse(Object.values(localStorage)[0] ?? '{}').turns ?? []")


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
    # The engine echoes its prompt, which begins as a heading of Markdown.
    echoed = text_of(served, one.token_ids[:5])
    assert kept(browser)[0]["answer"] == echoed
    assert first == echoed.removeprefix("# ").strip()
    told = text_of(served, two.token_ids)
    answer = kept(browser)[0]["answer"].strip()
    assert told.index("first words") < told.rindex(answer) < told.index("and more")
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
        assert "key-one" not in browser.run("JSON.stringify(localStorage)")
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
        "", "key-button", "log", "prompt", "", "", "", "mode", "max-tokens", "temperature", "clear",
        "send",
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


@pytest.mark.parametrize(("width", "height"), [(390, 844), (360, 640), (1280, 720)])
def test_send_is_seen_without_scrolling(
    served: Served, browser: Browser, width: int, height: int
) -> None:
    browser.size(width, height, mobile=width < 1000)
    open_page(browser, served)
    choose(browser, "complete")
    set_field(browser, "max-tokens", 60)
    ask(browser, "a long line of words\n" * 30, modifiers=CTRL)
    for extra in ("", "document.getElementById('banner').hidden = false;"):
        bottom = browser.run(
            f"{extra} scrollTo(0, 0);document.getElementById('send').getBoundingClientRect().bottom"
        )
        assert 0 < bottom <= height
    assert browser.run("document.getElementById('log').clientHeight") > 90
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


# the end of an answer

ENDING = (
    "(one => one.hidden ? '' : one.textContent)([...document.querySelectorAll('.ending')].at(-1))"
)
LAST_TURN = "[...document.querySelectorAll('.turn')].at(-1)"


def ending(browser: Browser) -> str:
    return str(browser.run(ENDING))


def test_an_answer_that_was_cut_off_says_so(browser: Browser, tokenizer: Tokenizer) -> None:
    def script(prompt: list[int], sequence: int, position: int) -> int:
        return EOS if position == 6 else prompt[position % len(prompt)]

    with serving(FakeEngine(tokenizer, script=script)) as served, left_at_the_end(browser):
        open_page(browser, served)
        ask(browser, "comes to its end")
        assert ending(browser) == "" and browser.run(ANSWER) != ""
        set_field(browser, "max-tokens", 3)
        ask(browser, "comes to its limit")
        assert ending(browser) == "Cut off after 3 tokens: “Most tokens” is 3."
        shown = "getComputedStyle(document.querySelector('.turn:last-child .ending')).color"
        assert browser.run(shown) != browser.run("getComputedStyle(document.body).color")
        browser.reload()
        assert ending(browser) == "Cut off after 3 tokens: “Most tokens” is 3."
        assert browser.run("document.querySelectorAll('.ending:not([hidden])').length") == 1


def test_an_answer_that_fills_the_context(served: Served, browser: Browser) -> None:
    open_page(browser, served)
    choose(browser, "complete")
    browser.run(
        "const real = fetch; window.fetch = (url, options = {}) => real(url,"
        " !options.body ? options : {...options, body: options.body.replace(':256', ':2')})"
    )
    ask(browser, "asks for more", modifiers=CTRL)
    assert ending(browser) == "Cut off after 2 tokens: the context is full."


def test_an_answer_that_was_stopped_or_aborted_says_so(
    browser: Browser, tokenizer: Tokenizer
) -> None:
    with serving(FakeEngine(tokenizer, delay=0.02)) as served, left_at_the_end(browser):
        open_page(browser, served)
        set_field(browser, "max-tokens", 1000)
        ask(browser, "on and on", wait=False)
        browser.wait(f"{ANSWER} !== ''")
        browser.press("Escape")
        browser.wait(IDLE)
        assert ending(browser) == "Cut off: you have stopped it."
        ask(browser, "on and on", wait=False)
        browser.wait(f"{ANSWER} !== ''")
        request_id = served.engine.seen[-1][0]
        served.call(lambda: asyncio.ensure_future(served.engine.abort(request_id)))
        browser.wait(IDLE)
        assert ending(browser) == "Cut off: the server has aborted it."
        ask(browser, "on and on", wait=False)
        browser.wait(f"{ANSWER} !== ''")
        browser.reload()
        browser.wait("document.getElementById('state').textContent === 'ready'")
        assert ending(browser) == "Cut off: the page was left."
        assert browser.run(ANSWER) != ""


def test_an_answer_that_failed_says_so(browser: Browser, tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer, fail_after=3)) as served, left_at_the_end(browser):
        open_page(browser, served)
        ask(browser, "breaks in the middle")
        assert browser.run(ANSWER) != "" and ending(browser).startswith("Cut off: ")
        assert browser.run(f"{LAST_TURN}.querySelector('.ending').className") == "ending failed"


# markdown

DRAWN = """(async () => {
  const { Rendered } = await import("/assets/markdown.js");
  const box = document.createElement("div");
  const rendered = new Rendered(box, %s);
  for (const end of %s) rendered.show(%s.slice(0, end), %s);
  return box.outerHTML.slice(5, -6).replaceAll(/ (class="draft"|tabindex="0")/g, "");
})()"""


def drawn(
    browser: Browser,
    source: str,
    *,
    plain: bool = False,
    ends: list[int] | None = None,
    marks: list[list[int]] | None = None,
) -> str:
    """The elements that a text becomes. `ends`: it is shown up to there, one after the other."""
    parts = (plain, ends or [len(source)], source, marks or [])
    return str(browser.run(DRAWN % tuple(map(json.dumps, parts))))


FENCED = "```python\ndef f(x):\n    return **x**\n\n# no heading\n```\nafter"
MARKDOWN = {
    "a\nb\n\n\nc": "<p>a\nb</p><p>c</p>",
    "# One\n### Two ##\n####### no": "<h4>One</h4><h6>Two</h6><p>####### no</p>",
    "#hash and 2 * 3 * 4": "<p>#hash and 2 * 3 * 4</p>",
    "**b** *i* `c*d*` ***both***":
        "<p><strong>b</strong> <em>i</em> <code>c*d*</code> <strong><em>both</em></strong></p>",
    "`` a`b `` and `open": "<p><code> a`b </code> and `open</p>",
    "**open, snake_case and *a **b***":
        "<p><strong>open, snake_case and <em>a **b</em></strong></p>",
    "- a\n- **b**\n  more\n    - c\n- d":
        "<div><ul><li>a</li><li><strong>b</strong>\n  more<ul><li>c</li></ul></li><li>d</li></ul>"
        "</div>",
    "Steps:\n3. a\n\n4. b\n\nEnd":
        '<p>Steps:</p><div><ol start="3"><li>a</li><li>b</li></ol></div><p>End</p>',
    "* a\n1. b": '<div><ul><li>a</li></ul><ol start="1"><li>b</li></ol></div>',
    FENCED:
        "<pre><code>def f(x):\n    return **x**\n\n# no heading</code></pre><p>after</p>",
    "~~~\n```\n": "<pre><code>```</code></pre>",
    "```": "<pre><code></code></pre>",
    "<b>no</b> &amp; [a](http://x)": "<p>&lt;b&gt;no&lt;/b&gt; &amp;amp; [a](http://x)</p>",
    "\n \n": "",
}  # fmt: skip


def test_markdown_becomes_elements(served: Served, browser: Browser) -> None:
    open_page(browser, served)
    for source, expected in MARKDOWN.items():
        assert drawn(browser, source) == expected, source
    assert drawn(browser, "a\n**b**", plain=True) == "<span>a\n</span><span>**b**</span>"
    shaded = drawn(browser, "ab **cd** `ef`", marks=[[1, 6], [7, 7], [8, 14]])
    assert shaded == (
        "<p>a<mark>b </mark><strong><mark>c</mark>d</strong><mark> </mark>"
        "<code><mark>ef</mark></code></p>"
    )


def test_markdown_that_grows_becomes_the_same(served: Served, browser: Browser) -> None:
    """After each piece of a stream, as if the text had come whole; noise, too."""
    open_page(browser, served)
    chance = random.Random(5)
    signs = [
        "`",
        "``",
        "```",
        "*",
        "**",
        "***",
        "#",
        "- ",
        "1. ",
        "\n",
        "\n\n",
        "    ",
        " ",
        "a",
        "<b>",
    ]
    noise = ["".join(chance.choices(signs, k=60)) for _ in range(20)]
    for source in ("\n\n".join(MARKDOWN), *noise):
        cuts = sorted(chance.sample(range(len(source)), 12))
        grown = drawn(browser, source, ends=[*cuts, len(source)])
        assert grown == drawn(browser, source), source
        bare = re.sub(r"<[^>]*>", "", grown)
        assert "<b" not in bare and len(bare) <= 4 * len(source)


def test_markdown_of_nothing_but_signs_takes_no_time(served: Served, browser: Browser) -> None:
    open_page(browser, served)
    for sign in ("*", "**a ", "`", "`a``b", "*a **b ", "- ", "  - a\n", "> ", "#", "***a*"):
        assert drawn(browser, "x " + sign * (20_000 // len(sign))) != ""


ATTACKS = (
    '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>',
    "[x](javascript:window.hacked=1) <a href=javascript:window.hacked=1>y</a>",
    "```html\n</code></pre><svg onload=window.hacked=1>\n```",
    "- **<iframe srcdoc='<script>parent.hacked=1</script>'>**\n- `<style>*{display:none}</style>`",
)


def test_a_models_text_stays_text(browser: Browser, tokenizer: Tokenizer) -> None:
    """The engine echoes its prompt: all of this comes back in the answers, and from storage."""
    with serving(Bursts(tokenizer)) as served, left_at_the_end(browser):
        open_page(browser, served)
        known = (
            "article, h3, h4, h5, h6, div, span, p, button, mark, code, pre, ul, ol, li, strong, em"
        )
        foreign = (
            f"[...document.querySelectorAll('.turn *')].filter(one => !one.matches('{known}'))"
            ".map(one => one.outerHTML).concat(window.hacked ?? [])"
        )
        for mode in ("chat", "complete"):
            choose(browser, mode)
            for attack in ATTACKS:
                ask(browser, attack, modifiers=CTRL)
        assert "onerror" in browser.run("document.querySelector('.answer').textContent")
        assert browser.run(foreign) == []
        browser.run(
            "(() => { const key = Object.keys(localStorage)[0];"
            "const all = JSON.parse(localStorage[key]);"
            f"all.turns[0].end = {{kind: '\"><img src=x>', text: {json.dumps(ATTACKS[0])}}};"
            "localStorage[key] = JSON.stringify(all); })()"
        )
        browser.reload()
        browser.wait("document.getElementById('state').textContent === 'ready'")
        assert browser.run("document.querySelectorAll('.turn').length") == 2 * len(ATTACKS)
        assert browser.run(foreign) == []


# the conversation


def test_the_conversation_outlives_a_reload(served: Served, browser: Browser) -> None:
    open_page(browser, served)
    browser.run("document.querySelector('#system-box').open = true")
    browser.run("document.getElementById('system').focus()")
    browser.type("Be brief.")
    set_field(browser, "max-tokens", 5)
    ask(browser, "first words")
    text = browser.run("document.getElementById('log').innerText")
    browser.reload()
    browser.wait("!document.getElementById('send').disabled")
    assert browser.run("document.getElementById('log').innerText") == text
    assert browser.run("document.getElementById('system').value") == "Be brief."
    assert browser.run("document.getElementById('max-tokens').value") == "5"
    ask(browser, "and more")
    told = text_of(served, served.engine.seen[-1][1].token_ids)
    order = [told.index(one) for one in ("Be brief.", "first words", "and more")]
    assert order == sorted(order)
    choose(browser, "complete")
    assert browser.run("document.getElementById('extras').hidden")
    browser.run("document.getElementById('clear').click()")
    browser.reload()
    assert browser.run("document.querySelectorAll('.turn').length") == 0


def test_a_storage_that_is_not_ours(served: Served, browser: Browser) -> None:
    open_page(browser, served)
    set_field(browser, "max-tokens", 1)
    ask(browser, "first words")
    name = json.dumps(browser.run("Object.keys(localStorage)[0]"))
    for stored in ("{", "[]", "null", '{"version":1,"turns":[{"text":1}]}'):
        browser.run(f"localStorage[{name}] = {json.dumps(stored)}")
        browser.reload()
        browser.wait("document.getElementById('model').textContent === 'demo'")
        assert browser.run("document.querySelectorAll('.turn').length") == 0


def test_a_full_storage_is_told(served: Served, browser: Browser) -> None:
    open_page(browser, served)
    ask(browser, "first words")
    browser.run(
        "Storage.prototype.setItem = () => { throw new DOMException('', 'QuotaExceededError') }"
    )
    ask(browser, "and more")
    assert browser.text("notice") == (
        "The browser has no more room: no turns will be there after a reload."
    )


def test_another_answer_and_a_copy(served: Served, browser: Browser) -> None:
    open_page(browser, served)
    ask(browser, "first words")
    ask(browser, "and more")
    shown = "[...document.querySelectorAll('.tools')].map(row => row.innerText.split(/\\s+/))"
    assert browser.run(shown) == [["Copy"], ["Copy", "Regenerate"]]
    (_, _, _), (_, before, _) = served.engine.seen
    browser.run(f"{LAST_TURN}.querySelector('.tools').lastChild.click()")
    browser.wait(f"{IDLE} && {ANSWER} !== ''")
    again = served.engine.seen[2][1]
    assert again.token_ids == before.token_ids
    assert [turn["text"] for turn in kept(browser)] == ["first words", "and more"]
    browser.run(
        "navigator.clipboard.writeText = text => { window.copied = text;return Promise.resolve(); }"
    )
    copy = f"{LAST_TURN}.querySelector('.tools').firstChild"
    browser.run(f"{copy}.click()")
    browser.wait(f"{copy}.textContent === 'Copied'")
    assert browser.run("copied") == kept(browser)[1]["answer"]
    browser.run("navigator.clipboard.writeText = () => Promise.reject(new Error('not allowed'))")
    browser.run(f"{copy}.click()")
    browser.wait(f"{copy}.textContent.startsWith('Selected')")
    assert browser.run("getSelection().toString().trim()") == browser.run(
        f"{LAST_TURN}.querySelector('.answer').innerText.trim()"
    )


PRETEND_IMAGES = """(real => {
  window.bodies = [];
  window.fetch = async (url, options = {}) => {
    if (options.body) bodies.push(JSON.parse(options.body));
    const response = await real(url, options);
    if (!String(url).includes("status.json")) return response;
    const body = await response.json();
    Object.assign(body.model, { images: 2, image_bytes: 1000 });
    return new Response(JSON.stringify(body));
  };
})(fetch)"""
CHOOSE_IMAGES = """(async () => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 3, height: 2 });
  const blob = await new Promise((done) => canvas.toBlob(done));
  const chosen = new DataTransfer();
  chosen.items.add(new File([blob], "small.png", { type: "image/png" }));
  chosen.items.add(new File([new Uint8Array(2000)], "large.png", { type: "image/png" }));
  const files = document.getElementById("files");
  files.files = chosen.files;
  files.dispatchEvent(new Event("change"));
})()"""


def test_images_go_to_models_that_take_them(served: Served, browser: Browser) -> None:
    open_page(browser, served)
    hidden = "document.getElementById('attach').hidden"
    assert browser.run(hidden)
    browser.run(PRETEND_IMAGES)
    browser.wait(f"!{hidden}")
    browser.run(CHOOSE_IMAGES)
    seen = "document.querySelector('#attached canvas')?.ariaLabel === 'image of 3 x 2 pixels'"
    browser.wait(seen)
    browser.wait("document.getElementById('notice').textContent !== ''")
    refused = "large.png is not attached: it has more than 1000 bytes."
    assert browser.text("notice") == refused
    ask(browser, "What is it?")
    (message,) = browser.run("bodies.find(body => body.messages).messages")
    image, text = message["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    assert text == {"type": "text", "text": "What is it?"}
    assert (
        browser.run("document.querySelector('.turn canvas').ariaLabel") == "image of 3 x 2 pixels"
    )
    assert "image" in ending(browser)  # the engine takes none
    assert browser.run("document.getElementById('attached').hidden")
    browser.complaints.clear()
    browser.reload()
    assert "not kept over the reload" in browser.run(f"{LAST_TURN}.innerText")
    assert browser.run(f"{LAST_TURN}.querySelector('.tools').lastChild.hidden")
    assert "base64" not in browser.run("JSON.stringify(localStorage)")


def test_latency_and_memory_are_shown(served: Served, browser: Browser) -> None:
    open_page(browser, served)
    ask(browser, "some words of a prompt")
    browser.wait(
        "/p50 .*s, p95 .*s, p99 .*s/.test(document.getElementById('latency-first').innerText)"
    )
    assert re.fullmatch(r"p50 .*s, p95 .*s, p99 .*s", browser.text("latency-between"))
    assert browser.text("kv-memory") == "25% of 8.2K tokens"
    assert re.fullmatch(r"\d+\.\d of \d+\.\d GiB", browser.text("host-memory"))
    assert browser.run("document.getElementById('gpu-box').hidden")
    browser.wait("document.querySelector('#chart-first canvas').ariaLabel.match(/p99 [0-9]/)")


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
    browser.size(1360, 960)
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
                "stream": True,
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
