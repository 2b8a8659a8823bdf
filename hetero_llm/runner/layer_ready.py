"""Attention that waits, layer by layer, for KV that is still on its way from host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hetero_llm.models.layers import Attend, RotaryHeads
from hetero_llm.models.rotary import StepRotary


class Gates(Protocol):
    """On a device both calls only put work on the current stream."""

    def arm(self, tickets: Sequence[int]) -> None:
        """From here on `wait` waits for these loads (tickets that are over count as landed)."""
        ...

    def wait(self, layer: int) -> None:
        """What comes after it sees the layer's KV of all loads that are armed."""
        ...


class GatedAttention:
    """`models.layers.Attend` behind gates."""

    def __init__(self, attend: Attend, gates: Gates) -> None:
        self._attend = attend
        self._gates = gates

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        self._gates.wait(layer)
        return self._attend(layer, q, k, v)

    def rotary(
        self, layer: int, qkv: torch.Tensor, heads: RotaryHeads, rows: StepRotary
    ) -> torch.Tensor:
        self._gates.wait(layer)
        return self._attend.rotary(layer, qkv, heads, rows)
