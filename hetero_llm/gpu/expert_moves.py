"""Experts that change places while steps run: which slots are written when.

A promotion takes four moments, each at the launch of some step:

1. The table's entry of the expert that leaves the slot becomes `ON_HOST`, by a kernel ahead of the
   step. Steps launched earlier may still read the slot.
2. When all of those have finished, a copy stream begins to write the slot.
3. When the copy has ended, the table's entry of the new expert becomes the slot, again by a kernel
   ahead of the step that is launched next.
4. The step reads the expert from the bank.

The placement has the table as the next step will find it, so no step has to be asked.

Where host memory does not hold all experts (`bridge.host_places`), the two experts change sides:

0. Before the first moment the copy stream copies the expert in the slot to a free place of host
   memory. Steps go on reading the slot. When the copy has ended, the place is published, and the
   first moment follows: the table's entry becomes `ON_HOST`.
5. After the last one, when all steps have finished that were launched while the table still led to
   the host, the new expert's place is free.

So at every moment each expert is whole where the table of a step says that it is.

Of several ranks one chooses, since a layer is as late as the slowest of them: it announces its
promotions, and the others begin each as soon as the slot is free of the one before (`order`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hetero_llm.core.null_objects import do_nothing
from hetero_llm.core.promotion import Promotion
from hetero_llm.gpu.expert_bank import ExpertBank
from hetero_llm.gpu.kernels.expert_requests import ON_HOST, write_table

_TURNS = 16
"""More than twice the steps that may be launched and not finished: each writes two tables."""


class Placement(Protocol):
    """See `expert_offload.placement.ExpertPlacement`.

    Attributes:
        table: [layers, experts] int32, changed by `choose` (or, where host memory does not hold all
            experts, by `vacate`) and by `finish`.
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
        self,
        movable: np.ndarray | None = None,
        *,
        loads_wait: bool = False,
        most: int | None = None,
    ) -> Sequence[Promotion]: ...

    def vacate(self, slot: int) -> None: ...

    def finish(self, slot: int) -> None: ...


class FixedPlacement:
    """Leaves all experts where they are.

    Args:
        table: [layers, experts] int32, slots or `ON_HOST`.
    """

    interval = 1 << 30
    observe = observe_prompt = staticmethod(do_nothing)

    def __init__(self, table: np.ndarray) -> None:
        self.table = table

    def choose(
        self,
        movable: np.ndarray | None = None,
        *,
        loads_wait: bool = False,
        most: int | None = None,
    ) -> Sequence[Promotion]:
        """See `Placement`."""
        return ()

    def vacate(self, slot: int) -> None:
        """See `Placement`."""
        raise AssertionError("nothing was promoted")

    def finish(self, slot: int) -> None:
        """See `Placement`."""
        raise AssertionError("nothing was promoted")


class OrderedPlacement(FixedPlacement):
    """Chooses nothing itself: `ExpertMoves.order` brings what another rank has chosen."""

    def __init__(self, table: np.ndarray) -> None:
        super().__init__(table)
        self._ordered: deque[Promotion] = deque()
        self._moving: dict[int, tuple[int, int]] = {}

    def order(self, promotions: Sequence[Promotion]) -> None:
        """See `ExpertMoves.order`."""
        self._ordered.extend(promotions)

    def take(self) -> list[Promotion]:
        """Takes the slots of those that may begin now from their owners."""
        taken: list[Promotion] = []
        while self._ordered and self._ordered[0].slot not in self._moving:
            one = self._ordered.popleft()
            if one.evicted is not None:
                assert self.table[one.evicted] == one.slot
                self.table[one.evicted] = ON_HOST
            self._moving[one.slot] = (one.layer, one.expert)
            taken.append(one)
        return taken

    def finish(self, slot: int) -> None:
        """See `Placement`."""
        self.table[self._moving.pop(slot)] = slot


class Copies(Protocol):
    """Where slots are written and saved, beside the stream of the steps."""

    def start(self, slot: int, copy: Callable[[], None]) -> Callable[[], bool]:
        """Runs `copy`, which writes a slot, behind the earlier ones; what it returns says whether
        the copy has ended."""
        ...

    def save(self, place: int, copy: Callable[[], None]) -> Callable[[], bool]:
        """The same for a copy that writes a place of host memory."""
        ...


class CopiesAtOnce:
    """Without a device that copies beside the host: for tests."""

    def start(self, slot: int, copy: Callable[[], None]) -> Callable[[], bool]:
        """See `Copies`."""
        copy()
        return lambda: True

    def save(self, place: int, copy: Callable[[], None]) -> Callable[[], bool]:
        """See `Copies`."""
        return self.start(place, copy)


