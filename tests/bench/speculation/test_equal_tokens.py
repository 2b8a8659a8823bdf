"""bench/speculation/equal_tokens.py: what counts as equal, what is compared with what."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.speculation import equal_tokens
from bench.speculation.equal_tokens import compared, equal_prefix, measure


def test_the_equal_prefix_ends_before_the_first_difference() -> None:
    assert equal_prefix([1, 2, 3], [1, 2, 3]) == 3
    assert equal_prefix([1, 9, 3], [1, 2, 3]) == 1
    assert equal_prefix([9, 2, 3], [1, 2, 3]) == 0
    assert compared([[1, 2, 3], [4, 5, 9]], [[1, 2, 3], [4, 5, 6]]) == {"equal": 0.5, "prefix": 2.5}


class FakeBench:
    """Answers each prompt with itself; in one arm or batch size, with another last token."""

    def __init__(self, arm: str, size: int) -> None:
        self._wrong = arm, size
        self.runs: list[tuple[str, int]] = []

    def run(self, arm: str, batches: list[list[list[int]]]) -> tuple[list[list[int]], Any]:
        self.runs.append((arm, len(batches[0])))
        outputs = [prompt for batch in batches for prompt in batch]
        if self.runs[-1] == self._wrong:
            outputs = [outputs[0], *([*prompt[:-1], 0] for prompt in outputs[1:])]
        return outputs, {"drafted/token": 0.0, "tokens/step": 1.0}


@pytest.mark.parametrize(
    ("arm", "size", "differ"),
    [
        ("none", 2, {"batch 2", "batch 2, hybrid"}),
        ("hybrid", 1, {"batch 1, hybrid"}),
        ("hybrid", 2, {"batch 2, hybrid"}),
    ],
)
def test_each_run_is_compared_with_the_plain_run_of_its_size(
    arm: str, size: int, differ: set[str]
) -> None:
    bench: Any = FakeBench(arm, size)
    rows = measure(bench, [[1, 2], [3, 4], [5, 6], [7, 8]], [1, 2], ["hybrid"])
    assert [(row["run"], row["plain"]) for row in rows] == [
        ("batch 1 again", "batch 1"),
        ("batch 2", "batch 1"),
        ("batch 1, hybrid", "batch 1"),
        ("batch 2, hybrid", "batch 2"),
    ]
    for row in rows:
        wanted = (0.25, 1.25) if row["run"] in differ else (1.0, 2.0)
        assert (row["equal"], row["prefix"]) == wanted, row
    assert bench.runs == [("none", 1)] * 2 + [("none", 2), ("hybrid", 1), ("hybrid", 2)]


def test_the_demo_model_in_float32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = "--model demo --device cpu --dtype float32 --prompt 96 --tokens 40 --batches 1,4"
    words += f" --prompts 4 --arms merged --out {tmp_path / 'a.json'}"
    monkeypatch.setattr(sys, "argv", ["equal_tokens", *words.split()])
    equal_tokens.main()
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["bench"] == "equal_tokens.float32" and found["tokens"] == 41
    assert [row["equal"] for row in found["rows"]] == [1.0] * 4
    assert [row["prefix"] for row in found["rows"]] == [41.0] * 4


def test_batches_are_full(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["equal_tokens", "--model", "demo", "--prompts", "12"])
    with pytest.raises(SystemExit):
        equal_tokens.main()
    assert "every size of --batches must divide it" in capsys.readouterr().err
