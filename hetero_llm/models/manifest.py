"""`model_sha256`: compares a model folder with a manifest of digests before it is served.

A manifest has the format of the `sha256sum` command, with names relative to the folder. The user
names it by its path, or by its own SHA-256: then it is the folder's file SHA256SUMS, and one short
value pins the whole model. All files it lists are checked, and every file that serving reads must
be listed. This protects against mix-ups, damage, and changes in shared stores, but not against
changes between check and use.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from hetero_llm.core.errors import ConfigError, ModelLoadError, shown
from hetero_llm.models.folders import PICKLED, SAFETENSORS, is_served_weight
from hetero_llm.models.gguf.container import is_gguf
from hetero_llm.utils.files import MIB, read_bytes, user_path

MANIFEST_NAME = "SHA256SUMS"
_HEX = re.compile(r"[0-9a-fA-F]{64}")
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_MOST_MANIFEST = 64 * MIB
_THREADS = 8
# Configuration, tokenizer, chat templates, remote code.
_READ = (
    "*.json", "*.model", "*.jinja", "*.tiktoken", "*.py", "merges.txt", "vocab.txt",
    "additional_chat_templates/*.jinja",
)  # fmt: skip


def check_model(folder: Path, wanted: str, *, weights: bool) -> None:
    """Compares a folder, or a GGUF file in its place, with its manifest.

    Args:
        wanted: Path of the manifest, or the SHA-256 of the folder's file SHA256SUMS.
        weights: Whether weight files are checked too, which takes as long as reading them.

    Raises:
        ConfigError: `wanted` is neither.
        ModelLoadError: A file differs from the manifest, is missing, or is not listed, or the
            manifest is damaged.
    """
    files = _files_read(folder, weights=weights)
    folder = folder_of(folder)
    path, listed = _read_manifest(folder, wanted)
    served = [_name(folder, file) for file in files]
    unlisted = [name for name in served if name not in listed]
    if unlisted:
        raise ModelLoadError(f"{folder}: not in {path}: {', '.join(unlisted)}")
    names = [name for name in listed if weights or not _is_weight(name)]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelLoadError(f"{folder}: in {path}, but missing: {', '.join(missing)}")
    digests = _digests(folder, names)
    wrong = [name for name in names if digests[name] != listed[name]]
    if wrong:
        raise ModelLoadError(f"{folder}: not as {path} says: {', '.join(wrong)}")


def manifest_of(folder: Path) -> str:
    """The manifest of a folder, or a GGUF file in its place, in its present state: all files that
    serving may read, sorted."""
    files = _files_read(folder, weights=True)
    folder = folder_of(folder)
    names = sorted(_name(folder, file) for file in files)
    digests = _digests(folder, names)
    return "".join(f"{digests[name]}  {name}\n" for name in names)


def folder_of(model: Path) -> Path:
    """The folder to which the names in a manifest are relative: that of a GGUF file is its own."""
    return model.parent if is_gguf(model) else model


def _read_manifest(folder: Path, wanted: str) -> tuple[Path, Mapping[str, str]]:
    by_digest = _HEX.fullmatch(wanted) is not None
    path = folder / MANIFEST_NAME
    try:
        if not by_digest:
            path = user_path(wanted)
        data = read_bytes(path, most=_MOST_MANIFEST)
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text"
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
        if by_digest:
            raise ModelLoadError(
                f"{path}: the manifest whose digest is model_sha256 cannot be read: {reason}; "
                "hetero-llm manifest writes one"
            ) from error
        raise ConfigError(
            "model_sha256", wanted, f"neither 64 hexadecimal digits nor a manifest: {reason}"
        ) from error
    digest = hashlib.sha256(data).hexdigest()
    if by_digest and digest != wanted.lower():
        raise ModelLoadError(f"{path}: its SHA-256 is {digest}, not model_sha256={wanted.lower()}")
    return path, _parsed(path, text)


def _parsed(path: Path, text: str) -> dict[str, str]:
    """Name -> digest in lower case."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ModelLoadError(
                f"{path}, line {number}: {shown(line)} is not as sha256sum writes it"
            )
        name = PurePosixPath(match[2])
        if name.is_absolute() or ".." in name.parts:
            raise ModelLoadError(f"{path}, line {number}: {shown(match[2])} is not in the folder")
        if found.setdefault(str(name), match[1].lower()) != match[1].lower():
            raise ModelLoadError(f"{path}, line {number}: {name} is listed twice")
    if not found:
        raise ModelLoadError(f"{path}: lists no file")
    return found


def _files_read(folder: Path, *, weights: bool) -> list[Path]:
    """The files of a folder that serving may read. A GGUF file holds the configuration, too:
    it is read with and without `weights`."""
    if is_gguf(folder):
        return [folder]
    patterns = (*_READ, *SAFETENSORS, *PICKLED) if weights else _READ
    files = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in files if not _is_weight(path.name) or is_served_weight(path))


def _is_weight(name: str) -> bool:
    return any(PurePosixPath(name).match(pattern) for pattern in (*SAFETENSORS, *PICKLED))


def _name(folder: Path, file: Path) -> str:
    return file.relative_to(folder).as_posix()


def _digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Name -> digest. Several threads: most disks read faster than one thread hashes."""

    def digest(name: str) -> str:
        try:
            with (folder / name).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ModelLoadError(f"{folder / name}: cannot be read: {error.strerror}") from error

    names = list(names)
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="sha256")
    try:
        return dict(zip(names, pool.map(digest, names), strict=True))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
