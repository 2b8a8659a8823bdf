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

from hetero_llm.core.errors import RingError

logger = logging.getLogger(__name__)

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FOLDERS = ("/dev/shm", None)
"""Folders tried for the memory if there is no memfd; None: the one for temporary files."""


def map_shared(fd: int, size: int) -> mmap.mmap:
    """Map the memory and populate its pages, so that no access faults later."""
    return mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def allocate_shared(size: int) -> int:
    """Allocate `size` bytes and return their descriptor. The bytes are reserved, so that a full
    /dev/shm cannot cause a SIGBUS later.

    Raises:
        RingError: not enough memory.
    """
    try:
        created = os.memfd_create("hetero-llm-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fd = _filled(created, size)
        # Sealed: a process that shrank it would kill the other one by SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return fd
    except OSError as error:
        last = error
    logger.warning("there is no memfd (%s): rings lie in files without a name", last.strerror)
    for folder in _FOLDERS:
        try:
            with tempfile.TemporaryFile(prefix="hetero-llm-ring-", dir=folder) as file:
                return _filled(os.dup(file.fileno()), size)
        except OSError as error:
            last = error
    raise RingError(f"{size} bytes of shared memory cannot be had: {last.strerror}") from last


def _filled(fd: int, size: int) -> int:
    """Reserve the bytes behind `fd` and return it; close it if that fails."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        os.close(fd)
        raise
    return fd
