"""The files in bench/results say which commit they are of, and git has it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from bench.common import environment

ROOT = Path(__file__).parents[2]
COMMIT = re.compile(r"([0-9a-f]{7,40})(-dirty)?")


def commits() -> dict[str, str]:
    """The `commit` of each results file by its name; a trace belongs to the file beside it."""
    found = {}
    for path in sorted((ROOT / "bench" / "results").rglob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if "traceEvents" in content:
            assert path.name.removesuffix(".trace.json") + ".g.json" in found
            continue
        found[path.name] = content["commit"]
    return found


def test_every_file_names_a_commit() -> None:
    assert {name: text for name, text in commits().items() if not COMMIT.fullmatch(text)} == {}


def test_git_has_the_commits() -> None:
    git = ("git", "-C", str(ROOT))
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True)
    if shallow.stdout.strip() != b"false":
        pytest.skip("needs git and the whole history")
    named = {text.removesuffix("-dirty"): name for name, text in commits().items()}
    wanted = "".join(f"{commit}\n" for commit in named)
    kinds = subprocess.run(
        [*git, "cat-file", "--batch-check"], input=wanted, capture_output=True, text=True
    ).stdout.splitlines()
    unknown = [name for name, kind in zip(named.values(), kinds) if kind.split()[1] != "commit"]
    assert len(kinds) == len(named) and unknown == []


def test_a_commit_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "the tree before")
    with pytest.raises(ValueError, match="BENCH_COMMIT='the tree before'"):
        environment()
    monkeypatch.setenv("BENCH_COMMIT", "0123abc-dirty")
    assert environment()["commit"] == "0123abc-dirty"
