"""Uploads of small arrays."""

from __future__ import annotations

import numpy as np
import torch


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copies `values` to `device`, same shape and dtype, in the order of the current stream.

    The result must not be written: on a CPU it shares the memory of `values`. The copy goes through
    page-locked memory: from ordinary memory torch would wait for all earlier work of the stream,
    and the device would then idle until the next launch.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
