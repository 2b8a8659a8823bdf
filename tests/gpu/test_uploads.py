"""Arrays through page-locked memory arrive as they were sent, in every place of the ring."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_llm.gpu.step_buffer import RING
from hetero_llm.gpu.uploads import Uploads


@pytest.mark.parametrize("max_words", [0, 5, 4096])
def test_what_is_sent_arrives(device: torch.device, max_words: int) -> None:
    uploads = Uploads(max_words, device)
    rng = np.random.default_rng(0)
    kept = []
    for number, size in enumerate((1, 4, 5, 1300, *range(RING))):
        if number % RING == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # as an engine does, which waits for steps before the last
        values = rng.integers(-9, 1 << 30, (3, size)).astype(np.int32)
        kept.append((values, uploads.send(values)))
        assert kept[-1][1].device.type == device.type
    for values, sent in kept:
        assert sent.shape == values.shape and sent.cpu().numpy().tolist() == values.tolist()
