"""Experts that change places while steps run: which slots are written when.

A promotion takes four moments, each at the launch of some step:

1. The table's entry of the expert that leaves the slot becomes `ON_HOST`, by a kernel ahead of the
   step. Steps launched earlier may still read the slot.
2. When all of those have finished, a copy stream begins to write the slot.
3. When the copy has ended, the table's entry of the new expert becomes the slot, again by a kernel
   ahead of the step that is launched next.
4. The step reads the expert from the bank.

The placement has the table as the next step will find it, so no step has to be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from hetero_llm.gpu.expert_bank import ExpertBank
from hetero_llm.gpu.kernels.expert_requests import ON_HOST, write_table

_TURNS = 8
"""More than the steps that may be launched and not finished."""


class Promotion(Protocol):
    """See `expert_offload.placement.Promotion`."""

    @property
    def layer(self) -> int: ...

    @property
    def expert(self) -> int: ...

    @property
    def slot(self) -> int: ...

    @property
    def evicted(self) -> tuple[int, int] | None: ...


class Placement(Protocol):
    """See `expert_offload.placement.ExpertPlacement`.

    Attributes:
        table: [layers, experts] int32, changed by `choose` and `finish`.
    """

    table: np.ndarray

    @property
    def interval(self) -> int:
        """Steps between two calls of `observe`."""
        ...

    def observe(self, counts: np.ndarray, *, steps: int, seconds: float) -> None: ...

    def observe_prompt(
        self, counts: np.ndarray, *, tokens: int, share: float = 1.0, grant_bytes: float = 0
    ) -> None: ...

    def choose(
        self, movable: np.ndarray | None = None, *, loads_wait: bool = False
    ) -> Sequence[Promotion]: ...

    def finish(self, slot: int) -> None: ...


class FixedPlacement:
    """Leaves all experts where they are.

    Args:
        table: [layers, experts] int32, slots or `ON_HOST`.
    """

    interval = 1 << 30

    def __init__(self, table: np.ndarray) -> None:
        self.table = table

    def observe(self, counts: np.ndarray, *, steps: int, seconds: float) -> None:
        """See `Placement`."""

    def observe_prompt(
        self, counts: np.ndarray, *, tokens: int, share: float = 1.0, grant_bytes: float = 0
    ) -> None:
        """See `Placement`."""

    def choose(
        self, movable: np.ndarray | None = None, *, loads_wait: bool = False
    ) -> Sequence[Promotion]:
        """See `Placement`."""
        return ()

    def finish(self, slot: int) -> None:
        """See `Placement`."""
        raise AssertionError("nothing was promoted")


class Copies(Protocol):
    """Where slots are written, beside the stream of the steps."""

    def start(self, slot: int, copy: Callable[[], None]) -> Callable[[], bool]:
        """Runs `copy`, which writes a slot, behind the earlier ones; what it returns says whether
        the copy has ended."""
        ...


class CopiesAtOnce:
    """Without a device that copies beside the host: for tests."""

    def start(self, slot: int, copy: Callable[[], None]) -> Callable[[], bool]:
        """See `Copies`."""
        copy()
        return lambda: True


class StreamCopies:
    """On a CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def start(self, slot: int, copy: Callable[[], None]) -> Callable[[], bool]:
        """See `Copies`."""
        with torch.cuda.stream(self.stream):
            copy()
        return self.stream.record_event().query


@dataclass(slots=True)
class _Move:
    """A promotion on its way.

    Attributes:
        step: number of the first step that does not read the slot.
        is_done: of its copy; None: it has not begun.
    """

    layer: int
    expert: int
    slot: int
    step: int
    is_done: Callable[[], bool] | None = None


class ExpertMoves:
    """Writes the device's table and the bank's slots. One thread calls all methods.

    Args:
        bank: filled as the placement says.
        placement: chooses promotions.
        copies: where slots are written.
        most_changes: of the table by one kernel; a power of two.

    Attributes:
        placement: see Args.
        num_promoted: promotions that have ended.
    """

    def __init__(
        self,
        bank: ExpertBank,
        placement: Placement,
        copies: Copies,
        *,
        most_changes: int = 1024,
    ) -> None:
        self.placement = placement
        self.num_promoted = 0
        self._bank = bank
        self._copies = copies
        self._moves: list[_Move] = []
        self._launched = self._finished = 0
        pin = bank.device.type == "cuda"
        self._most = most_changes
        self._ring = torch.zeros(_TURNS, 2 * most_changes, dtype=torch.int32, pin_memory=pin)
        self._rows = self._ring.numpy()
        self._turn = 0
        self._changes: dict[int, int] = {}  # of the flat table
        write_table(bank.table, self._ring[0], 0)  # compiles

    @property
    def num_moving(self) -> int:
        """Promotions that have begun and not ended."""
        return len(self._moves)

    def before_launch(self, *, link_is_busy: bool, chooses: bool) -> None:
        """Called ahead of each step: writes the table, and starts copies and promotions.

        Args:
            link_is_busy: others wait for the link to the device: no copy begins.
            chooses: the placement has observed something new.
        """
        if self._moves:
            self._end_copies()
            if not link_is_busy:
                self._start_copies()
        if chooses:
            self._promote(link_is_busy)
        if self._changes:
            self._write_table()
        self._launched += 1

    def finished(self) -> None:
        """Called when the step that was launched first of those unfinished has finished."""
        self._finished += 1

    def _end_copies(self) -> None:
        left = []
        for move in self._moves:
            if move.is_done is None or not move.is_done():
                left.append(move)
                continue
            self.placement.finish(move.slot)
            self._change(move.layer, move.expert, move.slot)
            self.num_promoted += 1
        self._moves = left

    def _start_copies(self) -> None:
        for move in self._moves:
            if move.is_done is None and self._finished >= move.step:
                layer, expert, slot = move.layer, move.expert, move.slot

                def copy(layer: int = layer, expert: int = expert, slot: int = slot) -> None:
                    self._bank.fill(slot, layer, expert)

                move.is_done = self._copies.start(slot, copy)

    def _promote(self, loads_wait: bool) -> None:
        for chosen in self.placement.choose(loads_wait=loads_wait):
            if chosen.evicted is not None:
                self._change(*chosen.evicted, ON_HOST)
            self._moves.append(_Move(chosen.layer, chosen.expert, chosen.slot, self._launched))

    def _change(self, layer: int, expert: int, slot: int) -> None:
        self._changes[layer * self._bank.host.num_experts + expert] = slot

    def _write_table(self) -> None:
        changes = list(self._changes.items())
        self._changes.clear()
        for first in range(0, len(changes), self._most):
            if first and self._bank.device.type == "cuda":
                torch.cuda.synchronize(self._bank.device)  # rare; rows of the ring stay as they are
            some = changes[first : first + self._most]
            self._turn = (self._turn + 1) % _TURNS
            row = self._rows[self._turn]
            row[: len(some)] = [place for place, _ in some]
            row[self._most : self._most + len(some)] = [slot for _, slot in some]
            write_table(self._bank.table, self._ring[self._turn], len(some))
