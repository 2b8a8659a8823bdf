"""Small arrays reach the device while it is busy, and nobody waits."""

from __future__ import annotations

import numpy as np
import torch

from hetero_llm.runner.upload import upload


def test_an_upload_waits_for_nothing() -> None:
    device = torch.device("cuda")
    work = torch.ones(4096, 4096, device=device)
    arrays = [np.arange(5), np.arange(6, dtype=np.int32).reshape(2, 3).T]
    for values in arrays:
        upload(values, device)  # pinned memory is taken from the system at first
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    for _ in range(200):
        work = (work @ work).clamp(-1, 1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [upload(values, device) for values in arrays]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    done.record()
    assert not done.query(), "the device was idle: nothing is shown"
    for values, tensor in zip(arrays, found, strict=True):
        assert tensor.dtype == torch.from_numpy(values).dtype
        assert tensor.cpu().numpy().tolist() == values.tolist()
