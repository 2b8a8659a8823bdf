"""The compiled library, and every instruction set of it that this machine runs."""

from __future__ import annotations

import ctypes

import pytest

from hetero_llm.cpu import native


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    found = native.load()
    if found is None:
        pytest.skip("there is no compiler")
    return found


@pytest.fixture(params=range(len(native.ISA_NAMES)), ids=native.ISA_NAMES)
def isa(request: pytest.FixtureRequest, library: ctypes.CDLL) -> int:
    if request.param > library.hetero_isa_best():
        pytest.skip("this machine has no such instructions")
    return int(request.param)
