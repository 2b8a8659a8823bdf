"""Words in memory that all ranks share."""

from __future__ import annotations

import os

import torch

from hetero_llm.bridge.ipc.shared_memory import allocate_shared
from hetero_llm.engine.builders.rank_faults import fault_bytes, open_faults


def test_each_rank_has_a_word_that_all_read() -> None:
    for ranks in (2, 64, 65):
        size = fault_bytes(ranks)
        assert size % 4096 == 0 and size - 4096 < 64 * ranks <= size
        fd = allocate_shared(size)
        try:
            ours, theirs = (open_faults(fd, ranks, pin=False) for _ in range(2))
        finally:
            os.close(fd)
        assert ours.shape == (ranks,) and ours.dtype == torch.int32 and not ours.any()
        own = theirs[ranks - 1 :]
        own[0] = 1
        assert ours.tolist() == [0] * (ranks - 1) + [1]
        assert ours[1].data_ptr() - ours[0].data_ptr() == 64  # a cache line each
