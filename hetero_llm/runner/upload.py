"""Small arrays on their way to the device."""

from __future__ import annotations

import numpy as np
import torch


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """`values` on `device`, same shape and dtype, in the order of the current stream; not to be
    changed afterwards (on a CPU it is the same memory).

    From ordinary memory torch would wait until all work before it is done, and the device would
    then wait for the launch of what comes behind.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
