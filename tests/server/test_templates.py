"""Chat templates that never end, write without end or die: one request fails, the others go on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server import templates
from hetero_llm.server.errors import ApiError
from hetero_llm.server.settings import Limits, ServerSettings
from hetero_llm.server.templates import ChatTemplate
from tests.server.fake_engine import CONTEXT, FakeEngine
from tests.server.serving import Served, raw_post, received, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "a b"}]
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# What the last message says decides what the template does.
MOODY = (
    "{% set word = messages[-1].content %}"
    "{% if word == 'loop' %}" + LOOP + "{% endif %}"
    "{% if word == 'power' %}{{ (word | length) ** (10 ** 9) }}{% endif %}"
    "{% if word == 'write' %}{{ 'ab' * 100000 }}{% endif %}"
    "{% if word == 'fill' %}{{ 'a' * 999999999 }}{% endif %}"
    "<{{ word }}>"
)
PLAIN = {"add_generation_prompt": True, "continue_final_message": False}
WAITING = Limits(template_seconds=60.0)
SHORT = Limits(template_seconds=0.5)
LATE = "it did not end within 0.5 s"


@pytest.fixture
def fresh_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start as they do in service; those of other tests are forked."""
    monkeypatch.setattr(templates, "subprocess", subprocess)


def conversation(word: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": word}], "max_tokens": 1}


@pytest.fixture(scope="module")
def moody(tokenizer: Tokenizer) -> Iterator[Callable[[Limits], Served]]:
    """Servers of the template, with a short limit of time and without."""
    with ExitStack() as stack:
        servers = {
            limits: stack.enter_context(
                serving(FakeEngine(tokenizer), ServerSettings(chat_template=MOODY, limits=limits))
            )
            for limits in (SHORT, WAITING)
        }
        yield servers.__getitem__


@pytest.mark.parametrize(
    ("word", "limits", "reason"),
    [
        ("loop", SHORT, LATE),
        ("power", SHORT, LATE),  # one call of C code
        ("fill", WAITING, "it takes too much memory"),
        (
            "write",
            WAITING,
            f"it writes more than {len('rolecontentuserwrite') + 4 * CONTEXT} characters",
        ),
    ],
)
def test_a_template_out_of_bounds(
    moody: Callable[[Limits], Served], word: str, limits: Limits, reason: str
) -> None:
    served = moody(limits)
    for path in (CHAT, "/tokenize") if word == "write" else (CHAT,):
        answer = served.post(path, conversation(word))
        assert answer.status_code == 400
        message = f"messages: the chat template cannot be applied: {reason}"
        assert answer.json()["error"] == {
            "message": message, "type": "invalid_request_error", "param": "messages",
            "code": "invalid_value",
        }  # fmt: skip
    while (answer := served.post(CHAT, conversation("fine"))).status_code != 200:
        # Not even this ends in time on a very busy machine.
        assert limits is SHORT and LATE in answer.text
    assert served.engine.seen[-1][1].text == "<fine>"


@pytest.mark.usefixtures("fresh_workers")
def test_others_go_on_while_a_template_loops(tokenizer: Tokenizer) -> None:
    settings = ServerSettings(chat_template=MOODY, limits=WAITING)
    with serving(FakeEngine(tokenizer), settings) as served:
        template = served.context.tokenizer.chat_template
        assert template is not None
        with raw_post(served, CHAT, conversation("loop")) as looping:
            served.wait(lambda: len(template.pids) == 1)
            looper = template.pids[0]
            assert served.post(COMPLETIONS, {"prompt": "a"}).status_code == 200
            # A conversation gets a worker of its own, after a moment.
            for word in ("fine", "fine, too"):
                assert served.post(CHAT, conversation(word)).status_code == 200
            assert looper in template.pids and len(template.pids) == 2
            # When the looping one is gone for good, its request is answered, too: tried once more
            # by the worker that is idle, which meets the same end.
            os.kill(looper, signal.SIGKILL)
            served.wait(lambda: looper not in template.pids)
            (second,) = template.pids
            os.kill(second, signal.SIGKILL)
            assert b"the process that renders it died" in received(looping, b"}}")
        assert served.post(CHAT, conversation("fine")).status_code == 200


@pytest.mark.usefixtures("fresh_workers")
def test_an_idle_worker_that_was_killed_is_replaced(tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer)) as served:
        template = served.context.tokenizer.chat_template
        assert template is not None and template.pids == []
        body = {"messages": USER, "max_tokens": 1}
        first = served.post(CHAT, body).json()["choices"]
        (worker,) = template.pids
        os.kill(worker, signal.SIGKILL)
        assert served.post(CHAT, body).json()["choices"] == first
        assert len(template.pids) == 1 and worker not in template.pids


