"""Servers that the tests of several endpoints share: each has a process for its chat template."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import Served, serving

TOOL_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}]{% endfor %}"
    "{% if m.role == 'tool' %}#{{ m.tool_call_id }}{% endif %};{% endfor %}"
    "{% if enable_thinking is defined %}thinks={{ enable_thinking }}{% endif %}"
)
"""Writes calls of tools and reasoning."""


@pytest.fixture(scope="session")
def tool_server(tokenizer: Tokenizer) -> Iterator[Served]:
    with serving(FakeEngine(tokenizer), ServerSettings(chat_template=TOOL_TEMPLATE)) as served:
        yield served


@pytest.fixture(scope="session")
def moody_server(tokenizer: Tokenizer) -> Iterator[Served]:
    """Its silent streams get comments soon. Use it through `moody`."""
    settings = ServerSettings(keep_alive_seconds=0.02)
    with serving(FakeEngine(tokenizer), settings) as served:
        yield served


@pytest.fixture
def moody(moody_server: Served) -> Iterator[Served]:
    """A server whose engine may be told to misbehave; it is itself again after the test."""
    engine = moody_server.engine
    usual = {
        name: getattr(engine, name)
        for name in ("script", "delay", "die_after", "fail_after", "silent_above")
    }
    yield moody_server
    for name, value in usual.items():
        setattr(engine, name, value)
    engine.dead = False
    engine.aborted.clear()
    moody_server.call(engine.unpaused.set)