class StreamCopies:
    """On CUDA streams of their own, one for each direction of the link."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._saving = torch.cuda.Stream(device)

    def start(self, slot: int, copy: Callable[[], None]) -> Callable[[], bool]:
        """See `Copies`."""
        with torch.cuda.stream(self.stream):
            copy()
        return self.stream.record_event().query

    def save(self, place: int, copy: Callable[[], None]) -> Callable[[], bool]:
        """See `Copies`. The slot was written behind an event that the host has seen."""
        with torch.cuda.stream(self._saving):
            copy()
        return self._saving.record_event().query


_SAVE, _CLEARED, _DRAIN = range(3)


@dataclass(slots=True)
class _Move:
    """A promotion on its way.

    Attributes:
        phase: _SAVE: the slot's owner is being copied to `place`. _CLEARED: the table does not lead
            to the slot, which is written once no step reads it. _DRAIN: the new expert is in the
            bank, and steps under way may still read `place`.
        step: number of the first step that does not read the slot, or, draining, the place.
        is_done: of the phase's copy; None: it has not begun.
    """

    layer: int
    expert: int
    slot: int
    evicted: tuple[int, int] | None
    phase: int
    step: int
    place: int = -1
    is_done: Callable[[], bool] | None = None


class ExpertMoves:
    """Writes the device's table and the bank's slots. One thread calls all methods.

    Args:
        bank: filled as the placement says.
        placement: chooses promotions; an `OrderedPlacement`: `order` brings them.
        copies: where slots are written.
        most_changes: of the table by one kernel; a power of two.

    Attributes:
        placement: see Args.
        num_promoted: promotions that have ended.
        announce: called with promotions that the placement has chosen; set where there are other
            ranks.
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
        self.announce: Callable[[Sequence[Promotion]], None] = do_nothing
        self._bank = bank
        self._places = bank.host.places
        self._copies = copies
        self._moves: list[_Move] = []
        self._launched = self._finished = 0
        pin = bank.device.type == "cuda"
        self._most = most_changes
        self._ring = torch.zeros(_TURNS, 2 * most_changes, dtype=torch.int32, pin_memory=pin)
        self._rows = self._ring.numpy()
        self._turn = 0
        # Of the flat tables of slots and of places.
        self._changes: dict[int, int] = {}
        self._moved: dict[int, int] = {}
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
            self._moves = [move for move in self._moves if not self._advance(move)]
            if not link_is_busy:
                self._start_copies()
        if chooses:
            self._promote(link_is_busy)
        if isinstance(self.placement, OrderedPlacement):
            for one in self.placement.take():
                self._begin(one)
        if self._moved and self._bank.places is not None:
            self._write(self._bank.places, self._moved)
        if self._changes:
            self._write(self._bank.table, self._changes)
        self._launched += 1

    def order(self, promotions: Sequence[Promotion]) -> None:
        """Promotes what another rank, which began with the same table, has announced. Each begins
        at the launch of a step, in their order; one whose slot is still moving lets all behind it
        wait, so a rank whose copies are late goes through the same tables."""
        assert isinstance(self.placement, OrderedPlacement) and self._places is None
        self.placement.order(promotions)

    def finished(self) -> None:
        """Called when the step that was launched first of those unfinished has finished."""
        self._finished += 1

    def _advance(self, move: _Move) -> bool:
        """Takes the next phase of a move if its copy, or the last step that reads the old place,
        has ended. Returns whether the whole move has ended."""
        if move.phase == _DRAIN:
            if self._finished < move.step:
                return False
            assert self._places is not None
            self._places.release(move.place)
            return True
        if move.is_done is None or not move.is_done():
            return False
        move.is_done = None
        if move.phase == _SAVE:
            assert self._places is not None and move.evicted is not None
            self._places.publish(move.place)
            self.placement.vacate(move.slot)
            self._moved[self._number(*move.evicted)] = move.place
            self._change(*move.evicted, ON_HOST)
            move.phase, move.step = _CLEARED, self._launched
            return False
        self.placement.finish(move.slot)
        self._change(move.layer, move.expert, move.slot)
        self.num_promoted += 1
        if self._places is None:
            return True
        move.place = self._places.leave(move.layer, move.expert)
        move.phase, move.step = _DRAIN, self._launched
        return False

    def _start_copies(self) -> None:
        for move in self._moves:
            if move.is_done is not None or move.phase == _DRAIN:
                continue
            slot, place = move.slot, move.place
            if move.phase == _SAVE:
                move.is_done = self._copies.save(place, partial(self._bank.save, slot, place))
            elif self._finished >= move.step:
                fill = partial(self._bank.fill, slot, move.layer, move.expert)
                move.is_done = self._copies.start(slot, fill)

    def _promote(self, loads_wait: bool) -> None:
        if self._places is None:
            chosen = self.placement.choose(loads_wait=loads_wait)
        else:
            # The place of an expert that has just entered is its own until it is free.
            movable = np.ones(self._bank.num_slots, bool)
            movable[[move.slot for move in self._moves]] = False
            most = self._places.num_free
            chosen = self.placement.choose(movable, loads_wait=loads_wait, most=most)
        if chosen:
            self.announce(chosen)
        for one in chosen:
            self._begin(one)

    def _begin(self, one: Promotion) -> None:
        """A promotion whose slot has been taken."""
        move = _Move(one.layer, one.expert, one.slot, one.evicted, _CLEARED, self._launched)
        self._moves.append(move)
        if one.evicted is None:
            return
        if self._places is None:
            self._change(*one.evicted, ON_HOST)
        else:
            move.phase, move.place = _SAVE, self._places.begin(*one.evicted)

    def _change(self, layer: int, expert: int, slot: int) -> None:
        self._changes[self._number(layer, expert)] = slot

    def _number(self, layer: int, expert: int) -> int:
        return layer * self._bank.host.num_experts + expert

    def _write(self, table: Tensor, entries: dict[int, int]) -> None:
        """Changes a table on the device ahead of the next step, and forgets the changes."""
        changes = list(entries.items())
        entries.clear()
        for first in range(0, len(changes), self._most):
            if first and self._bank.device.type == "cuda":
                torch.cuda.synchronize(self._bank.device)  # rare; rows of the ring stay as they are
            some = changes[first : first + self._most]
            self._turn = (self._turn + 1) % _TURNS
            row = self._rows[self._turn]
            row[: len(some)] = [number for number, _ in some]
            row[self._most : self._most + len(some)] = [value for _, value in some]
            write_table(table, self._ring[self._turn], len(some))
