"""What a load or store of KV copies: decided by rank 0, done by every rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class TransferOrder:
    """Blocks to copy between the device's KV cache and host memory.

    Attributes:
        transfer_id: names the load or store; see `kv_cache.host_tier`.
        host_blocks, blocks: [N] int64 each, pairwise; `blocks` are those of the device.
        after_step: number of the step after whose device work the copy begins; 0: at once.
        compute: see `kv_cache.host_tier.HostTier.load`; a store has none.
    """

    transfer_id: int
    host_blocks: np.ndarray
    blocks: np.ndarray
    after_step: int
    compute: float | None = None
