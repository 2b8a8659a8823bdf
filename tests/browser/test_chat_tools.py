"""Reasoning, tool calls and the boxes for tools and a JSON schema in the page's chat."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hetero_llm.engine.async_engine import AsyncLLMEngine
from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server.settings import ServerSettings
from tests.browser.devtools import Browser
from tests.browser.test_page import (
    ANSWER,
    ATTACKS,
    CTRL,
    IDLE,
    LAST_TURN,
    PICTURE,
    ask,
    ending,
    kept,
    left_at_the_end,
    open_page,
    set_field,
)
from tests.scenarios.test_constrained_apis import PARAMETERS
from tests.server.fake_engine import EOS, FakeEngine
from tests.server.serving import Served, serving
from tests.server.test_app_tools import ARGUMENTS, CALL, CALL_NOW, NOW, TEMPLATE, THOUGHT, WEATHER

TOOLS = [WEATHER, NOW]
RAIN = "It **rains** in Cologne until the evening."
SCHEMA = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]}
FOLD = f"{LAST_TURN}.querySelector('.reasoning')"
CALLS = f"[...{LAST_TURN}.querySelectorAll('.call')]"
CODES = f"{CALLS}.map(call => call.querySelector('pre').textContent)"
FIELDS = f"{LAST_TURN}.querySelectorAll('.result textarea').length"
BODIES = """(real => {
  window.bodies = [];
  window.fetch = (url, options = {}) => {
    if (String(url).endsWith("chat/completions")) bodies.push(JSON.parse(options.body));
    return real(url, options);
  };
})(fetch)"""


class Model:
    """A model that gives its answers in order, one to each request.

    Attributes:
        engine: pauses behind the token that completes `pauses[0]`, which is removed then.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._answers: list[list[int]] = []
        self.pauses: list[str] = []
        self.engine = FakeEngine(tokenizer, script=self._next)

    def says(self, *answers: str, pauses: tuple[str, ...] = ()) -> None:
        asked = len(self.engine.seen)
        encode = self._tokenizer.encode
        self._answers[asked:] = [encode(one, add_special_tokens=False) for one in answers]
        self.pauses = list(pauses)

    def goes_on(self, served: Served) -> None:
        served.call(self.engine.unpaused.set)

    def asked(self, number: int) -> str:
        """The prompt of a request."""
        return self._text(self.engine.seen[number][1].token_ids)

    def _text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _next(self, prompt: list[int], sequence: int, position: int) -> int:
        ids = self._answers[len(self.engine.seen) - 1]
        if position >= len(ids):
            return EOS
        if self.pauses and self.pauses[0] in self._text(ids[: position + 1]):
            del self.pauses[0]
            self.engine.unpaused.clear()
        return ids[position]


@pytest.fixture
def model(tokenizer: Tokenizer) -> Model:
    return Model(tokenizer)


@pytest.fixture
def served(model: Model) -> Iterator[Served]:
    settings = ServerSettings(chat_template=TEMPLATE)
    with serving(model.engine, settings) as found:
        yield found


@pytest.fixture
def page(served: Served, browser: Browser) -> Iterator[Browser]:
    """The browser on the server's page, which notes the bodies of its requests in `bodies`."""
    with left_at_the_end(browser):
        open_page(browser, served)
        browser.run(BODIES)
        yield browser


def fill(browser: Browser, name: str, value: Any) -> None:
    """Types into a box as a user does, and leaves it. A text as it is, other values as JSON."""
    text = value if isinstance(value, str) else json.dumps(value)
    browser.run(f"document.getElementById('{name}-box').open = true")
    browser.run(f"document.getElementById('{name}').select()")
    browser.type(text)
    browser.run("document.activeElement.blur()")


def choose_tool(browser: Browser, choice: str) -> None:
    browser.run(
        f"(() => {{ const box = document.getElementById('tool-choice'); box.value = '{choice}';"
        "box.dispatchEvent(new Event('change')); })()"
    )


