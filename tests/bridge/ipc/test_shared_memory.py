"""Memory without a name, where the system refuses some of what makes it."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
from typing import Any

import pytest

from hetero_llm.bridge.ipc.shared_memory import allocate_shared, create_shared
from hetero_llm.core.errors import RingError


def num_open() -> int:
    """Open descriptors of this process, and that of the look itself."""
    return len(os.listdir("/proc/self/fd"))


def refuse(*_: Any, **__: Any) -> None:
    raise OSError(errno.EPERM, "refused")


def test_memory_that_cannot_be_sealed_is_given_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = num_open()
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with caplog.at_level(logging.WARNING):
        fd = allocate_shared(mmap.PAGESIZE)
    assert "no memfd (refused): rings lie in files" in caplog.text
    assert os.fstat(fd).st_size == mmap.PAGESIZE
    os.close(fd)
    assert num_open() == before


def test_memory_that_cannot_be_mapped_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = num_open()
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(RingError, match="4096 bytes cannot be mapped: refused"):
        create_shared(4096)
    assert num_open() == before


def test_all_of_it_is_zero_and_reserved() -> None:
    before = num_open()
    shared = create_shared(2 * mmap.PAGESIZE)
    assert shared.address % mmap.PAGESIZE == 0
    assert shared.memory[:] == bytes(2 * mmap.PAGESIZE)
    assert os.fstat(shared.fd).st_blocks * 512 >= 2 * mmap.PAGESIZE
    shared.close()
    assert num_open() == before
