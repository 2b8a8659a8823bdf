"""Experts of long steps: the host's experts of a layer visit the GPU while the layer before runs.

The bank has staging slots for two layers. A copy stream fills one half while the steps' stream
reads the other, so a step is as long as the link needs, or its products. Such steps are not
captured: streams and events order the two sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hetero_llm.gpu.expert_bank import ExpertBank


class Lane(Protocol):
    """Orders copies into the two halves of the staging slots with the stream of the steps."""

    def copy(self, half: int, copy: Callable[[], None]) -> None:
        """Runs `copy`, which writes a half, behind the kernels that read it last."""
        ...

    def wait(self, half: int) -> None:
        """Later kernels of the steps' stream run behind the last copy into a half."""
        ...

    def used(self, half: int) -> None:
        """The kernels so far of the steps' stream are those that read a half last."""
        ...


class DirectLane:
    """Without a device that copies beside the host: for tests."""

    def copy(self, half: int, copy: Callable[[], None]) -> None:
        """See `Lane`."""
        copy()

    def wait(self, half: int) -> None:
        """See `Lane`."""

    def used(self, half: int) -> None:
        """See `Lane`."""


class StreamLane:
    """On a CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._copied, self._used = (tuple(torch.cuda.Event() for _ in range(2)) for _ in range(2))

    def copy(self, half: int, copy: Callable[[], None]) -> None:
        """See `Lane`."""
        self._stream.wait_event(self._used[half])
        with torch.cuda.stream(self._stream):
            copy()
            self._copied[half].record()

    def wait(self, half: int) -> None:
        """See `Lane`."""
        torch.cuda.current_stream().wait_event(self._copied[half])

    def used(self, half: int) -> None:
        """See `Lane`."""
        self._used[half].record()


class ExpertStreams:
    """Streams the layers of a step in order.

    Args:
        bank: with staging slots for all experts of a layer.
        table: [layers, experts] int32 as the step finds it; the host's (`ExpertMoves.table`).
        lane: where copies run.
    """

    def __init__(self, bank: ExpertBank, table: np.ndarray, lane: Lane) -> None:
        assert bank.staging == bank.host.num_experts
        self._bank = bank
        self._table = table
        self._lane = lane
        self._begun = 0  # layers of this step whose copies have begun
        experts = torch.arange(bank.staging, dtype=torch.int32, device=bank.device)
        self._staged = [experts + bank.staging_slot(half) for half in range(2)]

    def enter(self, layer: int) -> Tensor:
        """Called before a layer's experts: begins the copies of the next layer, and waits on the
        device for those of this one.

        Returns:
            [experts] int32: the slot of every expert of the layer, none on the host.
        """
        if layer == 0:
            self._begun = 0
        while self._begun < min(layer + 2, len(self._table)):
            self._begin(self._begun)
            self._begun += 1
        self._lane.wait(layer % 2)
        row = self._bank.table[layer]
        return torch.where(row < 0, self._staged[layer % 2], row)

    def leave(self, layer: int) -> None:
        """Called behind a layer's experts."""
        self._lane.used(layer % 2)

    def copy_alone(self, layer: int) -> None:
        """Copies the host's experts of a layer; for measurements, between steps."""
        self._begin(layer)
        self._lane.wait(layer % 2)

    def _begin(self, layer: int) -> None:
        slot = self._bank.staging_slot(layer)

        def copy() -> None:
            for first, count in runs(self._table[layer] < 0):
                self._bank.fill(slot + first, layer, first, count)

        self._lane.copy(layer % 2, copy)


def runs(wanted: np.ndarray) -> Iterator[tuple[int, int]]:
    """First place and length of each run of true values of [N] bool."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], wanted, [False])).astype(np.int8)))
    for first, end in edges.reshape(-1, 2).tolist():
        yield first, end - first
