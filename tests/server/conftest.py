"""One tokenizer and one running server for all tests that leave it as it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server import templates
from tests.helpers.forks import Forks, chat_templates
from tests.server.fake_engine import FakeEngine, demo_tokenizer
from tests.server.serving import Served, serving


@pytest.fixture(scope="session", autouse=True)
def forked_templates() -> Iterator[None]:
    """Servers here start the workers of their chat templates in no time."""
    with Forks(chat_templates) as forks, pytest.MonkeyPatch.context() as patch:
        patch.setattr(templates, "subprocess", forks)
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return demo_tokenizer()


@pytest.fixture(scope="session")
def server(tokenizer: Tokenizer) -> Iterator[Served]:
    with serving(FakeEngine(tokenizer)) as served:
        yield served
