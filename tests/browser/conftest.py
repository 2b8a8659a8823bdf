"""One browser for all tests here; without one they are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hetero_llm.engine.text.tokenizer import Tokenizer
from tests.browser.devtools import NAMES, Browser, find_browser
from tests.server.fake_engine import demo_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return demo_tokenizer()


@pytest.fixture(scope="session")
def running_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed")
    with Browser(path, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(running_browser: Browser) -> Iterator[Browser]:
    """On an empty page. A test that expects complaints takes them away."""
    running_browser.complaints.clear()
    running_browser.addresses.clear()
    running_browser.media("light")
    running_browser.size(1280, 900)
    yield running_browser
    running_browser.open("about:blank")
    running_browser.forget()
    assert running_browser.complaints == []
