"""Grammars of arriving requests: when they are compiled, and which requests wait for that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from hetero_llm.core.errors import SamplingError
from hetero_llm.core.grammar import Grammar
from hetero_llm.core.request import Request, RequestMetrics
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.structured_output.compile_queue import CompileQueue

LONG = "x" * 20_000
BAD = "cannot be compiled" + LONG


class Compiler:
    """Notes what it compiles, each once `may_go` is set."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.compiled: list[str] = []

    def knows(self, grammar: Grammar) -> bool:
        return grammar.text in self.compiled

    def prepare(self, grammar: Grammar) -> None:
        assert self.may_go.wait(120)
        self.compiled.append(grammar.text)
        if grammar.text == BAD:
            raise SamplingError("json", None, "is bad")


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture
def queue(compiler: Compiler) -> Iterator[CompileQueue]:
    queue = CompileQueue(cast(Any, compiler))
    yield queue
    compiler.may_go.set()
    queue.close()


def request(name: str, grammar: str | None) -> Request:
    return Request(
        name, None, [1], SamplingParams(), 0, frozenset(), frozenset(), 9, b"", RequestMetrics(0.0),
        grammar=None if grammar is None else Grammar(grammar),
    )  # fmt: skip


def until_ready(queue: CompileQueue) -> list[Request]:
    ready: list[Request] = []
    while not ready:
        queue.nap()
        ready = queue.take_ready()
    return ready


def test_grammars_are_compiled_behind_a_launch(queue: CompileQueue, compiler: Compiler) -> None:
    compiler.may_go.set()
    long = request("long", LONG)
    assert not queue.add(request("free", None)) and not queue.add(request("short", "a"))
    assert queue.add(long) and len(queue) == 1
    queue.nap()  # nothing has begun
    assert not queue.take_ready() and not compiler.compiled
    queue.start()
    assert until_ready(queue) == [long] and len(queue) == 0
    assert compiler.compiled == ["a", LONG]
    assert not queue.add(request("again", LONG))
    queue.start()
    assert compiler.compiled == ["a", LONG]


def test_a_request_that_waits_can_be_taken_back(queue: CompileQueue, compiler: Compiler) -> None:
    first, second = request("first", LONG), request("second", LONG + "y")
    assert queue.add(first) and queue.add(second)
    queue.start()
    assert queue.take("first") is first and queue.take("first") is None
    assert queue.take("unknown") is None and len(queue) == 1
    compiler.may_go.set()
    assert until_ready(queue) == [second]


def test_an_error_is_left_to_the_sequence(queue: CompileQueue, compiler: Compiler) -> None:
    compiler.may_go.set()
    bad, good = request("bad", BAD), request("good", LONG)
    assert queue.add(bad) and queue.add(good)
    queue.start()
    found = until_ready(queue)
    while len(found) < 2:
        found += until_ready(queue)
    assert found == [bad, good]
