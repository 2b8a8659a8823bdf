"""A weight file without a disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hetero_llm.models.weight_files import StoredTensor
from hetero_llm.models.weight_reader import Piece


class MemoryFile:
    """A weight file of tensors in memory; counts what is read and not yet copied."""

    def __init__(self, tensors: dict[str, Tensor], before: Callable[[str], None] | None = None):
        self.path = Path("memory")
        self.content = tensors
        self.tensors = tuple(
            StoredTensor(name, "", x.dtype, tuple(x.shape), i)
            for i, (name, x) in enumerate(tensors.items())
        )
        self.opened = self.closed = 0
        self.ahead = self.most_ahead = 0
        self.before = before
        self._lock = threading.Lock()

    def open(self) -> None:
        self.opened += 1

    def close(self) -> None:
        self.closed += 1

    def read(self, tensor: StoredTensor, offset: int, out: np.ndarray) -> None:
        assert self.opened and not self.closed
        if self.before is not None:
            self.before(tensor.name)
        with self._lock:
            self.ahead += out.nbytes
            self.most_ahead = max(self.most_ahead, self.ahead)
        data = self.content[tensor.name].contiguous().view(-1).view(torch.uint8).numpy()
        out[:] = data[offset : offset + out.nbytes]

    def copied(self, piece: Piece) -> None:
        with self._lock:
            self.ahead -= piece.nbytes
