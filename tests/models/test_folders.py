"""From a model name to a folder: local ones, downloads, and the hub's cache without a network."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from hetero_llm.core.errors import ModelLoadError
from hetero_llm.models.folders import PICKLED, SAFETENSORS, resolve_model_folder, weight_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_local_folder(tmp_path: Path) -> None:
    assert resolve_model_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "model", ["/no/such/folder", "./missing", "../missing", "a/b/c", "~/missing", "", "a b"]
)
def test_looks_local_but_is_missing(model: str) -> None:
    with pytest.raises(ModelLoadError, match="no such folder"):
        resolve_model_folder(model)


@pytest.mark.parametrize("model", ["a" * 5000, "~nosuchuser/a", "a\0b"])
def test_paths_that_the_system_cannot_look_for(model: str) -> None:
    with pytest.raises(ModelLoadError, match="^model=.*: no such folder: "):
        resolve_model_folder(model)


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ModelLoadError, match="a model folder is needed"):
        resolve_model_folder(str(path))


class TestGguf:
    def test_a_file_is_a_model(self, tmp_path: Path) -> None:
        path = tmp_path / "model.gguf"
        path.touch()
        for load_format in ("auto", "gguf", "dummy"):
            assert resolve_model_folder(str(path), load_format=load_format) == path
        with pytest.raises(ModelLoadError, match=r"other\.gguf': no such GGUF file"):
            resolve_model_folder(str(tmp_path / "other.gguf"))

    def test_a_folder_with_one(self, tmp_path: Path) -> None:
        path = tmp_path / "model.gguf"
        path.touch()
        assert resolve_model_folder(str(tmp_path)) == path
        (tmp_path / "config.json").write_text("{}")
        assert resolve_model_folder(str(tmp_path)) == tmp_path
        assert resolve_model_folder(str(tmp_path), load_format="gguf") == path

    def test_a_folder_with_several(self, tmp_path: Path) -> None:
        for name in ("b.gguf", "a.gguf"):
            (tmp_path / name).touch()
        with pytest.raises(ModelLoadError, match=r"name one of them as the model: a\.gguf, b"):
            resolve_model_folder(str(tmp_path))

    def test_a_folder_with_none(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match=r"no \*\.gguf file"):
            resolve_model_folder(str(tmp_path), load_format="gguf")
        with pytest.raises(ModelLoadError, match="no such GGUF file, nor a folder with one"):
            resolve_model_folder("org/name", load_format="gguf")

    def test_pipes(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "model.gguf")
        for model in (tmp_path / "model.gguf", tmp_path):
            with pytest.raises(ModelLoadError, match="is a pipe, where a regular file is needed"):
                resolve_model_folder(str(model))


def test_weight_files(tmp_path: Path) -> None:
    names = (
        "b.safetensors", "a.safetensors", "consolidated.safetensors", "optimizer.pt",
        "training_args.bin", "rng_state_0.pth", "b.pt", "consolidated.00.pth",
    )  # fmt: skip
    for name in names:
        (tmp_path / name).touch()
    found = [path.name for path in weight_files(tmp_path, SAFETENSORS)]
    assert found == ["a.safetensors", "b.safetensors"]
    assert [path.name for path in weight_files(tmp_path, PICKLED)] == ["b.pt"]
    (tmp_path / "pytorch_model.bin").touch()
    assert [path.name for path in weight_files(tmp_path, PICKLED)] == ["pytorch_model.bin"]


class TestDownload:
    """With the hub client replaced by one that writes down what it is asked for."""

    @pytest.fixture
    def asked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def snapshot_download(repo_id: str, **options: Any) -> str:
            calls.append({**options, "repo_id": repo_id})
            return str(tmp_path)

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
        return calls

    def test_revision_and_cache(self, tmp_path: Path, asked: list[dict[str, Any]]) -> None:
        folder = resolve_model_folder("org/name", revision="v1", download_dir="/cache")
        assert folder == tmp_path
        (call,) = asked
        assert (call["repo_id"], call["revision"]) == ("org/name", "v1")
        assert call["cache_dir"] == "/cache"
        assert "original/*" in call["ignore_patterns"]

    @pytest.mark.parametrize(
        ("load_format", "allow_pickle", "rounds"),
        [
            ("auto", False, [SAFETENSORS]),
            ("auto", True, [SAFETENSORS, PICKLED]),  # the second one as there is no safetensors
            ("safetensors", True, [SAFETENSORS]),
            ("pt", True, [PICKLED]),
            ("pt", False, [()]),
            ("dummy", True, [()]),
        ],
    )
    def test_which_weights(
        self,
        asked: list[dict[str, Any]],
        load_format: str,
        allow_pickle: bool,
        rounds: list[tuple[str, ...]],
    ) -> None:
        resolve_model_folder("org/name", load_format=load_format, allow_pickle=allow_pickle)
        every = {*SAFETENSORS, *PICKLED}
        assert [every.intersection(call["allow_patterns"]) for call in asked] == list(
            map(set, rounds)
        )
        assert all("*.json" in call["allow_patterns"] for call in asked)

    @pytest.mark.parametrize("wanted", [False, True])
    def test_code_only_if_it_is_wanted(self, asked: list[dict[str, Any]], wanted: bool) -> None:
        resolve_model_folder("org/name", remote_code=wanted)
        assert [("*.py" in call["allow_patterns"]) for call in asked] == [wanted]

    def test_safetensors_are_enough(self, tmp_path: Path, asked: list[dict[str, Any]]) -> None:
        (tmp_path / "model.safetensors").touch()
        resolve_model_folder("org/name", allow_pickle=True)
        assert len(asked) == 1


class TestOffline:
    """A cache as the hub client leaves it, and no network at all."""

    @pytest.fixture(autouse=True)
    def no_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise AssertionError("a connection was tried")

        monkeypatch.setattr(socket.socket, "connect", refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    @pytest.fixture
    def cache(self, tmp_path: Path) -> Path:
        home = tmp_path / "models--org--name"
        snapshot = home / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (home / "blobs").mkdir()
        (home / "refs").mkdir()
        for ref in ("main", "v1"):
            (home / "refs" / ref).write_text(COMMIT)
        for blob, name in (("c", "config.json"), ("w", "model.safetensors")):
            (home / "blobs" / blob).write_text(name)
            (snapshot / name).symlink_to(Path("../../blobs") / blob)
        return tmp_path

    @pytest.mark.parametrize("revision", [None, "v1", COMMIT])
    @pytest.mark.parametrize("allow_pickle", [False, True])
    def test_snapshot_in_the_cache(
        self, cache: Path, revision: str | None, allow_pickle: bool
    ) -> None:
        folder = resolve_model_folder(
            "org/name", revision=revision, download_dir=str(cache), allow_pickle=allow_pickle
        )
        assert folder.name == COMMIT
        assert (folder / "config.json").read_text() == "config.json"

    def test_another_revision(self, cache: Path) -> None:
        with pytest.raises(ModelLoadError, match=r"revision='v2'"):
            resolve_model_folder("org/name", revision="v2", download_dir=str(cache))

    def test_failure_is_one_line(self, cache: Path) -> None:
        shutil.rmtree(cache / "models--org--name")
        with pytest.raises(ModelLoadError, match="org/name") as caught:
            resolve_model_folder("org/name", download_dir=str(cache))
        assert "\n" not in str(caught.value)