def bodies(browser: Browser) -> list[Any]:
    found: list[Any] = browser.run("bodies")
    return found


def test_reasoning_is_folded_when_the_answer_begins(
    model: Model, served: Served, page: Browser
) -> None:
    model.says(THOUGHT + RAIN, pauses=("I should", "It **rains"))
    ask(page, "Rain?", wait=False)
    title = f"{FOLD}?.querySelector('summary').textContent"
    page.wait(f"{title} === 'Thinking…' && {FOLD}.innerText.includes('I should')")
    assert page.run(f"{FOLD}.open")
    assert page.run(ANSWER) == ""
    model.goes_on(served)
    page.wait(f"{title} === 'Reasoning'")
    assert not page.run(f"{FOLD}.open")
    page.wait(f"{ANSWER}.startsWith('It')")
    page.run(f"{FOLD}.querySelector('summary').focus()")
    page.press("Enter")  # unfolded by hand, it stays so
    assert page.run(f"{FOLD}.open")
    model.goes_on(served)
    page.wait(IDLE)
    assert page.run(f"{FOLD}.open")
    assert page.run(f"{FOLD}.querySelector('.thought').textContent") == "I should look."
    assert page.run(f"{LAST_TURN}.querySelector('.answer strong').textContent") == "rains"
    page.reload()
    assert page.run(title) == "Reasoning"
    assert not page.run(f"{FOLD}.open")
    assert page.run(f"{FOLD}.querySelector('.thought').textContent") == "I should look."


def test_reasoning_that_nothing_follows_stays_open(model: Model, page: Browser) -> None:
    model.says(THOUGHT)
    set_field(page, "max-tokens", 8)
    ask(page, "Rain?")
    assert page.run(f"{FOLD}.open")
    assert page.run(f"{FOLD}.querySelector('summary').textContent") == "Reasoning"
    assert ending(page).startswith("Cut off after 8 tokens")


def test_a_call_its_result_and_the_answer(model: Model, served: Served, page: Browser) -> None:
    model.says(THOUGHT + CALL + CALL_NOW, RAIN, RAIN, pauses=('"city": "Köln',))
    fill(page, "tools", TOOLS)
    ask(page, "Rain?", wait=False)
    page.wait(f"{CODES}[0]?.includes('Köln')")
    (partial,) = page.run(CODES)
    assert ARGUMENTS.startswith(partial) and len(partial) < len(ARGUMENTS)
    assert page.run(FIELDS) == 0
    assert not page.run(f"{FOLD}.open")
    model.goes_on(served)
    page.wait(IDLE)
    whole = json.dumps(json.loads(ARGUMENTS), indent=2, ensure_ascii=False)
    assert page.run(CODES) == [whole, "{}"]
    names = f"{CALLS}.map(call => call.querySelector('h4').textContent)"
    assert page.run(names) == ["Calls get_weather", "Calls now"]
    assert ending(page) == ""
    assert page.run(f"{CALLS}.every(call => call.querySelector('.problem').hidden)")

    # The results, by keyboard: from one box to the next, and sent from there.
    labels = f"{CALLS}.map(call => call.querySelector('label').firstChild.textContent)"
    assert page.run(labels) == ["Result of get_weather", "Result of now"]
    page.run(f"{LAST_TURN}.querySelector('.result textarea').focus()")
    page.type("18 °C, rain")
    page.press("Tab")
    page.press("Tab")  # over the arguments, which can be scrolled
    page.type("noon")
    page.press("Enter", modifiers=CTRL)
    page.wait(f"document.querySelectorAll('.turn').length === 2 && {IDLE}")
    assert page.run("document.querySelectorAll('.result').length") == 0
    assert page.run(ANSWER) == RAIN.replace("*", "")
    shown = f"[...{LAST_TURN}.querySelectorAll('h3')].map(one => one.textContent)"
    assert page.run(shown) == ["Result of get_weather", "Result of now", "Model"]
    user, said, *results = bodies(page)[1]["messages"]
    assert user == {"role": "user", "content": "Rain?"}
    ids = [call["id"] for call in said["tool_calls"]]
    assert len(set(ids)) == 2
    function = {"name": "get_weather", "arguments": ARGUMENTS}
    assert said["tool_calls"][0] == {"id": ids[0], "type": "function", "function": function}
    assert (said["content"], said["reasoning"]) == (None, "I should look.")
    assert results == [
        {"role": "tool", "tool_call_id": ids[0], "content": "18 °C, rain"},
        {"role": "tool", "tool_call_id": ids[1], "content": "noon"},
    ]
    assert bodies(page)[1]["tools"] == TOOLS
    prompt = model.asked(1)
    parts = ("# user: Rain?", "<tool_call>", "# tool: 18 °C, rain", "# tool: noon")
    assert [prompt.index(part) for part in parts] == sorted(prompt.index(part) for part in parts)

    # All of it outlives a reload; another answer is asked with the same results.
    text = page.run("document.getElementById('log').innerText")
    page.reload()
    page.wait("!document.getElementById('send').disabled")
    assert page.run("document.getElementById('log').innerText") == text
    page.run(BODIES)
    page.run(f"[...{LAST_TURN}.querySelectorAll('.tools button')].at(-1).click()")
    page.wait(f"bodies.length === 1 && {IDLE} && {ANSWER} !== ''")
    assert bodies(page)[0]["messages"] == [user, said, *results]
    assert bodies(page)[0]["tools"] == TOOLS


