"""The compiled library and every instruction set of it that this machine runs."""

# ruff: noqa: F401

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cpu.csrc.step.conftest import isa, library
from tests.cpu.expert_cases import torch_threads


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    with torch_threads(1):
        yield
