"""Arrays that do not fit the step input buffer, on their way to the device."""

from __future__ import annotations

import numpy as np
import torch

from hetero_llm.gpu.kernels.exchange import fetch_pinned
from hetero_llm.gpu.step_buffer import RING


class Uploads:
    """Sends arrays through page-locked memory that a kernel reads, as step input buffers go:
    without the copy engine, in which loads of prefixes may be queued, and without waiting.

    Args:
        max_words: of an array. A step sends one array at most.
    """

    def __init__(self, max_words: int, device: torch.device) -> None:
        self._device = device
        self._max_words = max_words
        width = -(-max_words // 4) * 4
        pin = device.type == "cuda"
        self._ring = torch.zeros(RING, width, dtype=torch.int32, pin_memory=pin)
        self._rows = self._ring.numpy()
        self._turns = torch.arange(RING, dtype=torch.int32, device=device)
        self._turn = 0

    def send(self, values: np.ndarray) -> torch.Tensor:
        """`values`, int32, on the device, same shape; the call waits for more than `max_words`."""
        assert values.dtype == np.int32
        if not 0 < values.size <= self._max_words:
            return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)
        turn, self._turn = self._turn, (self._turn + 1) % RING
        self._rows[turn, : values.size] = values.ravel()
        words = torch.empty(-(-values.size // 4) * 4, dtype=torch.int32, device=self._device)
        fetch_pinned(self._ring, self._turns[turn : turn + 1], out=words)
        return words[: values.size].view(values.shape)