def test_a_call_that_was_cut_off_is_not_sent_back(model: Model, page: Browser) -> None:
    model.says(CALL, RAIN)
    fill(page, "tools", TOOLS)
    cut = len(model.engine.tokenizer.encode(CALL[:60], add_special_tokens=False))
    set_field(page, "max-tokens", cut)
    ask(page, "Rain?")
    (partial,) = page.run(CODES)
    assert partial and ARGUMENTS.startswith(partial)
    assert "no complete JSON object" in page.run(f"{CALLS}[0].innerText")
    assert page.run(FIELDS) == 0
    assert ending(page) == f"Cut off after {cut} tokens: “Most tokens” is {cut}."
    set_field(page, "max-tokens", 100)
    ask(page, "And now?")
    assert bodies(page)[1]["messages"] == [{"role": "user", "content": "And now?"}]


def test_results_go_with_their_call_only(model: Model, page: Browser) -> None:
    """A full storage may have lost the turn with the call."""
    model.says(CALL, RAIN, RAIN)
    fill(page, "tools", TOOLS)
    ask(page, "Rain?")
    page.run(f"{LAST_TURN}.querySelector('.calls').requestSubmit()")
    page.wait(f"document.querySelectorAll('.turn').length === 2 && {IDLE}")
    assert bodies(page)[1]["messages"][-1]["content"] == ""  # a tool may have nothing to say
    page.run(
        "(() => { const key = Object.keys(localStorage)[0];"
        "const all = JSON.parse(localStorage[key]); all.turns.shift();"
        "localStorage[key] = JSON.stringify(all); })()"
    )
    page.reload()
    page.wait("!document.getElementById('send').disabled")
    page.run(BODIES)
    ask(page, "And now?")
    assert bodies(page)[0]["messages"] == [{"role": "user", "content": "And now?"}]


def test_the_choice_of_tools_is_sent(model: Model, page: Browser) -> None:
    model.says("One", "Two", "Three")
    values = "[...document.getElementById('tool-choice').options].map(one => one.value)"
    assert page.run(values) == ["auto", "required", "none"]
    ask(page, "without")
    fill(page, "tools", TOOLS)
    assert page.text("tools-note") == " (2)"
    assert page.run(values) == ["auto", "required", "none", "=get_weather", "=now"]
    choose_tool(page, "none")
    ask(page, "none")
    choose_tool(page, "=now")
    ask(page, "now")
    found = [(body.get("tools"), body.get("tool_choice")) for body in bodies(page)]
    named = {"type": "function", "function": {"name": "now"}}
    assert found == [(None, None), (TOOLS, "none"), (TOOLS, named)]
    page.complaints.clear()  # the scripted engine cannot follow the last one's grammar
    page.reload()
    assert page.run("document.getElementById('tool-choice').value") == "=now"
    fill(page, "tools", [WEATHER])
    assert page.run("document.getElementById('tool-choice').value") == "auto"


