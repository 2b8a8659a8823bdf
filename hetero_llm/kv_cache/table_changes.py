"""Changes of block tables that the runner has to apply before a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray


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

    def writes(self) -> NDArray[np.int32]:
        """Table, column and block of each changed entry, [3, entries]."""
        sizes = np.array([len(blocks) for _, _, blocks in self.runs], np.int32)
        entries = np.empty((3, int(sizes.sum())), np.int32)
        if self.runs:
            tables, columns, blocks = zip(*self.runs, strict=True)
            begins = np.cumsum(sizes, dtype=np.int32) - sizes
            entries[0] = np.repeat(np.array(tables, np.int32), sizes)
            entries[1] = np.repeat(np.array(columns, np.int32) - begins, sizes)
            entries[1] += np.arange(entries.shape[1], dtype=np.int32)
            entries[2] = np.fromiter(chain.from_iterable(blocks), np.int32, entries.shape[1])
        return entries
