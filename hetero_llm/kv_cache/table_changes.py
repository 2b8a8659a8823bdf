"""Changes of block tables that the runner has to apply before a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

_NOTHING = np.zeros((3, 0), np.int32)


@dataclass(slots=True)
class TableChanges:
    """Changes since the previous `BlockManager.take_changes`.

    Attributes:
        runs: (table, first column, blocks of the columns from there on). Later runs overwrite
            earlier ones.
        copy_from, copy_to: whole blocks to copy on the device, pairwise.
    """

    runs: list[tuple[int, int, list[int]]] = field(default_factory=list)
    copy_from: list[int] = field(default_factory=list)
    copy_to: list[int] = field(default_factory=list)
    # Entries of runs before `runs`.
    _packed: NDArray[np.int32] = field(default_factory=lambda: _NOTHING)

    def pack(self) -> None:
        """Makes entries of the runs so far, which `writes` then need not do; `runs` is empty
        afterwards."""
        self._packed = self.writes()
        self.runs = []

    def writes(self) -> NDArray[np.int32]:
        """Table, column and block of each changed entry, [3, entries]."""
        if not self.runs:
            return self._packed
        entries = self._entries()
        if not self._packed.shape[1]:
            return entries
        return np.concatenate((self._packed, entries), axis=1)

    def _entries(self) -> NDArray[np.int32]:
        sizes = np.array([len(blocks) for _, _, blocks in self.runs], np.int32)
        entries = np.empty((3, int(sizes.sum())), np.int32)
        tables, columns, blocks = zip(*self.runs, strict=True)
        begins = np.cumsum(sizes, dtype=np.int32) - sizes
        entries[0] = np.repeat(np.array(tables, np.int32), sizes)
        entries[1] = np.repeat(np.array(columns, np.int32) - begins, sizes)
        entries[1] += np.arange(entries.shape[1], dtype=np.int32)
        entries[2] = np.fromiter(chain.from_iterable(blocks), np.int32, entries.shape[1])
        return entries