def test_wrong_json_is_told_beside_the_box(page: Browser) -> None:
    for name, wrong, complaint in (
        ("tools", '[{"type": "function"', "Invalid JSON: "),
        ("tools", "{}", "Not a JSON list: a list, [...] is needed."),
        ("tools", "null", "Not a JSON list: a list, [...] is needed."),
        ("schema", '{"type": }', "Invalid JSON: "),
        ("schema", "[]", "Not a JSON object: an object, {...} is needed."),
    ):
        fill(page, name, wrong)
        assert page.text(f"{name}-problem").startswith(complaint)
        assert page.text(f"{name}-note") == " (invalid)"
        field = f"document.getElementById('{name}')"
        assert page.run(f"{field}.getAttribute('aria-invalid')") == "true"
        assert page.run(f"{field}.getAttribute('aria-describedby')") == f"{name}-problem"
        fill(page, name, " ")
        assert page.text(f"{name}-problem") == page.text(f"{name}-note") == ""
        assert not page.run(f"{field}.hasAttribute('aria-invalid')")


@pytest.mark.parametrize("name", ["tools", "schema"])
def test_wrong_json_is_not_sent(model: Model, page: Browser, name: str) -> None:
    model.says("Yes")
    fill(page, name, "[{")
    page.run(f"document.getElementById('{name}-box').open = false")
    page.run("document.getElementById('prompt').focus()")
    page.type("Rain?")
    page.press("Enter")
    page.wait(f"document.activeElement.id === '{name}'")  # opened, to be put right
    assert page.text("notice").startswith("Not sent: ")
    assert page.run("document.querySelectorAll('.turn').length") == 0
    assert page.run("document.getElementById('prompt').value") == "Rain?"
    page.run("document.activeElement.select()")
    page.type(" ")
    assert page.text(f"{name}-problem") == ""
    page.run("document.getElementById('form').requestSubmit()")
    page.wait(f"document.querySelectorAll('.turn').length === 1 && {IDLE}")
    assert page.run(ANSWER) == "Yes"
    assert page.text("notice") == ""
    assert "tools" not in bodies(page)[0] and "response_format" not in bodies(page)[0]


def test_wrong_json_is_told_while_the_box_is_open(page: Browser) -> None:
    page.run("document.getElementById('tools-box').open = true")
    page.run("document.getElementById('tools').focus()")
    page.type("[")
    assert page.text("tools-problem") == ""  # it is still being typed
    page.wait("document.getElementById('tools-problem').textContent !== ''")