def test_many_conversations_share_one_worker() -> None:
    async def run() -> None:
        template = ChatTemplate("{{ messages[0].content }}", {}, seconds=60.0, patience=60.0)
        template.start()
        (worker,) = template.pids
        try:
            await template.render([{"role": "user", "content": "warm"}], PLAIN, most_chars=9)
            words = [f"{number} é😀" for number in range(200)]
            rendered = await asyncio.gather(
                *(
                    template.render([{"role": "user", "content": word}], PLAIN, most_chars=9)
                    for word in words
                )
            )
            assert rendered == words and template.pids == [worker]
        finally:
            template.close()
        assert template.pids == []

    asyncio.run(run())


@pytest.mark.usefixtures("fresh_workers")
def test_conversations_wait_for_a_worker_that_starts() -> None:
    """However long that takes, and without starting one for each."""

    async def run() -> None:
        text = "{{ messages[0].content }}"
        template = ChatTemplate(text, {}, seconds=60.0, patience=0.01, queue_seconds=60.0)
        template.start()
        (worker,) = template.pids
        os.kill(worker, signal.SIGSTOP)
        try:
            jobs = [template.render(USER, PLAIN, most_chars=9) for _ in range(8)]
            rendering = asyncio.ensure_future(asyncio.gather(*jobs))
            for _ in range(20):
                await asyncio.sleep(0.01)
                assert template.pids == [worker]
            os.kill(worker, signal.SIGCONT)
            assert await rendering == [USER[0]["content"]] * 8
        finally:
            template.close()

    asyncio.run(run())


def test_all_workers_busy_is_a_503() -> None:
    async def run() -> None:
        template = ChatTemplate(LOOP, {}, seconds=60.0, most_workers=1, queue_seconds=0.05)
        try:
            first = asyncio.ensure_future(template.render(USER, PLAIN, most_chars=9))
            while not template.pids:
                await asyncio.sleep(0)
            with pytest.raises(ApiError) as raised:
                await template.render(USER, PLAIN, most_chars=9)
            assert raised.value.status == 503 and raised.value.headers["retry-after"] == "5"
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            assert template.pids == []  # the state of the worker is unknown
        finally:
            template.close()

    asyncio.run(run())


@pytest.mark.usefixtures("fresh_workers")
def test_a_worker_that_cannot_start_is_our_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero_llm.server.templates.MODULE", "hetero_llm.no_such_module")

    async def run() -> None:
        template = ChatTemplate("", {}, seconds=60.0)
        try:
            with pytest.raises(RuntimeError, match="does not start"):
                await template.render(USER, PLAIN, most_chars=9)
            assert template.pids == []
        finally:
            template.close()

    asyncio.run(run())


def test_what_no_utf8_can_hold_is_replaced() -> None:
    async def run() -> None:
        for text, expected in (("{{ 'a\\ud800b' }}", "a?b"),
                               ("{{ raise_exception('a\\ud800b') }}", None)):  # fmt: skip
            template = ChatTemplate(text, {}, seconds=60.0)
            try:
                if expected is not None:
                    assert await template.render(USER, PLAIN, most_chars=9) == expected
                else:
                    with pytest.raises(ApiError, match=r"a\?b"):
                        await template.render(USER, PLAIN, most_chars=9)
            finally:
                template.close()

    asyncio.run(run())


def test_several_templates(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"messages": USER, "max_tokens": 1}
    named = {"other": "x", "default": "<{{ messages[0].content }}>"}
    monkeypatch.setattr(tokenizer.hf, "chat_template", named)
    with serving(FakeEngine(tokenizer)) as served:
        assert served.post(CHAT, body).status_code == 200
        assert served.engine.seen[-1][1].text == "<a b>"
    monkeypatch.setattr(tokenizer.hf, "chat_template", {"other": "x"})
    with serving(FakeEngine(tokenizer)) as served:
        answer = served.post(CHAT, body)
        assert answer.status_code == 400 and "no chat template" in answer.text


# history with tools

