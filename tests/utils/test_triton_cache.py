"""Triton's cache: where it lies, and kernels that are damaged."""

from __future__ import annotations

import _ctypes
import os
import shutil
from pathlib import Path

import pytest

from hetero_llm.utils import cache_folder, triton_cache


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two kernels as Triton keeps them; an ELF file stands for the machine code."""
    monkeypatch.setenv("HETERO_LLM_CACHE_DIR", str(tmp_path))
    # So that monkeypatch puts back what `prepare` sets.
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    folder = tmp_path / triton_cache.FOLDER
    for name in ("ONE", "TWO"):
        (folder / name).mkdir(parents=True)
        (folder / name / "k.json").write_text('{"name": "k"}')
        (folder / name / "k.ptx").write_text("code")
        shutil.copy(_ctypes.__file__, folder / name / "k.cubin")
    return folder


@pytest.mark.parametrize("suffix", ["json", "ptx", "cubin"])
def test_only_damaged_kernels_are_thrown_away(
    kernels: Path, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert triton_cache.discard_damaged(kernels) == 0 and not caplog.records
    path = kernels / "ONE" / f"k.{suffix}"
    path.write_bytes(path.read_bytes()[: 0 if suffix == "ptx" else 10])
    triton_cache.prepare()
    assert [folder.name for folder in kernels.iterdir()] == ["TWO"]
    assert len(caplog.records) == 1 and "ONE is damaged: it is compiled again" in caplog.text
    assert os.environ["TRITON_CACHE_DIR"] == str(kernels)


def test_a_cache_that_can_only_be_read_is_copied(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = tmp_path / "private"
    monkeypatch.setattr(cache_folder, "write_folder", lambda: private)
    triton_cache.prepare()
    assert sorted(folder.name for folder in (private / "triton").iterdir()) == ["ONE", "TWO"]


def test_a_users_own_folder_is_left_alone(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))
    (kernels / "ONE" / "k.json").write_text("{")
    triton_cache.prepare()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "own") and (kernels / "ONE").is_dir()
