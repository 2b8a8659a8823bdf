"""Where compiled code lies, and files that are cut, damaged or not ours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hetero_llm.utils import cache_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETERO_LLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / "cache"


def test_a_file_is_found_whole_or_not_at_all(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "deeper" / "one"
    content = bytes(range(200))
    cache_folder.write(path, content)
    assert cache_folder.read(path) == content and cache_folder.find("deeper/one") == path
    whole = path.read_bytes()
    flipped = bytes([whole[0] ^ 1]) + whole[1:]
    for damaged in (
        b"",
        whole[:1],
        whole[:-1],
        whole[: len(whole) // 2],
        flipped,
        bytes(len(whole)),
    ):
        path.write_bytes(damaged)
        assert cache_folder.find("deeper/one") is None and not path.exists()
    assert len(caplog.records) == 6
    assert f"{path} is cut or damaged: it is compiled again" in caplog.text
    assert cache_folder.find("other") is None and len(caplog.records) == 6


def test_a_folder_that_cannot_be_made_leaves_a_private_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HETERO_LLM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    private = tmp_path / f"hetero-llm-{os.getuid()}"
    assert cache_folder.write_folder() == private and not caplog.records
    for name in ("one", "two"):
        cache_folder.write(private / name, b"")
    assert private.stat().st_mode & 0o777 == 0o700
    assert len(caplog.records) == 1 and "set HETERO_LLM_CACHE_DIR" in caplog.text
    assert cache_folder.folders() == (private, tmp_path / "file" / "cache", cache_folder.PREBUILT)


@pytest.mark.parametrize("trap", ["open", "link"])
def test_a_temporary_folder_that_others_could_write_is_not_used(
    trap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("HETERO_LLM_CACHE_DIR", f"/dev/null/{trap}{tmp_path.name}")
    taken = tmp_path / f"hetero-llm-{os.getuid()}"
    if trap == "open":
        taken.mkdir()
        taken.chmod(0o777)
    else:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        taken.symlink_to(tmp_path / "elsewhere")
    used = cache_folder.write_folder()
    assert used != taken and used.parent == tmp_path and used.stat().st_mode & 0o777 == 0o700


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_home(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("HETERO_LLM_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache_folder.look_again()
    assert cache_folder.write_folder().parent == tmp_path
    cache_folder.look_again()


def test_a_full_disk_leaves_no_half_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        cache_folder.write(folder / "one", b"content")
    assert list(folder.iterdir()) == []


def test_usage_and_clear(folder: Path) -> None:
    assert cache_folder.usage(folder) == cache_folder.CacheUse(0, 0)
    cache_folder.clear(folder)
    for name in ("a", "b/c"):
        cache_folder.write(folder / name, b"x" * 100)
    held = cache_folder.usage(folder)
    assert held.files == 2 and held.bytes > 200
    cache_folder.clear(folder)
    assert folder.is_dir() and list(folder.iterdir()) == []
