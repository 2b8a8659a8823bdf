"""One tokenizer and one running server for all tests that leave it as it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hetero_llm.engine.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine, demo_tokenizer
from tests.server.serving import Served, serving


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return demo_tokenizer()


@pytest.fixture(scope="session")
def server(tokenizer: Tokenizer) -> Iterator[Served]:
    with serving(FakeEngine(tokenizer)) as served:
        yield served
