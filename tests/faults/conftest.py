"""The marker of tests that start whole servers: `make test-faults` runs them."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "faults: starts and ends whole servers")