def test_what_the_server_refuses(page: Browser) -> None:
    """With the field that it names, in the conversation and beside the box."""
    for name, value, param in (
        ("tools", [{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
        ("tools", [NOW, NOW], "tools[1].function.name"),
        ("tools", [], ""),
        (
            "schema",
            {"type": "array", "uniqueItems": True},
            "response_format.json_schema.schema.uniqueItems",
        ),
        (
            "schema",
            {"properties": {"a": {"type": "nothing"}}},
            "response_format.json_schema.schema.properties.a.type",
        ),
    ):
        fill(page, name, value)
        if not param:
            continue
        ask(page, "Rain?")
        assert ending(page).startswith(f"{param}=")
        assert page.run(f"{LAST_TURN}.querySelector('.ending').className") == "ending failed"
        assert page.text(f"{name}-problem") == ending(page)
        other = {"tools": "schema", "schema": "tools"}[name]
        assert page.text(f"{other}-problem") == ""
    assert page.run("document.getElementById('banner').hidden")
    assert len(page.complaints) == 4
    page.complaints.clear()


def test_a_schema_is_sent_and_kept(model: Model, page: Browser) -> None:
    fill(page, "schema", SCHEMA)
    assert page.text("schema-note") == " (set)"
    model.says('{"rain": true}', '{"count": 1}')
    ask(page, "Rain?")
    form = {"name": "answer", "schema": SCHEMA, "strict": True}
    assert bodies(page)[0]["response_format"] == {"type": "json_schema", "json_schema": form}
    large = {"properties": {"count": {"type": "integer", "maximum": 2**63 - 1}}}
    fill(page, "schema", large)
    ask(page, "How much?")
    found = [params.structured_outputs for _, _, params in model.engine.seen]
    assert [one.json for one in found if one is not None] == [SCHEMA, large]
    fill(page, "schema", SCHEMA)
    page.run("document.getElementById('clear').click()")
    page.reload()
    assert page.run("JSON.parse(document.getElementById('schema').value)") == SCHEMA
    assert page.text("schema-note") == " (set)"


def test_turns_of_an_earlier_page_are_shown(model: Model, page: Browser) -> None:
    model.says("One", "Two")
    ask(page, "first words")
    old = {"chatting": True, "text": "a", "images": 0, "answer": "b", "marks": [], "end": None}
    page.run(
        "(() => { const key = Object.keys(localStorage)[0]; localStorage[key] = JSON.stringify("
        f"{{version: 1, settings: {{}}, turns: [{json.dumps(old)}]}}); }})()"
    )
    page.reload()
    page.wait("!document.getElementById('send').disabled")
    ask(page, "and more")
    assert [turn["answer"] for turn in kept(page)] == ["b", "Two"]
    assert page.run("document.getElementById('tool-choice').value") == "auto"


def test_calls_and_reasoning_stay_text(model: Model, page: Browser) -> None:
    attack = ATTACKS[0]
    call = {"name": "get_weather", "arguments": {"city": attack, "</code>": "<img src=x>"}}
    model.says(f"<think>{attack}</think>\n\n<tool_call>\n{json.dumps(call)}\n</tool_call>", attack)
    fill(page, "tools", TOOLS)
    ask(page, "Rain?")
    page.run(f"{LAST_TURN}.querySelector('.result textarea').value = {json.dumps(attack)}")
    page.run(f"{LAST_TURN}.querySelector('.calls').requestSubmit()")
    page.wait(f"document.querySelectorAll('.turn').length === 2 && {IDLE}")
    assert page.run("document.querySelector('.thought').textContent") == attack
    (arguments,) = page.run("[...document.querySelectorAll('.call pre')].map(one => one.innerText)")
    assert json.loads(arguments) == call["arguments"]
    assert attack in page.run(f"{LAST_TURN}.innerText")
    assert page.run("[...document.querySelectorAll('#log :is(img, script, svg)')].length") == 0
    assert not page.run("'hacked' in window")


PRETTY = """(async () => {
  const { pretty } = await import("/assets/calls.js");
  return %s.map(pretty);
})()"""


def test_arguments_get_lines(page: Browser) -> None:
    chance = random.Random(7)

    def value(depth: int) -> Any:
        kind = chance.randrange(8 if depth else 5)
        if kind >= 5:
            items = [value(depth - 1) for _ in range(chance.randrange(4))]
            if kind == 5:
                return items
            return {chance.choice('ab"\\:,{ ') + str(i): item for i, item in enumerate(items)}
        return (True, None, -1.5e30, 'a "b\\" {[,:]} \n', 12345678901234567890)[kind]

    values = [value(4) for _ in range(40)]
    spaced = ((",", ":"), (" ,\n", " : "))
    texts = [json.dumps(one, separators=chance.choice(spaced)) for one in values]
    assert page.run(PRETTY % json.dumps(texts)) == [json.dumps(one, indent=2) for one in values]
    deep = "[" * 3000 + "]" * 3000
    (found,) = page.run(PRETTY % json.dumps([deep]))
    assert re.sub(r"\s", "", found) == deep and len(found) < 500_000


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 720)])
def test_the_boxes_fit(model: Model, page: Browser, width: int, height: int) -> None:
    page.size(width, height, mobile=width < 1000)
    call = {"name": "get_weather", "arguments": {"city": "K" * 300}}
    model.says(f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
    long = {"type": "function", "function": {"name": "w" * 64}}
    fill(page, "tools", [long, WEATHER])
    ask(page, "Rain? " * 20)
    for name in ("tools", "schema", "system"):
        page.run(f"document.getElementById('{name}-box').open = true")
        others = "document.querySelectorAll('#extras details[open]').length"
        page.wait(f"{others} === 1")
        assert page.run("document.documentElement.scrollWidth") <= width
        bottom = page.run(
            "scrollTo(0, 0); document.getElementById('send').getBoundingClientRect().bottom"
        )
        assert 0 < bottom <= height
    assert page.run("document.getElementById('log').clientHeight") > 90
    assert page.run(f"{LAST_TURN}.scrollWidth <= {LAST_TURN}.clientWidth")


# by `make test-browser` alone


@pytest.mark.skipif(PICTURE not in os.environ, reason="`make test-browser` runs it")
def test_a_real_model_calls_a_tool(browser: Browser) -> None:
    """The demo model knows nothing of tools: the grammar alone makes it call one."""
    engine = AsyncLLMEngine({"model": "demo", "device": "cpu", "use_lookahead": True})
    settings = ServerSettings(
        chat_template=TEMPLATE, tool_call_parser="hermes", reasoning_parser="none"
    )
    weather = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
    with serving(engine, settings) as served, left_at_the_end(browser):
        try:
            open_page(browser, served)
            fill(browser, "tools", [weather, NOW])
            choose_tool(browser, "=get_weather")
            ask(browser, "Rain?")
            (arguments,) = browser.run(CODES)
            jsonschema.validate(json.loads(arguments), PARAMETERS)
            assert browser.run(FIELDS) == 1
            fill(browser, "tools", "")
            fill(browser, "schema", PARAMETERS)
            ask(browser, "Which weather?")
            jsonschema.validate(json.loads(browser.run(ANSWER)), PARAMETERS)
        finally:
            engine.process.kill()


@pytest.mark.skipif(PICTURE not in os.environ, reason="`make test-browser` runs it")
def test_the_pictures_of_the_chat(model: Model, page: Browser) -> None:
    """Writes chat_tools_{light,dark,phone}.png beside the picture of the status page."""
    folder = Path(os.environ[PICTURE]).parent
    thought = (
        "<think>\nThe user asks about rain in Cologne. I know no weather, so I call get_weather "
        "for today.\n</think>\n\n"
    )
    call = {"name": "get_weather", "arguments": {"city": "Cologne", "days": 1}}
    said = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    model.engine.delay = 0.02
    model.says(thought + said, "Yes: it **rains** in Cologne, at 18 °C.", '{"rain": true}')

    def write(name: str, scheme: str, width: int, height: int) -> None:
        page.media(scheme)
        page.size(width, height, mobile=name == "phone")
        page.run("document.getElementById('log').scrollTop = 1e6; document.activeElement.blur()")
        page.screenshot(folder / f"chat_tools_{name}.png")

    page.size(840, 760)
    fill(page, "tools", TOOLS)
    page.run("document.getElementById('tools-box').open = false")
    ask(page, "Does it rain in Cologne?")
    page.run(f"{FOLD}.open = true")
    page.run(f"{LAST_TURN}.querySelector('.result textarea').focus()")
    page.type("18 °C, rain")
    write("light", "light", 840, 760)
    page.run(f"{FOLD}.open = false")
    page.run(f"{LAST_TURN}.querySelector('.calls').requestSubmit()")
    page.wait(f"document.querySelectorAll('.turn').length === 2 && {IDLE}")
    write("dark", "dark", 840, 760)
    fill(page, "tools", "")
    fill(page, "schema", SCHEMA)
    ask(page, "As JSON, please.")
    write("phone", "light", 390, 844)
