"""The line about other programs on the machine."""

from __future__ import annotations

import pytest

from hetero_llm.utils.neighbours import busy_line, cpu_ticks


@pytest.mark.parametrize(
    ("spent", "words"),
    [
        ([1, 0, 0, 98, 1, 0, 0, 0], ""),
        ([40, 5, 5, 50, 0, 0, 0, 0], "note: other programs use 50% of the "),
        ([10, 0, 0, 70, 0, 0, 0, 20], ", steal 20%): figures are lower than on an idle machine"),
        ([0] * 8, ""),
        ([], ""),
    ],
)
def test_a_busy_machine(spent: list[int], words: str) -> None:
    readings = iter([[100] * len(spent), [100 + more for more in spent]])
    slept: list[float] = []
    line = busy_line(lambda: next(readings), slept.append)
    assert (words in line and line.endswith("\n")) if words else line == ""
    assert len(slept) == 1


def test_this_machine() -> None:
    first, second = cpu_ticks(), cpu_ticks()
    assert len(first) == 8 and all(a <= b for a, b in zip(first, second))
