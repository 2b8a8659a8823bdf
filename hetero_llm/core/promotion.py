"""Which expert of a mixture enters which slot of the GPU's bank: chosen by `expert_offload`, copied
by `gpu.expert_moves`, and announced by the first of several ranks to the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Promotion:
    """A copy of one expert into the bank.

    Attributes:
        layer, expert: what is copied.
        slot: where to.
        evicted: (layer, expert) that leaves the slot, None: it was empty. In exclusive mode this
            one is copied to the host first.
    """

    layer: int
    expert: int
    slot: int
    evicted: tuple[int, int] | None


def promotions_to_rows(promotions: Sequence[Promotion]) -> NDArray[np.int32]:
    """[P, 5] int32 for other processes: layer, expert, slot, and layer and expert of what leaves,
    -1 where the slot was empty."""
    rows = [
        (one.layer, one.expert, one.slot, *((-1, -1) if one.evicted is None else one.evicted))
        for one in promotions
    ]
    return np.array(rows, np.int32).reshape(-1, 5)


def promotions_from_rows(rows: NDArray[np.int32]) -> tuple[Promotion, ...]:
    """The promotions of `promotions_to_rows`, in their order."""
    return tuple(
        Promotion(layer, expert, slot, None if old_layer < 0 else (old_layer, old_expert))
        for layer, expert, slot, old_layer, old_expert in rows.tolist()
    )
