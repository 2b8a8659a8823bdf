"""What tools/check_sizes.py calls large, and what it takes for a reason."""

from __future__ import annotations

import pytest

from tools.check_sizes import MAX_ATTRIBUTES, MAX_FUNCTION_LINES, MAX_METHODS, too_large

LONG = "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES
METHODS = "class C:\n" + "".join(
    f"    def m{number}(self): ...\n" for number in range(MAX_METHODS + 1)
)
FIELDS = "class C:\n" + "".join(f"    a{number}: int\n" for number in range(MAX_ATTRIBUTES + 1))
ASSIGNED = "class C:\n    def __init__(self):\n" + "".join(
    f"        self.a{number}, other = 1, 2\n" for number in range(MAX_ATTRIBUTES + 1)
)
REASON = "# large: one row for each flag.\n"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (LONG, "81 lines (limit 80)"),
        (METHODS, "26 methods (limit 25)"),
        (FIELDS, "16 attributes (limit 15)"),
        (ASSIGNED, "16 attributes (limit 15)"),
    ],
)
def test_whatever_is_large_needs_a_reason(source: str, words: str) -> None:
    (problem,) = too_large("a.py", source)
    assert words in problem and problem.startswith("a.py:1:")
    assert too_large("a.py", REASON + source) == []
    assert too_large("a.py", REASON + "@decorated\n" + source) == []
    assert len(too_large("a.py", "# large:\n" + source)) == 2  # an empty reason is none


@pytest.mark.parametrize("source", ["def f(): ...\n", "x = 1\n", "class C:\n    a: int\n"])
def test_a_reason_above_something_small_is_refused(source: str) -> None:
    assert too_large("a.py", source) == []
    assert too_large("a.py", REASON + source) == ["a.py:1: a reason above nothing large"]


def test_a_file_of_any_length_is_fine() -> None:
    assert too_large("a.py", "x = 1\n" * 5000) == []
