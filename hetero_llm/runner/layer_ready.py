"""Attention that waits, layer by layer, for KV that is still on its way from host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hetero_llm.models.layers import Attend, RotaryHeads
from hetero_llm.models.rotary import StepRotary


class LayerReadyFlags(Protocol):
    """How a step waits for its loads: one flag for each load counts the layers that have landed.
    On a GPU both calls only put work on the current stream."""

    def arm(self, transfer_ids: Sequence[int]) -> None:
        """Later calls of `wait` wait for these loads; finished ones count as landed."""
        ...

    def wait(self, layer: int) -> None:
        """Work issued after it sees the layer's KV of all armed loads."""
        ...


class LayerReadyAttention:
    """`models.layers.Attend` that waits for a layer's KV before it attends."""

    def __init__(self, attend: Attend, layer_ready: LayerReadyFlags) -> None:
        self._attend = attend
        self._layer_ready = layer_ready

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._layer_ready.wait(layer)
        return self._attend(layer, q, k, v, sinks=sinks)

    def rotary(
        self,
        layer: int,
        qkv: torch.Tensor,
        heads: RotaryHeads,
        rows: StepRotary,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._layer_ready.wait(layer)
        return self._attend.rotary(layer, qkv, heads, rows, sinks=sinks)

    def select(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return self._attend.select(layer, x)
