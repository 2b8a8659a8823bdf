"""`hetero-llm manifest`: what it writes is what `--model-sha256` takes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hetero_llm.cli import main
from hetero_llm.core.errors import ModelLoadError
from hetero_llm.demo_models import demo_folder
from hetero_llm.models.manifest import check_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_folder("demo-draft"), tmp_path / "model"))


def test_into_the_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["manifest", str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{folder / 'SHA256SUMS'}: ")
    digest = said.split()[-1]
    check_model(folder, digest, weights=True)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        check_model(folder, digest, weights=True)


def test_elsewhere(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "manifest"
    assert main(["manifest", str(folder), "--out", str(path)]) == 0
    assert not (folder / "SHA256SUMS").exists()
    capsys.readouterr()
    assert main(["manifest", str(folder), "--out", "-"]) == 0
    assert capsys.readouterr().out == path.read_text()
    check_model(folder, str(path), weights=True)


def test_an_embedded_model_leaves_the_package_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(demo_folder("demo-draft").iterdir())
    assert main(["manifest", "demo-draft"]) == 0
    assert capsys.readouterr().out.startswith("SHA256SUMS: ")
    assert sorted(demo_folder("demo-draft").iterdir()) == before
    check_model(demo_folder("demo-draft"), "SHA256SUMS", weights=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("no/such/folder",), "no such folder"),
        (("{empty}",), "nothing to serve"),
        (("{model}", "--out", "{empty}/no/such"), "No such file or directory; name another file"),
    ],
)
def test_mistakes(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    message: str,
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["manifest", *(word.format(model=folder, empty=empty) for word in words)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""
