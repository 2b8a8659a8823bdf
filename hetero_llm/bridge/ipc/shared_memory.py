"""Memory without a name that a process shares with those that it starts.

They inherit its descriptor. A killed process leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import tempfile
from dataclasses import dataclass

from hetero_llm.core.errors import RingError

logger = logging.getLogger(__name__)

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FOLDERS = ("/dev/shm", None)
"""Folders tried for the memory if there is no memfd; None: the one for temporary files."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedMemory:
    """Memory that this process shares with those that it starts.

    Attributes:
        fd: descriptor of the memory, inherited by the other processes.
        memory: the mapping of this process.
    """

    fd: int
    memory: mmap.mmap

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def close(self) -> None:
        """Releases descriptor and mapping; open ends of this process are closed first. The other
        processes keep their own."""
        self.memory.close()
        os.close(self.fd)


def create_shared(size: int) -> SharedMemory:
    """Allocates and maps `size` bytes, all of them zero.

    Raises:
        RingError: not enough memory.
    """
    fd = allocate_shared(size)
    try:
        return SharedMemory(fd, map_shared(fd, size))
    except OSError as error:
        os.close(fd)
        raise RingError(f"{size} bytes cannot be mapped: {error.strerror}") from error


def map_shared(fd: int, size: int) -> mmap.mmap:
    """Map the memory and populate its pages, so that no access faults later."""
    return mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def allocate_shared(size: int) -> int:
    """Allocate `size` bytes and return their descriptor. The bytes are reserved, so that a full
    /dev/shm cannot cause a SIGBUS later.

    Raises:
        RingError: not enough memory.
    """
    try:
        created = os.memfd_create("hetero-llm-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # Sealed: a process that shrank it would kill the other one by SIGBUS.
        return _reserve(created, size, seals=_SEALS)
    except OSError as error:
        last = error
    logger.warning("there is no memfd (%s): rings lie in files without a name", last.strerror)
    for folder in _FOLDERS:
        try:
            with tempfile.TemporaryFile(prefix="hetero-llm-ring-", dir=folder) as file:
                return _reserve(os.dup(file.fileno()), size)
        except OSError as error:
            last = error
    raise RingError(f"{size} bytes of shared memory cannot be had: {last.strerror}") from last


def _reserve(fd: int, size: int, *, seals: int = 0) -> int:
    """Reserve the bytes behind `fd`, seal them and return `fd`; close it if that fails."""
    try:
        os.posix_fallocate(fd, 0, size)
        if seals:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(fd)
        raise
    return fd
