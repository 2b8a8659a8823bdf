"""Reads files that others made: regular files only, no larger than the caller expects. Replaces our
own files as a whole.

A model folder may be hostile, or damaged: a file in it may be a device that never ends, a pipe that
never begins, or larger than memory.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hetero_llm.core.errors import ConfigError

KIB, MIB = 1 << 10, 1 << 20
_PIECE = 1 << 20
_KINDS = {
    stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device",
}  # fmt: skip


@contextmanager
def as_config_errors(field: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Errors with the user's file `path` become a ConfigError of the argument that names it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(field, str(path), error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(field, str(path), f"is not UTF-8 text: {error}") from None


def user_path(path: str) -> Path:
    """A path that a user wrote, with "~" as the home folder. Nothing needs to be there.

    Raises:
        OSError: The system cannot even look: the name is too long or holds a NUL character, a
            folder may not be entered, "~name" is of no user.
    """
    if "\0" in path:
        raise OSError("a path holds no NUL character")
    try:
        found = Path(path).expanduser()
    except RuntimeError as error:
        raise OSError(str(error)) from None
    with suppress(FileNotFoundError, NotADirectoryError):
        os.stat(found)
    return found


def check_regular(path: str | os.PathLike[str], *, most: int | None = None) -> None:
    """Checks a file that a library is going to open by its name; links are followed.

    Args:
        most: Largest accepted size in bytes; None: any.

    Raises:
        OSError: It does not exist, is no regular file, or is larger.
    """
    _check(os.stat(path), most, pipes=False)


def read_bytes(path: str | os.PathLike[str], *, most: int, pipes: bool = False) -> bytes:
    """The contents of a file.

    Args:
        most: Largest accepted size in bytes.
        pipes: Whether a pipe or terminal will do as well: where a user names one file on the
            command line, it may be the output of another command.

    Raises:
        OSError: It cannot be read, is no regular file, or is larger.
    """
    _check(os.stat(path), most, pipes=pipes)  # before it is opened: opening a device may act on it
    # Without O_NONBLOCK, opening a pipe waits for its writer, for ever if there is none.
    flags = os.O_RDONLY | os.O_CLOEXEC | (0 if pipes else os.O_NONBLOCK)
    with open(os.open(path, flags), "rb", buffering=0) as file:
        _check(os.fstat(file.fileno()), most, pipes=pipes)
        parts, left = [], most + 1
        while left and (part := file.read(min(left, _PIECE))):
            parts.append(part)
            left -= len(part)
    if not left:
        raise _too_large(most)
    return b"".join(parts)


def read_text(
    path: str | os.PathLike[str], *, most: int, pipes: bool = False, encoding: str = "utf-8"
) -> str:
    """The contents of a text file, every line end as "\\n"; see `read_bytes`.

    Raises:
        OSError: As `read_bytes`.
        UnicodeDecodeError: It is not text in this encoding.
    """
    text = read_bytes(path, most=most, pipes=pipes).decode(encoding)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def replace_file(
    path: str | os.PathLike[str], content: bytes, *, mode: int = 0o600, sync: bool = True
) -> None:
    """Writes a file that appears under its name only when it is whole; one that was there stays
    until then.

    Args:
        mode: permissions of the file.
        sync: whether it has to be on the disk by then.

    Raises:
        OSError: it cannot be written.
    """
    folder = os.path.dirname(os.path.abspath(path))
    handle, temporary = tempfile.mkstemp(prefix=".new-", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _check(found: os.stat_result, most: int | None, *, pipes: bool) -> None:
    if stat.S_ISREG(found.st_mode):
        if most is not None and found.st_size > most:
            raise _too_large(most)
        return
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not pipes:
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "special file")
        raise OSError(f"is a {kind}, where a regular file is needed")


def _too_large(most: int) -> OSError:
    size = f"{most // MIB} MiB" if most >= MIB else f"{most // KIB} KiB"
    return OSError(f"is larger than {size}")