TOOLS_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }}"
    " {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% if m.role == 'tool' %}={{ m.tool_call_id }}{% endif %};{% endfor %}"
)


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "sum", "arguments": arguments}
    return {"id": "c1", "type": "function", "function": function} | more


@pytest.fixture(scope="module")
def with_tools(tokenizer: Tokenizer) -> Iterator[Served]:
    settings = ServerSettings(chat_template=TOOLS_TEMPLATE)
    with serving(FakeEngine(tokenizer), settings) as served:
        yield served


def test_calls_and_results_are_history(with_tools: Served) -> None:
    arguments = {"b": [2, "<|endoftext|>"], "a": 10**30}
    answer = {"role": "assistant", "content": None, "tool_calls": [call(json.dumps(arguments))],
              "refusal": None, "annotations": [], "audio": None, "function_call": None}  # fmt: skip
    messages = [
        {"role": "user", "content": "1+2?"},
        answer,
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3"}]},
        {"role": "assistant", "content": "so", "tool_calls": [call(""), call({"x": 1})]},
        {"role": "assistant", "content": "3", "reasoning": "hm", "tool_calls": []},
    ]
    assert with_tools.post(CHAT, {"messages": messages, "max_tokens": 1}).status_code == 200
    prompt = with_tools.engine.seen[-1][1]
    assert prompt.text == (
        'user:1+2?;assistant:[c1 sum {"b": [2, "<|endoftext|>"], "a": ' + str(10**30) + "}];"
        'tool:3=c1;assistant:so[c1 sum {}][c1 sum {"x": 1}];assistant:3(hm);'
    )
    assert 0 not in prompt.token_ids, "what a user wrote controls nothing"


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ({"role": "user", "content": "a", "tool_calls": [call("{}")]},
         "messages[0].tool_calls", "invalid_value"),
        ({"role": "assistant", "tool_calls": [call("{")]},
         "messages[0].tool_calls[0].function.arguments", "invalid_value"),
        ({"role": "assistant", "tool_calls": [call("{}"), call("[1]")]},
         "messages[0].tool_calls[1].function.arguments", "invalid_value"),
        ({"role": "assistant", "tool_calls": [call('{"a":' + "[" * 99999)]},
         "messages[0].tool_calls[0].function.arguments", "invalid_value"),
        ({"role": "assistant", "tool_calls": [call('{"a": "\\ud800"}')]},
         "messages[0].tool_calls[0].function.arguments", "invalid_value"),
        ({"role": "assistant", "tool_calls": [call(5)]},
         "messages[0].tool_calls[0].function.arguments", "invalid_type"),
        ({"role": "assistant", "tool_calls": [call("{}", type="custom")]},
         "messages[0].tool_calls[0].type", "invalid_value"),
        ({"role": "assistant", "tool_calls": [{"id": "c1", "type": "function"}]},
         "messages[0].tool_calls[0].function", "missing_required_parameter"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
         "messages[0].tool_calls[0].function.name", "missing_required_parameter"),
        ({"role": "assistant", "tool_calls": [call("{}")] * 129},
         "messages[0].tool_calls", "invalid_value"),
        ({"role": "assistant", "function_call": {"name": "sum", "arguments": "{}"}},
         "messages[0].function_call", "unsupported_parameter"),
        ({"role": "assistant", "content": "a", "audio": {"id": "x"}},
         "messages[0].audio", "unsupported_parameter"),
        ({"role": "user", "content": None},
         "messages[0].content", "missing_required_parameter"),
        ({"role": "tool", "content": "3"},
         "messages[0].tool_call_id", "missing_required_parameter"),
    ],
)  # fmt: skip
def test_wrong_histories(
    with_tools: Served, message: dict[str, Any], param: str, code: str
) -> None:
    answer = with_tools.post(CHAT, {"messages": [message], "max_tokens": 1})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error["message"]


def test_a_template_that_knows_no_tools_refuses_their_calls(server: Served) -> None:
    for message, param in (
        ({"role": "assistant", "tool_calls": [call("{}")]}, "messages[0].tool_calls"),
        ({"role": "tool", "tool_call_id": "c1", "content": "3"}, "messages[0].role"),
    ):
        error = server.post(CHAT, {"messages": [message]}).json()["error"]
        assert (error["param"], error["code"]) == (param, "unsupported_parameter")
        assert "this model's chat template has no place for " in error["message"]
