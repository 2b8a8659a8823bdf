"""Files of ours that are replaced as a whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hetero_llm.utils.files import replace_file, user_path


@pytest.mark.parametrize("sync", [True, False])
def test_a_file_is_replaced_with_its_permissions(tmp_path: Path, sync: bool) -> None:
    path = tmp_path / "file"
    for content, mode in ((b"one", 0o600), (b"two", 0o644)):
        replace_file(path, content, mode=mode, sync=sync)
        assert path.read_bytes() == content and path.stat().st_mode & 0o777 == mode
    assert os.listdir(tmp_path) == ["file"]


def test_a_users_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").touch()
    for path in ("~", "~/nothing", "~/file/below"):
        assert user_path(path) == Path(path.replace("~", str(tmp_path)))
    for path in ("a" * 5000, "a\0b", "~nosuchuser"):
        with pytest.raises(OSError, match=r"too long|NUL|home directory"):
            user_path(path)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_could_not_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old")

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(error):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]
