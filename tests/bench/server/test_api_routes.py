"""Figures of the bench that compares the APIs."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from bench.server.api_routes import ROUTES, Sample, cpu_seconds, row_of
from hetero_llm.bench_client.wire_format import CHAT, COMPLETIONS, MESSAGES, RESPONSES


def samples(*rows: tuple[float, float, float, float]) -> list[Sample]:
    """Loads of these tokens/s, ms to the first token, ms a later one and API's CPU time."""
    return [Sample(800, speed, first, token, api, 5.0, 1.0) for speed, first, token, api in rows]


def test_rounds_are_compared_with_themselves() -> None:
    base = samples((100.0, 10.0, 4.0, 10.0), (10.0, 40.0, 5.0, 20.0), (50.0, 20.0, 8.0, 5.0))
    other = samples((90.0, 11.0, 4.0, 15.0), (11.0, 40.0, 6.0, 20.0), (50.0, 30.0, 9.0, 5.5))
    row = row_of("chat", 8, other, base)
    assert (row["least"], row["of completions"], row["most"]) == (0.9, 1.0, 1.1)
    assert (row["tok/s"], row["first ms"], row["token ms"], row["api"]) == (50.0, 30.0, 6.0, 15.0)
    assert (row["first over"], row["token over"], row["api over"]) == (1.1, 1.125, 1.1)
    assert row_of("completions", 8, base, base)["of completions"] == 1.0
    other[0] = replace(other[0], prompts=801)
    with pytest.raises(AssertionError, match="not the same prompts"):
        row_of("chat", 8, other, base)


def test_cpu_time_of_a_process_and_its_children() -> None:
    ended = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", ended], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == "done\n"
        own, children = cpu_seconds(os.getpid())
        assert own > 0 and children >= 0.25
        assert cpu_seconds(child.pid)[0] >= 0.25
        child.stdin.write("\n")
    assert cpu_seconds(child.pid) == (0.0, 0)


def test_every_api_is_compared() -> None:
    assert set(ROUTES.values()) == {COMPLETIONS, CHAT, RESPONSES, MESSAGES}
