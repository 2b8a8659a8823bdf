"""Experts of long steps: the host's experts of a layer visit the GPU while the layer before runs.

The bank has staging slots for two layers. A copy stream fills one half while the steps' stream
reads the other, so a step is as long as the link needs, or its products. Such steps are not
captured: streams and events order the two sides.

Experts of few tokens are left to the CPU threads, which compute them while the link brings the
others. How many tokens an expert has is known when the layer's router has run; the layer before
has begun the copies by then. So copies begin with the experts that have had many tokens in the step
before, or in any step if there was none, and the others are shared when the counts are there: those
without a token are left out, those of few tokens go to the threads, and the rest is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hetero_llm.core.null_objects import do_nothing
from hetero_llm.gpu.expert_bank import ExpertBank
from hetero_llm.gpu.kernels.expert_requests import ON_HOST


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

    def is_idle(self) -> bool:
        """Whether all copies so far have ended."""
        ...


class DirectLane:
    """Without a device that copies beside the host: for tests."""

    wait = used = staticmethod(do_nothing)

    def copy(self, half: int, copy: Callable[[], None]) -> None:
        """See `Lane`."""
        copy()

    def is_idle(self) -> bool:
        """See `Lane`."""
        return True


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

    def is_idle(self) -> bool:
        """See `Lane`."""
        return self._stream.query()


class Split(Protocol):
    """See `expert_offload.step_costs.LaneCosts`."""

    @property
    def link(self) -> float: ...

    def split(self, rows: np.ndarray, pending: float, most_rows: int) -> np.ndarray: ...


class StreamsAll:
    """Leaves no expert to the threads, and does not ask for counts."""

    link = 0.0

    def split(self, rows: np.ndarray, pending: float, most_rows: int) -> np.ndarray:
        """See `Split`."""
        return np.zeros(len(rows), bool)


STREAMS_ALL = StreamsAll()


@dataclass(frozen=True, slots=True)
class StreamedLayer:
    """Where the experts of a layer of a long step are.

    Attributes:
        table: [experts] int32 on the device: the slot of each, or `ON_HOST`.
        asks: whether any is `ON_HOST`.
    """

    table: Tensor
    asks: bool


class ExpertStreams:
    """Streams the layers of a step in order.

    Args:
        bank: with staging slots for all experts of a layer.
        table: [layers, experts] int32 as the step finds it, in host memory: the placement's.
        lane: where copies run.
        most_rows: tokens that the threads compute in one layer, of all their experts together.

    Attributes:
        split: shares a layer's experts; set once costs are known.
    """

    def __init__(
        self, bank: ExpertBank, table: np.ndarray, lane: Lane, *, most_rows: int = 0
    ) -> None:
        assert bank.staging == bank.host.num_experts
        self._bank = bank
        self._table = table
        self._lane = lane
        self._most_rows = most_rows
        layers, experts = table.shape
        self.split: Split = STREAMS_ALL
        self._shares = np.full(table.shape, 1.0 / experts)  # of a layer's tokens, in the last step
        self._copied = np.zeros(table.shape, bool)  # into the staging slots of their layer
        self._begun = 0
        slots = torch.arange(bank.staging, dtype=torch.int32, device=bank.device)
        self._staged = tuple(bank.staging_slot(layer) + slots for layer in range(2))

    @property
    def wants_counts(self) -> bool:
        """Whether `enter` needs the tokens of each expert."""
        return self.split is not STREAMS_ALL

    def enter(self, layer: int, rows: np.ndarray | None, tokens: int) -> StreamedLayer:
        """Called before a layer's experts: begins the copies of the next layer, and waits on the
        device for those of this one.

        Args:
            rows: [experts] tokens of each expert; None: not `wants_counts`.
            tokens: all choices of the step's tokens, their sum.
        """
        if layer == 0:
            self._begun = 0
        if self._begun <= layer:
            # Nothing has begun: all is shared by the counts.
            self._copied[layer] = False
            self._begun = layer + 1
        left = (self._table[layer] < 0) & ~self._copied[layer]
        on_cpu = np.zeros(len(left), bool)
        if rows is not None:
            self._shares[layer] = rows / max(int(rows.sum()), 1)
            left &= rows > 0
            begun = int(self._copied[layer].sum())
            # Half of what has begun is a guess: the link has worked on it beside the layer before.
            pending = 0.0 if self._lane.is_idle() else 0.5 * begun * self.split.link
            on_cpu[left] = self.split.split(rows[left], pending, self._most_rows)
        self._copy(layer, left & ~on_cpu)
        if layer + 1 < len(self._table):
            self._begin(layer + 1, tokens)
        self._lane.wait(layer % 2)
        row = self._bank.table[layer]
        table = torch.where(row < 0, self._staged[layer % 2], row)
        if on_cpu.any():
            table.masked_fill_(torch.from_numpy(on_cpu).to(table.device), ON_HOST)
        return StreamedLayer(table, bool(on_cpu.any()))

    def leave(self, layer: int) -> None:
        """Called behind a layer's experts."""
        self._lane.used(layer % 2)

    def copy_alone(self, layer: int) -> None:
        """Copies the host's experts of a layer; for measurements, between steps."""
        self.begin_alone(layer)
        self._lane.wait(layer % 2)

    def begin_alone(self, layer: int) -> None:
        """The same without waiting, neither on the host nor on the device."""
        self._copy(layer, self._table[layer] < 0)

    def _begin(self, layer: int, tokens: int) -> None:
        """Copies what the threads are not expected to compute."""
        self._begun = layer + 1
        wanted = self._table[layer] < 0
        if self.wants_counts:
            rows = np.ceil(self._shares[layer, wanted] * tokens).astype(np.int64)
            wanted[wanted] = ~self.split.split(rows, 0.0, self._most_rows) & (rows > 0)
        self._copied[layer] = wanted
        self._copy(layer, wanted)

    def _copy(self, layer: int, wanted: np.ndarray) -> None:
        if not wanted.any():
            return
        slot = self._bank.staging_slot(layer)

        def copy() -> None:
            for first, count in runs(wanted):
                self._bank.fill(slot + first, layer, first, count)

        self._lane.copy(layer % 2, copy)


def runs(wanted: np.ndarray) -> Iterator[tuple[int, int]]:
    """First place and length of each run of true values of [N] bool."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], wanted, [False])).astype(np.int8)))
    for first, end in edges.reshape(-1, 2).tolist():
        yield first, end - first
