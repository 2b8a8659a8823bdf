"""`model_sha256`: what is compared, what has to be listed, and the message for each mistake."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.models.manifest import MANIFEST_NAME, check_model, manifest_of

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights" * 1000,
    "tokenizer.json": b"tokens",
    "additional_chat_templates/tools.jinja": b"{{ messages }}",
}
UNREAD = {"README.md": b"hello", "training_args.bin": b"x", "consolidated.safetensors": b"y"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    (model / "additional_chat_templates").mkdir(parents=True)
    for name, data in {**FILES, **UNREAD}.items():
        (model / name).write_bytes(data)
    return model


@pytest.fixture
def manifest(folder: Path, tmp_path: Path) -> str:
    path = tmp_path / "manifest"
    path.write_text(manifest_of(folder))
    return str(path)


def test_what_is_listed(folder: Path, manifest: str) -> None:
    expected = {f"{hashlib.sha256(data).hexdigest()}  {name}" for name, data in FILES.items()}
    lines = Path(manifest).read_text().splitlines()
    assert set(lines) == expected
    assert [line.split()[1] for line in lines] == sorted(FILES)
    check_model(folder, manifest, weights=True)


def test_sha256sum_writes_and_reads_it(folder: Path, manifest: str) -> None:
    check = ["sha256sum", "--check", "--strict", "--quiet", manifest]
    assert subprocess.run(check, cwd=folder, check=False).returncode == 0
    for mode in ("--text", "--binary"):
        written = subprocess.run(
            ["sha256sum", mode, *(f"./{name}" for name in FILES)],
            cwd=folder, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        Path(manifest).write_text(written)
        check_model(folder, manifest, weights=True)


def test_the_manifests_own_digest(folder: Path) -> None:
    text = manifest_of(folder).encode()
    digest = hashlib.sha256(text).hexdigest()
    with pytest.raises(ModelLoadError, match=r"SHA256SUMS: .* cannot be read: No such file"):
        check_model(folder, digest, weights=True)
    (folder / MANIFEST_NAME).write_bytes(text)
    check_model(folder, digest, weights=True)
    check_model(folder, digest.upper(), weights=True)
    with pytest.raises(ModelLoadError, match=f"its SHA-256 is {digest}, not model_sha256=0000"):
        check_model(folder, "0" * 64, weights=True)


@pytest.mark.parametrize("name", FILES)
def test_a_changed_file(folder: Path, manifest: str, name: str) -> None:
    data = FILES[name]
    (folder / name).write_bytes(data[:-1] + b"!")
    with pytest.raises(ModelLoadError, match=f"not as {manifest} says: {name}$"):
        check_model(folder, manifest, weights=True)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(folder: Path, manifest: str, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelLoadError, match=f"but missing: {name}$"):
        check_model(folder, manifest, weights=True)


@pytest.mark.parametrize(
    "name", ["other.safetensors", "pytorch_model.bin", "merges.txt", "modeling.py", "chat.jinja"]
)
def test_a_file_that_is_not_listed(folder: Path, manifest: str, name: str) -> None:
    (folder / name).write_bytes(b"")
    with pytest.raises(ModelLoadError, match=f"not in {manifest}: {name}$"):
        check_model(folder, manifest, weights=True)


def test_files_that_nobody_reads(folder: Path, manifest: str) -> None:
    for name in UNREAD:
        (folder / name).write_bytes(b"changed")
    check_model(folder, manifest, weights=True)
    with Path(manifest).open("a") as file:  # but who lists one wants it checked
        file.write(f"{hashlib.sha256(b'hello').hexdigest()}  README.md\n")
    with pytest.raises(ModelLoadError, match=r"says: README.md$"):
        check_model(folder, manifest, weights=True)


def test_without_weights(folder: Path, manifest: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "other.safetensors").touch()
    check_model(folder, manifest, weights=False)
    (folder / "config.json").write_bytes(b"[]")
    with pytest.raises(ModelLoadError, match=r"says: config\.json$"):
        check_model(folder, manifest, weights=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no file"),
        ("abc  config.json", "line 1: 'abc  config.json' is not as sha256sum writes it"),
        (f"\n{'0' * 64}  ../x", "line 2: '../x' is not in the folder"),
        (f"{'0' * 64}  /etc/passwd", "line 1: '/etc/passwd' is not in the folder"),
        (f"{'0' * 64}  a\n{'1' * 64}  a", "line 2: a is listed twice"),
    ],
)
def test_a_damaged_manifest(folder: Path, manifest: str, text: str, message: str) -> None:
    Path(manifest).write_text(text)
    with pytest.raises(ModelLoadError, match=message):
        check_model(folder, manifest, weights=True)


def test_no_manifest(folder: Path, manifest: str) -> None:
    reason = "neither 64 hexadecimal digits nor a manifest: "
    with pytest.raises(ConfigError, match=f"model_sha256='abc': {reason}No such file"):
        check_model(folder, "abc", weights=True)
    Path(manifest).write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=f"{reason}it is not UTF-8"):
        check_model(folder, manifest, weights=True)


def test_an_unreadable_file(folder: Path, manifest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(hashlib, "file_digest", fails)
    with pytest.raises(ModelLoadError, match="cannot be read: Input/output error"):
        check_model(folder, manifest, weights=True)


def test_a_gguf_file(tmp_path: Path) -> None:
    """Other files of its folder are not part of the model."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text("{}")
    text = manifest_of(path)
    assert text == f"{hashlib.sha256(b'GGUF').hexdigest()}  model.gguf\n"
    (tmp_path / "SHA256SUMS").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    check_model(path, digest, weights=True)
    path.write_bytes(b"other")
    for weights in (False, True):  # it holds the configuration, too
        with pytest.raises(ModelLoadError, match=r"says: model\.gguf$"):
            check_model(path, digest, weights=weights)
    (tmp_path / "SHA256SUMS").write_text(text.replace("model.gguf", "config.json"))
    with pytest.raises(ModelLoadError, match=r"not in .*: model\.gguf$"):
        check_model(path, str(tmp_path / "SHA256SUMS"), weights=True)
