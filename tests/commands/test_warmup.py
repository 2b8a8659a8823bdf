"""`hetero-llm warmup`: which engines it starts, and what it says. Nothing is compiled here."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from hetero_llm import cli
from hetero_llm.config.args import resolve_engine_args
from hetero_llm.cpu import native
from hetero_llm.utils import native_build


class FakeLLM:
    """Checks its arguments and counts engines that are still open."""

    started: list[tuple[str, dict[str, Any]]]
    num_open = 0

    def __init__(self, model: str, **engine_args: Any) -> None:
        resolve_engine_args({"model": model, **engine_args})
        FakeLLM.started.append((model, engine_args))
        FakeLLM.num_open += 1

    def close(self) -> None:
        FakeLLM.num_open -= 1


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that do nothing, libraries that are there, an empty cache."""
    monkeypatch.setattr("hetero_llm.engine.llm.LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "started", [], raising=False)
    monkeypatch.setenv("HETERO_LLM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HETERO_LLM_NATIVE", "1")
    monkeypatch.setattr(native, "build", lambda: tmp_path)
    monkeypatch.setattr(native_build, "build_library", lambda recipe: tmp_path)


def test_an_engine_for_each_kind_of_drafter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["warmup"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ready after ")[0] for line in lines[:-1]] == [
        "C++ libraries", "lookahead cache", "prompt lookup", "draft model"
    ]  # fmt: skip
    assert lines[-1] == f"{tmp_path}: 0 files, 0.0 MB"
    assert {model for model, _ in FakeLLM.started} == {"demo"} and FakeLLM.num_open == 0


def test_a_model_with_its_own_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["warmup", "some/model", "--max-num-seqs", "8"]) == 0
    assert FakeLLM.started[-1] == ("some/model", {"max_num_seqs": 8})
    assert "\nsome/model: ready after " in capsys.readouterr().out


def test_without_libraries_no_draft_worker_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_LLM_NATIVE", "0")
    assert cli.main(["warmup"]) == 0
    assert len(FakeLLM.started) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-num-seqs", "8"), "max_num_seqs=8: needs a MODEL to be warmed up with it"),
        (("a", "--model", "b"), "model='b': contradicts the first argument, 'a'"),
    ],
)
def test_mistakes(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["warmup", *words]) == 2
    assert message in capsys.readouterr().err and not FakeLLM.started


@pytest.mark.parametrize(
    "error", [RuntimeError("no C++ compiler found"), subprocess.TimeoutExpired("g++", 1.0)]
)
def test_an_image_without_a_compiler_is_told(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(native, "build", fail)
    assert cli.main(["warmup"]) == 2
    assert f"the C++ libraries cannot be built: {error}" in capsys.readouterr().err
