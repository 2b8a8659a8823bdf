"""The folders of compiled code: where it is looked for, and where new files are kept.

Looked for in this order:

1. the folder that is written to: the chosen one (`env.cache_dir`) or, where that cannot be
   written, a private folder of this user in the system's temporary folder;
2. the chosen folder, read only: an image may have been built with a full one;
3. `PREBUILT`, the libraries that a wheel brings along (tools/build_wheels.py).

Every file ends with a checksum of its content. A file that is cut or damaged is not used: it is
reported in one line, deleted and made anew. A file gets its name only when it is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hetero_llm.utils.env import cache_dir
from hetero_llm.utils.files import replace_file

logger = logging.getLogger(__name__)

PREBUILT = Path(__file__).parents[1] / "prebuilt"
"""Libraries that came with the package; missing in a checkout."""

_SEAL = b"\nhetero_llm sha256 "
_SEAL_BYTES = len(_SEAL) + hashlib.sha256().digest_size


def write_folder() -> Path:
    """The folder for new files. It exists and can be written."""
    return _writable(cache_dir())[0]


def look_again() -> None:
    """Forgets which folder could be written: the next call finds it out."""
    _writable.cache_clear()


def folders() -> tuple[Path, ...]:
    """All folders in which compiled code is looked for, in order."""
    chosen = cache_dir()
    found = [write_folder(), *([] if chosen is None else [chosen]), PREBUILT]
    return tuple(dict.fromkeys(found))


def seal(content: bytes) -> bytes:
    """The content of a file with its checksum."""
    return content + _SEAL + hashlib.sha256(content).digest()


def unseal(content: bytes) -> bytes | None:
    """The content of a sealed file without its checksum; None if it is cut or damaged."""
    body, mark = content[:-_SEAL_BYTES], content[-_SEAL_BYTES:]
    return body if mark == _SEAL + hashlib.sha256(body).digest() else None


def find(name: str) -> Path | None:
    """The file of that name in the first folder that has a whole one; damaged ones are deleted."""
    for folder in folders():
        path = folder / name
        if read(path) is not None:
            return path
    return None


def read(path: Path) -> bytes | None:
    """The content of a sealed file; None if there is none, or if it was damaged and is deleted."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    body = unseal(content)
    if body is None:
        throw_away(path, "is cut or damaged")
    return body


def throw_away(path: Path, reason: str) -> None:
    """Deletes a file that cannot be used, with one line in the log."""
    logger.warning("compiled code %s %s: it is compiled again", path, reason)
    with contextlib.suppress(OSError):
        path.unlink()


def write(path: Path, content: bytes) -> None:
    """Seals the content and puts it in place under its name, all at once. The first file that goes
    to the private temporary folder is worth a warning.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    folder, reason = _writable(cache_dir())
    if reason is not None:
        _announce(folder, reason)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, seal(content), mode=0o644, sync=False)


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What a folder holds.

    Attributes:
        files: number of files.
        bytes: their size.
    """

    files: int
    bytes: int


def usage(folder: Path) -> CacheUse:
    """Number and size of the files in a folder and below it; none if there is no such folder."""
    sizes = [path.stat().st_size for path in _files(folder)]
    return CacheUse(len(sizes), sum(sizes))


def clear(folder: Path) -> None:
    """Deletes what a folder holds. The folder itself stays: it may be a mount.

    Raises:
        OSError: something cannot be deleted.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


@cache
def _writable(chosen: Path | None) -> tuple[Path, str | None]:
    """`chosen` and None; or where it cannot be written, a private temporary folder and why."""
    if chosen is None:
        return _temporary(), "there is no home folder"
    reason = _refusal(chosen)
    return (chosen, None) if reason is None else (_temporary(), f"{chosen}: {reason}")


@cache
def _announce(folder: Path, reason: str) -> None:
    logger.warning(
        "compiled code cannot be kept (%s); %s is used instead: set HETERO_LLM_CACHE_DIR to a "
        "folder that this user can write",
        reason, folder,
    )  # fmt: skip


def _refusal(folder: Path) -> str | None:
    """Why nothing can be written into the folder; None: it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _temporary() -> Path:
    """A folder that only this user can write: libraries in it are loaded as they are.

    It has the same name for all processes of the user, so that they share it. If something else has
    taken that name, the folder is one of this process's own.
    """
    path = Path(tempfile.gettempdir()) / f"hetero-llm-{os.getuid()}"
    with contextlib.suppress(OSError):
        path.mkdir(mode=0o700)
    try:
        found = path.lstat()
        private = stat.S_ISDIR(found.st_mode) and found.st_mode & 0o077 == 0
        if private and found.st_uid == os.getuid() and _refusal(path) is None:
            return path
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="hetero-llm-"))
