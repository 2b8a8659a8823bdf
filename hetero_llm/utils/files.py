"""Reads files that others made: regular files only, no larger than the caller expects.

A model folder may be hostile, or damaged: a file in it may be a device that never ends, a pipe that
never begins, or larger than memory.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from hetero_llm.core.errors import ConfigError

KIB, MIB = 1 << 10, 1 << 20
_PIECE = 1 << 20


@contextmanager
def as_config_errors(field: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Errors with the user's file `path` become a ConfigError of the argument that names it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(field, str(path), error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(field, str(path), f"is not UTF-8 text: {error}") from None


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


def _check(found: os.stat_result, most: int | None, *, pipes: bool) -> None:
    if stat.S_ISREG(found.st_mode):
        if most is not None and found.st_size > most:
            raise _too_large(most)
        return
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not pipes:
        raise OSError(f"is a {_kind(found.st_mode)}, where a regular file is needed")


def _kind(mode: int) -> str:
    for is_kind, name in (
        (stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket"), (stat.S_ISCHR, "device"),
        (stat.S_ISBLK, "device"),
    ):  # fmt: skip
        if is_kind(mode):
            return name
    return "special file"


def _too_large(most: int) -> OSError:
    size = f"{most // MIB} MiB" if most >= MIB else f"{most // KIB} KiB"
    return OSError(f"is larger than {size}")
