"""The acceptance runner: what its table names is there, and what it does with a step."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.accept import PARTS, ROOT, Runner, Step, chosen


@pytest.mark.parametrize("part", list(PARTS))
def test_every_module_and_file_of_the_table_is_there(part: str) -> None:
    for step in PARTS[part].steps:
        for module in re.findall(r"-m ((?:bench|hetero_llm)[\w.]+)", step.command):
            assert find_spec(module) is not None, module
        for path in re.findall(r"(?<!\S)(?:tests|tools)/\S+", step.command):
            assert (ROOT / path).exists(), path


def test_a_named_step_brings_what_it_needs() -> None:
    names = [step.name for step in chosen(PARTS["draft"], ["timeline"])]
    assert names == ["build", "scale_draft-68m", "scale_mistral-7b", "timeline"]
    assert "soak" not in [step.name for step in chosen(PARTS["offload"], [])]
    names = [step.name for step in chosen(PARTS["offload"], ["soak"])]
    assert names == ["build", "build_bridge", "soak"]
    with pytest.raises(SystemExit, match="no step 'sook'"):
        chosen(PARTS["offload"], ["sook"])


def test_a_step_that_fails_or_takes_too_long_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = Runner(tmp_path, {"models": tmp_path, "text": "hello"}, 100.0)
    runner.run(Step("said", 5, "1", "", "echo one {text}"))
    runner.run(Step("fails", 5, "1", "", "false"))
    runner.run(Step("sleeps", 1, "1", "", "sleep 30"))
    runner.run(Step("waits", 5, "1", "if made.json", "echo never"))
    (tmp_path / "shape").mkdir()
    runner.run(Step("scale_shape", 5, "1", "", "echo never"))
    assert runner.failed == ["fails", "sleeps"]
    out = capsys.readouterr().out
    assert "one hello" in out and "sleeps: exit 124" in out and "never" not in out
    assert (tmp_path / "said.log").read_text().split() == ["0", "one", "hello"]


def test_a_call_ends_at_its_limit(tmp_path: Path) -> None:
    runner = Runner(tmp_path, {"models": tmp_path}, 1.0)
    runner.run(Step("late", 5, "1", "", "echo never"))
    assert runner.failed == ["late"] and not (tmp_path / "late.log").exists()
