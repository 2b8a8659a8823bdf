"""What the copiers of all ranks of a model report to rank 0: which transfers have ended.

Each copy thread writes into shared memory itself, so that a report takes neither a message nor
Python's lock; a bell there wakes rank 0 (`csrc/reports.h`).
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

from hetero_llm.bridge.ipc.shared_memory import map_shared
from hetero_llm.bridge.kv_offload import copier_library
from hetero_llm.bridge.kv_offload.copier import DONE
from hetero_llm.bridge.kv_offload.copier_library import CopierError
from hetero_llm.bridge.kv_offload.copier_protocol import Done

STEP = 0
"""In the place of a transfer id: a step has ended that waited for loads, and it is not `ok` if it
has given one up."""

_HEAD_BYTES, _RING_BYTES = 4096, 1 << 17
_ROOM = 256


def board_bytes(ranks: int) -> int:
    """Bytes of the shared memory of a board; zero-filled memory is no board yet."""
    return _HEAD_BYTES + ranks * _RING_BYTES


class ReportBoard:
    """The board in shared memory. Rank 0 reads it, in one thread; the other ranks open it for their
    copiers to write to.

    Args:
        fd: descriptor of `board_bytes` bytes of shared memory; may be closed afterwards.
        ranks: formats the memory for as many ranks, once and before any other process opens it;
            None: another process has done so.

    Attributes:
        address: for `CopyOptions.board`.
        ranks: how many report, rank 0 included.

    Raises:
        CopierError: there is no compiled library, or the memory is no board.
    """

    def __init__(self, fd: int, ranks: int | None = None) -> None:
        library = copier_library.load()
        self._quick, self._waiting = library.quick, library.waiting
        self._memory: mmap.mmap | None = map_shared(fd, os.fstat(fd).st_size)
        self._base = ctypes.c_char.from_buffer(self._memory)
        self.address = ctypes.addressof(self._base)
        if ranks is not None:
            assert self._quick.hetero_reports_bytes(ranks) == len(self._memory)
            self._quick.hetero_reports_format(self.address, ranks)
        self.ranks: int = self._quick.hetero_reports_ranks(self.address, len(self._memory))
        if not self.ranks:
            raise CopierError("the shared memory holds no board for reports of copies")
        self._done = np.zeros(_ROOM, DONE)

    def take(self, rank: int) -> list[Done]:
        """What a rank has reported since the previous call, in that order; see `STEP`."""
        found: list[Done] = []
        count = _ROOM
        while count == _ROOM:
            count = self._quick.hetero_reports_take(
                self.address, rank, self._done.ctypes.data, _ROOM
            )
            found += [Done(each, bool(ok), took) for each, ok, took in self._done[:count].tolist()]
        return found

    def wait(self, seconds: float) -> None:
        """Sleeps until there is something to take, for at most `seconds`, without the GIL."""
        self._waiting.hetero_reports_wait(self.address, int(seconds * 1e9))

    def ready_rows(self) -> int:
        """Host blocks that all ranks but rank 0 can use by now."""
        rows: int = self._quick.hetero_reports_ready_rows(self.address)
        return rows

    def is_broken(self) -> bool:
        """Whether the driver of any rank has reported a lasting error."""
        return bool(self._quick.hetero_reports_broken(self.address))

    def set_ready_rows(self, rank: int, rows: int) -> None:
        """Called by a rank: the number of its host blocks that can be used; it only grows."""
        self._quick.hetero_reports_set_ready_rows(self.address, rank, rows)

    def close(self) -> None:
        """Releases the mapping. No copier may write to it any more, and nothing be read."""
        if self._memory is not None:
            del self._base
            self._memory.close()
            self._memory = None
