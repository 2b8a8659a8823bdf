"""Experts that change places while steps run: which slots are written when.

A promotion takes four moments, each at the launch of some step:

1. The table's entry of the expert that leaves the slot becomes `ON_HOST`, by a kernel ahead of the
   step. Steps launched earlier may still read the slot.
2. When all of those have finished, a copy stream begins to write the slot.
3. When the copy has ended, the table's entry of the new expert becomes the slot, again by a kernel
   ahead of the step that is launched next.
4. The step reads the expert from the bank.

The host keeps the table as the next step will find it, so no step has to be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from hetero_llm.gpu.expert_bank import ExpertBank
from hetero_llm.gpu.kernels.expert_requests import ON_HOST, write_table

_MOST_CHANGES = 64
"""Of the table by one step."""
_TURNS = 8
"""More than the steps that may be launched and not finished."""

Promotion = tuple[int, int, int]
"""Layer, expert, slot that it takes."""


class Placement(Protocol):
    """Decides which experts ought to be in the bank (`expert_offload.placement`)."""

    def observe(self, counts: np.ndarray) -> None:
        """Takes the [layers, experts] tokens of each expert since the last call."""
        ...

    def promotions(self, budget: int) -> Sequence[Promotion]:
        """At most `budget` promotions, best first. All earlier ones have ended, and these count as
        done."""
        ...


class NoPlacement:
    """Leaves all experts where they are."""

    def observe(self, counts: np.ndarray) -> None:
        """See `Placement`."""

    def promotions(self, budget: int) -> Sequence[Promotion]:
        """See `Placement`."""
        return ()


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
    """Owns the table and who is in which slot. One thread calls all methods.

    Args:
        bank: filled as `owners` says.
        owners: [num_slots] int, see `ExpertBank.place`.
        placement: chooses promotions.
        copies: where slots are written.
        bytes_per_second: of promotions on average; at most `burst` seconds of it at once.
        clock: seconds.

    Attributes:
        table: [layers, experts] int32 as the next step will find it.
        num_promoted: promotions that have ended.
    """

    burst = 0.25

    def __init__(
        self,
        bank: ExpertBank,
        owners: np.ndarray,
        placement: Placement,
        copies: Copies,
        *,
        bytes_per_second: float,
        clock: Callable[[], float],
    ) -> None:
        self.table = np.full(tuple(bank.table.shape), ON_HOST, np.int32)
        self.num_promoted = 0
        self._bank = bank
        self._owners = owners.astype(np.int64).copy()
        for slot in np.flatnonzero(self._owners >= 0).tolist():
            self.table.flat[int(self._owners[slot])] = slot
        self._placement = placement
        self._copies = copies
        self._rate, self._clock = bytes_per_second, clock
        self._bytes = 0.0  # that may be copied now
        self._asked = clock()
        self._moves: list[_Move] = []
        self._launched = self._finished = 0
        pin = bank.device.type == "cuda"
        self._ring = torch.zeros(_TURNS, 2 * _MOST_CHANGES, dtype=torch.int32, pin_memory=pin)
        self._rows = self._ring.numpy()
        self._turn = 0
        self._changes: dict[int, int] = {}  # of the flat table
        write_table(bank.table, self._ring[0], 0)  # compiles

    @property
    def num_moving(self) -> int:
        """Promotions that have begun and not ended."""
        return len(self._moves)

    def before_launch(self, *, link_is_busy: bool) -> None:
        """Called ahead of each step: writes the table, and starts copies and promotions.

        Args:
            link_is_busy: others wait for the link to the device: no copy begins.
        """
        if self._moves:
            self._end_copies()
            if not link_is_busy:
                self._start_copies()
        if not self._moves and not link_is_busy:  # so the placement knows who is where
            self._promote()
        if self._changes:
            self._write_table()
        self._launched += 1

    def finished(self) -> None:
        """Called when the step that was launched first of those unfinished has finished."""
        self._finished += 1

    def observe(self, counts: np.ndarray) -> None:
        """See `Placement`."""
        self._placement.observe(counts)

    def check_integrity(self) -> None:
        """Raises AssertionError: a slot has two owners, or table and owners differ."""
        resident = np.flatnonzero(self.table.ravel() >= 0)
        slots = self.table.ravel()[resident]
        assert len(set(slots.tolist())) == len(slots)
        assert (self._owners[slots] == resident).all()
        moving = {move.slot for move in self._moves}
        assert not moving & set(slots.tolist()) and len(moving) == len(self._moves)

    def _end_copies(self) -> None:
        left = []
        for move in self._moves:
            if move.is_done is not None and move.is_done() and self._has_room():
                self._change(move.layer, move.expert, move.slot)
                self._owners[move.slot] = move.layer * self.table.shape[1] + move.expert
                self.num_promoted += 1
            else:
                left.append(move)
        self._moves = left

    def _start_copies(self) -> None:
        for move in self._moves:
            if move.is_done is None and self._finished >= move.step:
                layer, expert, slot = move.layer, move.expert, move.slot

                def copy(layer: int = layer, expert: int = expert, slot: int = slot) -> None:
                    self._bank.fill(slot, layer, expert)

                move.is_done = self._copies.start(slot, copy)

    def _promote(self) -> None:
        now = self._clock()
        size = self._bank.host.expert_bytes
        most = max(self._rate * self.burst, float(size))
        self._bytes = min(self._bytes + (now - self._asked) * self._rate, most)
        self._asked = now
        budget = min(int(self._bytes // size), (_MOST_CHANGES - len(self._changes)) // 2)
        if budget <= 0:
            return
        for layer, expert, slot in self._placement.promotions(budget):
            assert self.table[layer, expert] < 0, "it is in the bank"
            assert all(move.slot != slot for move in self._moves), "a slot of two promotions"
            assert not any((m.layer, m.expert) == (layer, expert) for m in self._moves)
            self._bytes -= size
            owner = int(self._owners[slot])
            if owner >= 0:
                self._change(*divmod(owner, self.table.shape[1]), ON_HOST)
                self._owners[slot] = -1
            self._moves.append(_Move(layer, expert, slot, self._launched))

    def _has_room(self) -> bool:
        return len(self._changes) < _MOST_CHANGES

    def _change(self, layer: int, expert: int, slot: int) -> None:
        assert self._has_room()
        self.table[layer, expert] = slot
        self._changes[layer * self.table.shape[1] + expert] = slot

    def _write_table(self) -> None:
        self._turn = (self._turn + 1) % _TURNS
        count = len(self._changes)
        row = self._rows[self._turn]
        row[:count] = list(self._changes)
        row[_MOST_CHANGES : _MOST_CHANGES + count] = list(self._changes.values())
        self._changes.clear()
        write_table(self._bank.table, self._ring[self._turn], count)
