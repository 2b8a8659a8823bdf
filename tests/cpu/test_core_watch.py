"""The line that says that other programs use the executor's cores."""

from __future__ import annotations

import pytest

from hetero_llm.cpu.core_watch import CoreWatch


class Machine:
    """Time and sleep as the test sets them."""

    seconds = 0.0
    slept_ns = 0


def run(watch: CoreWatch, machine: Machine, steps: int, share: float) -> None:
    """Steps of 100 ms on two threads, which sleep for a share of their time."""
    for _ in range(steps):
        machine.seconds += 0.1
        machine.slept_ns += int(2 * share * 1e8)
        watch.on_step(0.1)


def test_one_line_a_minute_while_cores_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    machine.slept_ns = 10**12  # before: another one's
    watch = CoreWatch(lambda: machine.slept_ns, 2, lambda: machine.seconds)
    run(watch, machine, 100, 0.1)
    assert not caplog.records, "uneven parts of a step"
    run(watch, machine, 400, 0.6)
    assert len(caplog.records) == 1
    assert "the 2 threads of the CPU executor spent 60% of their time waiting" in caplog.text
    run(watch, machine, 400, 0.6)
    assert len(caplog.records) == 2
    run(watch, machine, 1000, 0.0)
    assert len(caplog.records) == 2
