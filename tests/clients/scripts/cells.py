"""What the clients' scripts share. Standard library only: it runs in every environment."""

from __future__ import annotations

import http.client
import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

PATIENCE = 60.0
_LOOK = 0.01
_open = build_opener(ProxyHandler({})).open


class Setup:
    """What a script is told.

    Attributes:
        url: of the server, without /v1.
        small_url: of one that runs one request at a time and lets none wait.
        key, model: what to send.
        wanted: what to ask for, and answers of the offline `LLM`; see the fixture `reference`.
        options: of this client.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.url: str = values["url"]
        self.small_url: str = values["small_url"]
        self.key: str = values["key"]
        self.model: str = values["model"]
        self.wanted: dict[str, Any] = values["wanted"]
        self.options: dict[str, Any] = values["options"]


Cell = Callable[[Setup], None]


def run_cells(cells: Sequence[Cell], version: str) -> None:
    """Runs each cell and writes which of them failed, and how, by their functions' names."""
    given, found = sys.argv[1:]
    setup = Setup(json.loads(Path(given).read_text()))
    results: dict[str, str | None] = {}
    for cell in cells:
        try:
            cell(setup)
        except Exception:
            results[cell.__name__] = traceback.format_exc()
        else:
            results[cell.__name__] = None
    Path(found).write_text(json.dumps({"version": version, "cells": results}))


def equal(given: Any, wanted: Any) -> None:
    """Asserts it, and shows both."""
    assert given == wanted, f"{given!r} is not {wanted!r}"


def close(given: Sequence[float], wanted: Sequence[float]) -> None:
    """Asserts that log-probabilities are the same to 1e-4."""
    equal(len(given), len(wanted))
    worst = max(abs(one - other) for one, other in zip(given, wanted, strict=True))
    assert worst <= 1e-4, f"they differ by {worst}: {given} and {wanted}"


def check_call(name: str, arguments: str | dict[str, Any]) -> None:
    """Asserts that a call of one of `wanted["tools"]` has arguments that its schema allows."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    if name == "now":
        equal(given, {})
        return
    equal((name, sorted(given)), ("get_weather", ["city", "days"]))
    assert given["city"] in ("Köln", "Bonn"), given
    assert type(given["days"]) is int and 1 <= given["days"] <= 9, given


@contextmanager
def raises(kind: type[Exception], *words: str) -> Iterator[list[Exception]]:
    """Asserts that this error is raised, with all `words` in its text."""
    caught: list[Exception] = []
    try:
        yield caught
    except kind as error:
        for word in words:
            assert word in str(error), f"no {word!r} in {error}"
        caught.append(error)
    else:
        raise AssertionError(f"no {kind.__name__}")


# the server's own view


def metric(url: str, name: str, labels: str = "") -> float:
    """The sum of a metric's values over the labels that contain this text."""
    with _open(f"{url}/metrics", timeout=PATIENCE) as answer:
        text = answer.read().decode()
    total = 0.0
    for line in text.splitlines():
        found = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line)
        if found and found.group(1) == name and labels in (found.group(2) or ""):
            total += float(found.group(3))
    return total


def until(condition: Callable[[], bool], what: str) -> None:
    """Waits for what the server will show."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(_LOOK)


@contextmanager
def leaving(setup: Setup) -> Iterator[None]:
    """Inside, the client begins one long stream and leaves it. Asserts that it was aborted and
    that nothing of it is left."""
    gone = 'cause="client_gone"'
    name = "hetero_llm:aborted_requests_total"
    before = metric(setup.url, name, gone)
    yield
    until(lambda: metric(setup.url, name, gone) == before + 1, "the request was aborted")
    with _open(f"{setup.url}/load", timeout=PATIENCE) as answer:
        equal(json.load(answer), {"server_load": 0})
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        until(lambda gauge=gauge: metric(setup.url, f"vllm:{gauge}") == 0, f"{gauge} is 0")


def refused_then_served(setup: Setup, ask: Callable[[], Any]) -> Any:
    """What `ask` returns if the small server refuses it first, because it is full, and then not.

    `ask` has to be a client that tries again.
    """
    ask()  # whatever a first call takes longer for is done
    name, reason = "vllm:admission_rejections_total", 'reason="overloaded"'
    before = metric(setup.small_url, name, reason)
    with ThreadPoolExecutor(1) as pool:
        with full(setup):
            answer = pool.submit(ask)
            until(lambda: metric(setup.small_url, name, reason) > before, "the server refused")
            assert not answer.done(), f"it gave up: {answer.exception()}"
        return answer.result(PATIENCE)


@contextmanager
def full(setup: Setup) -> Iterator[None]:
    """While a long stream keeps the small server full."""
    address = urlsplit(setup.small_url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=PATIENCE)
    body = {"prompt": [1], "max_tokens": 2000, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {setup.key}", "content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    try:
        equal(answer.status, 200)
        assert answer.readline().startswith(b"data: ")
        yield
    finally:
        answer.close()
        connection.close()
    until(lambda: metric(setup.small_url, "vllm:num_requests_running") == 0, "there is room again")
