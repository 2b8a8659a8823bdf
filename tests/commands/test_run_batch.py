"""`hetero-llm run-batch`: its flags, and a run with an engine that echoes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hetero_llm import cli
from hetero_llm.engine import async_engine
from hetero_llm.server import serving  # noqa: F401  first: it would keep the engine of these tests
from tests.server.fake_engine import FakeEngine, demo_tokenizer

REQUEST = {
    "custom_id": "a", "method": "POST", "url": "/v1/completions",
    "body": {"prompt": "a b", "max_tokens": 2, "model": "small"},
}  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(REQUEST) + "\n")
    return path


def error_of(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert cli.main(["run-batch", *map(str, words)]) == 2
    return capsys.readouterr().err


def test_a_file_is_answered(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    given: list[Any] = []

    class Engine(FakeEngine):
        def __init__(self, arguments: Any, **rest: Any) -> None:
            given.append((arguments, rest))
            super().__init__(demo_tokenizer())

    monkeypatch.setattr(async_engine, "AsyncLLMEngine", Engine)
    # A key of the server's would shut out the batch's own requests.
    monkeypatch.setenv("HETERO_LLM_API_KEY", "secret")
    output = tmp_path / "out.jsonl"
    output.write_text("earlier")
    words = ["run-batch", "-i", str(source), "-o", str(output), "--model", "demo"]
    words += ["--served-model-name", "small", "--max-concurrency", "3", "--max-num-seqs", "4"]
    assert cli.main(words) == 0
    (result,) = map(json.loads, output.read_text().splitlines())
    assert result["custom_id"] == "a" and result["error"] is None
    assert result["response"]["body"]["choices"][0]["text"] == "a b"
    assert result["response"]["body"]["model"] == "small"
    ((arguments, rest),) = given
    assert (arguments.model, arguments.max_num_seqs) == ("demo", 4)
    assert rest["served_names"] == ("small",)
    assert capsys.readouterr().out == "1 requests answered, 0 of them with an error\n"


def test_input_and_output_are_two_files(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = source.read_text()
    link = tmp_path / "link"
    os.link(source, link)
    for target in (source, link):
        text = error_of(capsys, "-i", source, "-o", target, "--model", "demo")
        assert "output_file=" in text and "is the input file" in text
    assert source.read_text() == before


def test_mistakes_are_said_before_a_model_loads(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    assert "input_file=None: is required: -i FILE" in error_of(capsys, "-o", output)
    assert "output_file=None: is required: -o FILE" in error_of(capsys, "-i", source)
    assert "model=None: is required: hetero-llm run-batch MODEL" in error_of(
        capsys, "-i", source, "-o", output
    )
    assert "max_concurrency=0" in error_of(
        capsys, "-i", source, "-o", output, "--max-concurrency", "0"
    )
    missing = tmp_path / "no" / "out"
    text = error_of(capsys, "-i", source, "-o", missing, "--model", "demo")
    assert "output_file=" in text and "No such file" in text
    source.write_text("nonsense\n")
    assert "line 1: is not JSON" in error_of(capsys, "-i", source, "-o", output, "--model", "demo")
    assert not output.exists()
