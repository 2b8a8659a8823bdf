"""The folder of an adapter: a local one, or a snapshot of the hub."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from hetero_llm.core.errors import AdapterError
from hetero_llm.lora.files import adapter_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def find(path: str, download_dir: Path | None = None) -> Path:
    given = None if download_dir is None else str(download_dir)
    return adapter_folder(path, field="lora_path", download_dir=given)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_model.bin"])
def test_a_snapshot_in_the_hubs_cache(file: str, tmp_path: Path, no_network: None) -> None:
    home = tmp_path / "models--org--sql-lora"
    snapshot = home / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMIT)
    for name in ("adapter_config.json", file):
        (snapshot / name).write_text(name)
    assert find("org/sql-lora", tmp_path) == snapshot


def test_what_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configuration and weights; pickled ones where there are no others, and no README."""
    asked: list[dict[str, Any]] = []

    def snapshot_download(repo: str, **options: Any) -> str:
        asked.append({"repo": repo, **options})
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert find("org/sql", tmp_path / "cache") == tmp_path
    assert [one["repo"] for one in asked] == ["org/sql"] * 2
    assert [one["allow_patterns"] for one in asked] == [
        ["adapter_config.json", "adapter_model.safetensors"],
        ["adapter_config.json", "adapter_model.bin"],
    ]
    assert {one["cache_dir"] for one in asked} == {str(tmp_path / "cache")}
    (tmp_path / "adapter_model.safetensors").touch()
    find("org/sql")
    assert len(asked) == 3 and asked[-1]["cache_dir"] is None


def test_a_folder_comes_before_the_hub(
    tmp_path: Path, no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "sql").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find("org/sql") == Path("org/sql")


def test_without_a_network(tmp_path: Path, no_network: None) -> None:
    with pytest.raises(
        AdapterError, match="lora_path='org/sql': no such folder, and the hub did not deliver it"
    ):
        find("org/sql", tmp_path)


@pytest.mark.parametrize("path", ["/none", "../none", "a/b/c", "a b", "org--name"])
def test_what_is_no_hub_id(path: str, no_network: None) -> None:
    with pytest.raises(AdapterError) as caught:
        find(path)
    assert caught.value.reason == "no such folder"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("a" * 5000, "File name too long"),
        ("/" + "b" * 300, "File name too long"),
        ("~nosuchuser/a", "Could not determine home directory"),
        ("a\0b", "a path holds no NUL character"),
    ],
)
def test_paths_that_the_system_cannot_look_for(path: str, reason: str, no_network: None) -> None:
    with pytest.raises(AdapterError) as caught:
        find(path)
    assert caught.value.reason.startswith(f"no such folder: {reason}")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AdapterError, match="no such folder"):
        find(str(tmp_path / "file"))
